"""Sizing of a deployment before it starts: parallel sizes, share of memory, lengths, and the capacity to expect.

    plan = make_plan("qwen3.6-35b-a3b-fp8", host_facts, engine="vllm", engine_version="0.33.0", wishes={})
    plan.as_dict()

Everything here is a pure function of its arguments: the same input gives the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from metalserve import catalogue
from metalserve.errors import Refusal
from metalserve.planner.assign import assign_gpus
from metalserve.planner.draft import Draft, read_draft
from metalserve.planner.kv import Capacity, kv_capacity
from metalserve.planner.learned import MeasuredStart, expected_start, measured_start, read_measured
from metalserve.planner.lora import Adapters
from metalserve.planner.parallel import tensor_parallel_problems, valid_tensor_parallel_sizes
from metalserve.planner.plan_types import Plan, PredictedBytes, Wishes, read_wishes
from metalserve.planner.resolve import PlannedModel, resolve
from metalserve.planner.sglang import plan_sglang
from metalserve.planner.versions import check_engine, check_version
from metalserve.planner.vllm_cpu import plan_cpu
from metalserve.planner.vllm_cuda import plan_cuda

__all__ = [
    "Adapters",
    "Capacity",
    "Draft",
    "MeasuredStart",
    "Plan",
    "PredictedBytes",
    "Wishes",
    "assign_gpus",
    "expected_start",
    "gpu_memory_utilization",
    "kv_capacity",
    "make_plan",
    "measured_start",
    "plan",
    "read_draft",
    "read_measured",
    "read_wishes",
    "tensor_parallel_problems",
    "tensor_parallel_size",
    "valid_tensor_parallel_sizes",
]

ModelName = str | Path | PlannedModel | catalogue.Model | Mapping[str, Any]


def make_plan(
    model: ModelName,
    host_facts: Mapping[str, Any],
    engine: str = "vllm",
    engine_version: str | None = None,
    wishes: Mapping[str, Any] | Wishes | None = None,
    *,
    extra_models: Mapping[str, Any] | None = None,
    measured: Iterable[Mapping[str, Any] | MeasuredStart] | None = None,
    image: str | None = None,
    adapters: Adapters | None = None,
    draft: Draft | None = None,
) -> Plan:
    """Size one deployment on one host.

    Args:
        model: key of the catalogue or of `extra_models`, a catalogue entry, a parsed config.json, or the path of a
            config.json or of a directory with one.
        host_facts: facts of the host, or those of `catalogue.host_from_shape`. A host without GPUs gets a CPU plan.
        engine: vllm or sglang.
        engine_version: release number; None: the newest one known here.
        wishes: the deployment (other fields than sizes are ignored), or Wishes.
        extra_models: catalogue entries of the inventory.
        measured: records of earlier starts (`measured_start`) on this host. One with the sizes of a candidate replaces
            the estimate and its margin.
        image: the engine's image; records of another image do not count.
        adapters: the LoRA adapters that the engine keeps buffers for.
        draft: a draft model of its own, which drafts the `speculative_tokens` of the wishes.

    Raises:
        Refusal: it does not fit or cannot work; says what was found, what is needed and what to change.
    """
    check_engine(engine)
    asked = read_wishes(wishes)
    planned = resolve(model, extra_models)
    version = check_version(engine, engine_version, planned.key, planned.minimum_versions.get(engine))
    if engine == "sglang":
        return plan_sglang(planned, host_facts, version, asked, adapters, draft)
    if not host_facts.get("gpus"):
        return plan_cpu(planned, host_facts, version, asked, adapters, draft)
    starts = read_measured(measured)
    return plan_cuda(planned, host_facts, version, asked, starts=starts, image=image, adapters=adapters, draft=draft)


# The short name; `make_plan` reads better where `plan` is a variable.
plan = make_plan


def tensor_parallel_size(
    model: ModelName,
    gpu_count: int,
    *,
    engine: str = "vllm",
    text_only: bool = False,
    expert_parallel: bool = False,
    extra_models: Mapping[str, Any] | None = None,
) -> int:
    """The largest tensor parallel size that the model supports on that many GPUs.

    Only the shape decides (heads, vocabulary, FP8 blocks, groups), not memory: `make_plan` looks at that too.

    Raises:
        Refusal: unknown model, or fewer than one GPU.
    """
    read_wishes(Wishes(tensor_parallel_size=gpu_count))
    planned = resolve(model, extra_models)
    sizes = valid_tensor_parallel_sizes(
        planned.shape,
        gpu_count,
        engine=check_engine(engine),
        text_only=text_only,
        expert_parallel=expert_parallel,
    )
    return max(sizes, default=1)


def gpu_memory_utilization(
    model: ModelName,
    host_facts: Mapping[str, Any],
    engine_version: str | None = None,
    wishes: Mapping[str, Any] | Wishes | None = None,
    *,
    extra_models: Mapping[str, Any] | None = None,
) -> float:
    """The share of each GPU, in hundredths, with which vLLM's first start does not run out of memory.

    The arguments are those of `make_plan`; the value is the one of that plan.

    Raises:
        Refusal: there is no such plan, or one that does not go by a share (CPU host, fixed KV pool).
    """
    plan = make_plan(model, host_facts, "vllm", engine_version, wishes, extra_models=extra_models)
    if plan.gpu_memory_utilization is None:
        raise Refusal(
            found="a plan with a fixed KV pool" if plan.device == "cuda" else "a host without GPUs",
            needed="a plan that goes by a share of GPU memory",
            change="leave `kv_cache_memory_bytes` out, or use the plan's kv_cache_memory_bytes",
        )
    return plan.gpu_memory_utilization
