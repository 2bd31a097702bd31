"""What a deployment and its plan mean in vLLM's flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metalserve.engines.behaviour import vllm_behaviour, wanted_parsers
from metalserve.engines.flags import FlagTable
from metalserve.engines.info import engine_info
from metalserve.engines.lora import vllm_adapters


def vllm_settings(
    deployment: Mapping[str, Any], model: Mapping[str, Any], plan: Mapping[str, Any], table: FlagTable
) -> dict[str, Any]:
    """Flags by their positive names with values that may be false; every size comes from the plan.

    Sizes are written out even where they equal the engine's default, because defaults differ by version and GPU
    (utilization 0.9 up to 0.17, 0.92 later; 1024 sequences on 80 GB).
    """
    settings: dict[str, Any] = {
        "model": f"/models/{model['key']}",
        "served-model-name": list(deployment.get("served_names") or [model["key"]]),
        "host": deployment.get("bind_address") or "0.0.0.0",  # noqa: S104 (the documented default)
        "port": deployment["port"],
        "tensor-parallel-size": plan["tensor_parallel_size"],
    }
    for flag, key in (
        ("pipeline-parallel-size", "pipeline_parallel_size"),
        ("data-parallel-size", "data_parallel_size"),
    ):
        if plan.get(key, 1) > 1:
            settings[flag] = plan[key]
    if plan.get("expert_parallel"):
        settings["enable-expert-parallel"] = True
    settings["max-model-len"] = plan["max_model_len"]
    settings["max-num-seqs"] = plan["max_num_seqs"]
    settings["max-num-batched-tokens"] = plan["max_num_batched_tokens"]
    # With a fixed pool the share still decides the check of free memory before the start.
    if plan.get("gpu_memory_utilization") is not None:
        settings["gpu-memory-utilization"] = plan["gpu_memory_utilization"]
    if plan.get("kv_cache_memory_bytes") is not None:
        settings["kv-cache-memory-bytes"] = plan["kv_cache_memory_bytes"]
    settings["kv-cache-dtype"] = plan["kv_cache_dtype"]
    if plan.get("prefix_caching") is not None:
        settings["enable-prefix-caching"] = plan["prefix_caching"]
    for flag, wanted in (
        ("disable-custom-all-reduce", plan.get("disable_custom_all_reduce")),
        ("enforce-eager", plan.get("enforce_eager", deployment.get("eager"))),
        ("language-model-only", deployment.get("text_only")),
    ):
        if wanted:
            settings[flag] = True
    if deployment.get("speculative_tokens"):
        draft = deployment.get("draft")
        settings["speculative-config"] = {
            "num_speculative_tokens": deployment["speculative_tokens"],
            **({"method": draft.method, "model": f"/models/{draft.key}"} if draft else {"method": "mtp"}),
        }
    settings.update(vllm_adapters(deployment, table))
    settings.update(vllm_behaviour(deployment, plan))
    tool, reasoning = wanted_parsers(deployment, model)
    if tool:
        settings["enable-auto-tool-choice"] = True
        settings["tool-call-parser"] = tool
    if reasoning:
        settings["reasoning-parser"] = reasoning
    if table.find("shutdown-timeout") is not None:
        settings["shutdown-timeout"] = engine_info("vllm").drain_seconds
    return settings
