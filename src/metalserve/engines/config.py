"""From a deployment, its model and its plan to the engine's own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metalserve.engines.arguments import check_arguments, check_registered, check_value
from metalserve.engines.catalogue_entry import text_only_supported
from metalserve.engines.flags import FlagTable, flags_for
from metalserve.engines.info import EngineInfo, engine_of
from metalserve.engines.sglang_settings import sglang_settings
from metalserve.engines.vllm_settings import vllm_settings
from metalserve.errors import Refusal

_SETTINGS = {"vllm": vllm_settings, "sglang": sglang_settings}


def _dest(table: FlagTable, name: str) -> str:
    flag = table.find(name)
    return flag.dest if flag is not None else name


def _check_speculation(deployment: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a second way to draft, and a draft model that nobody stages.

    Raises:
        Refusal: naming the flag.
    """
    drafting = [name for name in own if name.startswith(("speculative-", "spec-"))]
    if drafting and deployment.get("draft_model"):
        raise Refusal(
            found=f"engine_args sets '{drafting[0]}' beside draft_model {deployment['draft_model']}",
            needed="one of them: the plan knows the memory of the draft model alone",
            change=f"remove engine_args.{drafting[0]} or `draft_model` of the deployment",
        )
    if '"model"' in str(own.get("speculative-config", "")):
        raise Refusal(
            found="engine_args sets 'speculative-config' with a model",
            needed="a draft model whose weights are staged and whose memory is planned",
            change="draft_model and speculative_tokens of the deployment instead of engine_args.speculative-config",
        )


def engine_config(
    deployment: Mapping[str, Any],
    model: Mapping[str, Any],
    plan: Mapping[str, Any],
    info: EngineInfo | None = None,
) -> dict[str, Any]:
    """The content of engine.yaml.

    Args:
        deployment: an item of ``serving_deployments``.
        model: its catalogue entry; ``key``, ``parsers`` and ``shape`` are read.
        plan: sizes of the deployment on its host. ``device`` is ``cuda`` or ``cpu``; ``max_model_len`` and
            ``max_num_batched_tokens`` are tokens, ``kv_cache_memory_bytes`` bytes per GPU,
            ``gpu_memory_utilization`` a share of 0 to 1.
        info: engine and version to write for, where they are not the deployment's own or the catalogue's.

    Returns:
        Flag -> value in the spelling of the engine's version, with ``engine_args`` of the deployment added or
        put in place of what the plan says. No value is false or null.

    Raises:
        Refusal: a flag the version does not have, a value it does not take, a setting the engine cannot do.

    """
    info = info or engine_of(deployment)
    if deployment.get("text_only") and not text_only_supported(model):
        raise Refusal(
            found=f"text_only for the model {model['key']}, which has no vision part that could be left out",
            needed="a model with a vision_config in its shape, or no text_only",
            change="remove text_only of the deployment",
        )
    if plan.get("gpu_memory_utilization") is None and plan.get("kv_cache_memory_bytes") is None:
        raise Refusal(
            found="a plan that bounds neither the share of memory nor the KV cache",
            needed="gpu_memory_utilization (0 to 1) or kv_cache_memory_bytes in the plan",
            change="memory_share or kv_cache_memory_bytes of the deployment",
        )
    table = flags_for(info.engine, info.version)
    config: dict[str, Any] = {}
    for name, value in _SETTINGS[info.engine](deployment, model, plan, table).items():
        spelling, normal = check_value(table, name, value)
        config[spelling] = normal
    own = check_arguments(info.engine, info.version, deployment.get("engine_args") or {})
    _check_speculation(deployment, own)
    replaced = {_dest(table, name) for name in own}
    config = {name: value for name, value in config.items() if _dest(table, name) not in replaced}
    config.update(own)
    check_registered(table, config)
    return config
