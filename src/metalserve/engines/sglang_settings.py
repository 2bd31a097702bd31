"""What a deployment and its plan mean in SGLang's flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metalserve.engines.behaviour import sglang_behaviour, wanted_parsers
from metalserve.engines.catalogue_entry import parsers_of
from metalserve.engines.flags import FlagTable
from metalserve.engines.lora import sglang_adapters
from metalserve.errors import Refusal
from metalserve.planner.draft import EAGLE3, STANDALONE
from metalserve.planner.sglang_options import SglangOptions, read_options

# vLLM's name of an 8-bit KV cache is no choice of SGLang's.
_KV_CACHE_DTYPE = {"fp8": "fp8_e4m3"}
# SGLang's names of the ways to draft with a model of its own.
_ALGORITHMS = {EAGLE3: "EAGLE3", STANDALONE: "STANDALONE"}
_JSON_PARSERS = ("qwen", "qwen25")


def _served_name(deployment: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """The one name SGLang can serve; ``:`` separates a LoRA adapter there and is asserted against."""
    names = list(deployment.get("served_names") or [model["key"]])
    if len(names) > 1:
        raise Refusal(
            found=f"{len(names)} served names ({', '.join(names)}) with SGLang",
            needed="one name; SGLang has no second one and does not check the name of a request",
            change="served_names of the deployment, and let the gateway map further names",
        )
    if ":" in names[0]:
        raise Refusal(
            found=f"the served name '{names[0]}' with SGLang",
            needed="a name without ':', which separates a LoRA adapter in requests",
            change="served_names of the deployment",
        )
    return str(names[0])


def _check_tool_parser(deployment: Mapping[str, Any], model: Mapping[str, Any], asked: str | None) -> None:
    """Refuse the JSON parser of Qwen2.5 and Qwen3 for a model that writes its calls in another form.

    SGLang has the parser `qwen` and starts; tool calls then come back as plain text, without an error.
    """
    own = deployment.get("engine_args") or {}
    asked = own.get("tool-call-parser", own.get("tool_call_parser", asked))
    tool, _ = parsers_of(model, "sglang")
    if asked in _JSON_PARSERS and tool not in (None, *_JSON_PARSERS):
        raise Refusal(
            found=f"tool_parser {asked} for {model['key']}: it reads the JSON form of Qwen2.5 and Qwen3",
            needed=f"{tool}, the parser of the form that this model writes; with the other, calls come back as text",
            change="remove tool_parser (or engine_args.tool-call-parser) of the deployment; the catalogue names it",
        )


def _cpu_settings(plan: Mapping[str, Any]) -> dict[str, Any]:
    if plan["device"] != "cpu":
        return {}
    # The default CPU backend wants Intel AMX; torch_native runs everywhere, without the overlap scheduler. The pool is
    # given in tokens, because what is free on the host at the start is no measure.
    return {
        "device": "cpu",
        "attention-backend": "torch_native",
        "disable-overlap-schedule": True,
        "max-total-tokens": plan["kv_cache_tokens"],
    }


def _speculative_settings(deployment: Mapping[str, Any]) -> dict[str, Any]:
    draft_tokens, draft = deployment.get("speculative_tokens") or 0, deployment.get("draft")
    if not draft_tokens:
        return {}
    # One chain of drafts: every step drafts one token, and the verified token comes on top.
    return {
        "speculative-algorithm": _ALGORITHMS[draft.method] if draft else "NEXTN",
        **({"speculative-draft-model-path": f"/models/{draft.key}"} if draft else {}),
        "speculative-num-steps": draft_tokens,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": draft_tokens + 1,
    }


def _eager_settings(table: FlagTable) -> dict[str, Any]:
    """No CUDA graphs; 0.5.23 has a backend for each phase, 0.5.10 two switches."""
    if table.find("cuda-graph-backend-decode"):
        return {"cuda-graph-backend-decode": "disabled", "cuda-graph-backend-prefill": "disabled"}
    return {"disable-cuda-graph": True, "disable-piecewise-cuda-graph": True}


def _option_settings(options: SglangOptions, table: FlagTable) -> dict[str, Any]:
    """The field `sglang` of the deployment in flags; `static_fraction` is in the plan already."""
    settings: dict[str, Any] = {}
    # Renamed after 0.5.10.
    renamed = table.find("mamba-radix-cache-strategy")
    strategy = "mamba-radix-cache-strategy" if renamed else "mamba-scheduler-strategy"
    for flag, value in (
        ("mamba-full-memory-ratio", options.state_memory_ratio),
        ("mamba-ssm-dtype", options.state_dtype),
        (strategy, options.radix_strategy),
        ("schedule-policy", options.schedule_policy),
        ("schedule-conservativeness", options.schedule_conservativeness),
        ("max-queued-requests", options.max_queued_requests),
        ("disaggregation-mode", options.disaggregation_mode),
        ("disaggregation-transfer-backend", options.disaggregation_transfer),
        ("disaggregation-bootstrap-port", options.disaggregation_bootstrap_port),
    ):
        if value is not None:
            settings[flag] = value
    if options.radix_strategy == "no_buffer":
        # It supports neither the overlap scheduler nor larger pages, and SGLang stops instead of turning them off.
        settings.update({"disable-overlap-schedule": True, "page-size": 1})
    return settings


def sglang_settings(
    deployment: Mapping[str, Any], model: Mapping[str, Any], plan: Mapping[str, Any], table: FlagTable
) -> dict[str, Any]:
    """Flags in SGLang's main spelling; every size comes from the plan.

    Raises:
        Refusal: several served names or one with ``:``; a KV cache fixed in bytes, which SGLang cannot do; text_only
            with a version that cannot leave the vision part out.

    """
    if plan.get("kv_cache_memory_bytes") is not None:
        raise Refusal(
            found=f"a KV cache fixed at {plan['kv_cache_memory_bytes']} bytes with SGLang {table.table_version}",
            needed="a share of memory; SGLang caps its pool in tokens (max-total-tokens), not in bytes",
            change="memory_share instead of kv_cache_memory_bytes, or engine_args.max-total-tokens",
        )
    if deployment.get("text_only") and not table.find("language-model-only"):
        raise Refusal(
            found=f"text_only with SGLang {table.table_version}",
            needed="a version with the flag language-model-only, such as 0.5.23",
            change="remove text_only of the deployment, or raise engine_version",
        )
    settings: dict[str, Any] = {
        "model-path": f"/models/{model['key']}",
        "served-model-name": _served_name(deployment, model),
        "host": deployment.get("bind_address") or "0.0.0.0",  # noqa: S104 (the documented default)
        "port": deployment["port"],
        "tp-size": plan["tensor_parallel_size"],
    }
    for flag, key in (("pp-size", "pipeline_parallel_size"), ("dp-size", "data_parallel_size")):
        if plan.get(key, 1) > 1:
            settings[flag] = plan[key]
    if plan.get("expert_parallel"):
        settings["ep-size"] = plan["tensor_parallel_size"]
    settings["context-length"] = plan["max_model_len"]
    settings["max-running-requests"] = plan["max_num_seqs"]
    settings["chunked-prefill-size"] = plan["max_num_batched_tokens"]
    settings["mem-fraction-static"] = plan["gpu_memory_utilization"]
    settings["kv-cache-dtype"] = _KV_CACHE_DTYPE.get(plan["kv_cache_dtype"], plan["kv_cache_dtype"])
    for flag, wanted in (
        ("disable-radix-cache", plan.get("prefix_caching") is False),
        ("disable-custom-all-reduce", plan.get("disable_custom_all_reduce")),
        ("language-model-only", deployment.get("text_only")),
    ):
        if wanted:
            settings[flag] = True
    if plan.get("enforce_eager", deployment.get("eager")) or plan["device"] == "cpu":
        settings.update(_eager_settings(table))
    settings.update(_cpu_settings(plan))
    settings.update(_speculative_settings(deployment))
    settings.update(_option_settings(read_options(deployment.get("sglang")), table))
    settings.update(sglang_adapters(deployment))
    settings.update(sglang_behaviour(deployment, plan))
    tool, reasoning = wanted_parsers(deployment, model)
    _check_tool_parser(deployment, model, tool)
    if reasoning:
        settings["reasoning-parser"] = reasoning
    if tool:
        settings["tool-call-parser"] = tool
    settings["enable-metrics"] = True
    return settings
