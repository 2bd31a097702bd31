"""The memory one GPU offers for given sizes under vLLM: by estimate, or by what earlier starts measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from metalserve.errors import Refusal
from metalserve.planner import kv, learned, memory
from metalserve.planner.draft import Draft
from metalserve.planner.hardware import Gpus
from metalserve.planner.lora import Adapters
from metalserve.planner.plan_types import Wishes
from metalserve.planner.resolve import PlannedModel
from metalserve.planner.units import gib
from metalserve.planner.versions import VllmBehaviour, newer_than_known
from metalserve.planner.weights import Weights


@dataclass(frozen=True)
class Split:
    """How the GPUs are divided."""

    tensor: int
    pipeline: int
    data: int
    expert_parallel: bool

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True)
class Task:
    """Everything that is the same for all splits."""

    model: PlannedModel
    release: VllmBehaviour
    version: str
    wishes: Wishes
    gpus: Gpus
    vision: bool
    prefix_caching: bool
    gdn_backend: str
    context_tokens: int
    starts: tuple[learned.MeasuredStart, ...] = ()
    image: str | None = None
    adapters: Adapters | None = None
    draft: Draft | None = None


@dataclass(frozen=True)
class Room:
    """The budget of one GPU, and how sure it is."""

    utilization: float
    budget: memory.Budget
    margin_bytes: int
    """What is kept back before a context is promised."""
    measured: str | None
    """The sentence of a plan that goes by a measurement."""


@dataclass(frozen=True)
class _Seen:
    """One earlier start: what it took beside its KV cache and beside its budget, each with what is estimated for it."""

    start: learned.MeasuredStart
    taken_bytes: int
    taken_estimate_bytes: int
    outside_bytes: int | None
    outside_estimate_bytes: int

    @property
    def taken_more_bytes(self) -> int:
        """How far the estimate was too low."""
        return max(self.taken_bytes - self.taken_estimate_bytes, 0)

    @property
    def outside_more_bytes(self) -> int:
        """The same for what is outside the budget."""
        return 0 if self.outside_bytes is None else max(self.outside_bytes - self.outside_estimate_bytes, 0)


def room_on_gpu(task: Task, split: Split, load: memory.Load, loaded: Weights) -> Room:
    """The budget for these sizes.

    A start with the same sizes replaces the estimate and its margin. Starts that differ in sequences or batched tokens
    alone only warn: where their estimate was too low, this one is lowered by as much, and the margin stays.
    """
    shape, total = task.model.shape, task.gpus.usable_bytes
    wanted = _wanted(task, split, load)
    seen = [_seen(task, split, start, load, loaded) for start in _starts(task, split, wanted)]
    same = [
        found
        for found in seen
        if found.start.max_num_seqs == load.max_sequences
        and found.start.max_num_batched_tokens == load.max_batched_tokens
    ]
    if same:
        # The one with the least KV cache for its budget.
        worst = max(same, key=lambda found: (found.taken_bytes, found.outside_bytes or 0))
        utilization = _utilization(task, load, worst.outside_bytes)
        estimate = memory.budget(shape, task.release, load, loaded, total_bytes=total, utilization=utilization)
        return Room(
            utilization,
            estimate.with_measured(worst.taken_bytes, worst.outside_bytes),
            int(memory.constants()["promise_margin_bytes"]["repeated"]),
            learned.sentence(worst.start, worst.taken_bytes, worst.taken_estimate_bytes),
        )
    numbers = memory.constants()["promise_margin_bytes"]
    margin = int(numbers["measured" if task.release.version == "0.24" else "other"])
    if newer_than_known("vllm", task.version):
        margin *= 2
    if task.vision and shape.vision and shape.vision.kind != "qwen":
        margin += int(numbers["other_vision"])
    outside_more = max((found.outside_more_bytes for found in seen), default=0)
    taken_more = max((found.taken_more_bytes for found in seen), default=0)
    outside = memory.outside_bytes(shape, task.release, load) + outside_more
    utilization = _utilization(task, load, outside)
    budget = memory.budget(shape, task.release, load, loaded, total_bytes=total, utilization=utilization)
    if not outside_more and not taken_more:
        return Room(utilization, budget, margin, None)
    budget = replace(budget, activation_bytes=budget.activation_bytes + taken_more, outside_bytes=outside)
    return Room(utilization, budget, margin, learned.warning(taken_more, outside_more))


def _wanted(task: Task, split: Split, load: memory.Load) -> dict[str, object]:
    return {
        "engine": "vllm",
        "engine_version": task.version,
        "model": task.model.key,
        "gpu_name": task.gpus.name,
        "tensor_parallel_size": split.tensor,
        "pipeline_parallel_size": split.pipeline,
        "data_parallel_size": split.data,
        "expert_parallel": split.expert_parallel,
        "enforce_eager": load.eager,
        "text_only": task.wishes.text_only,
        "speculative_tokens": load.draft_tokens,
    }


def _starts(task: Task, split: Split, wanted: Mapping[str, object]) -> list[learned.MeasuredStart]:
    return [
        start
        for start in learned.matching(task.starts, wanted, gpu_memory_bytes=task.gpus.usable_bytes, image=task.image)
        if layout(task, split, start.max_num_batched_tokens, start.kv_cache_dtype).block_tokens
        == start.block_size_tokens
    ]


def _seen(task: Task, split: Split, start: learned.MeasuredStart, load: memory.Load, loaded: Weights) -> _Seen:
    own = replace(load, max_sequences=start.max_num_seqs, max_batched_tokens=start.max_num_batched_tokens)
    shape = task.model.shape
    estimate = memory.budget(
        shape,
        task.release,
        own,
        loaded,
        total_bytes=start.gpu_memory_bytes,
        utilization=start.gpu_memory_utilization,
    )
    cut = layout(task, split, start.max_num_batched_tokens, start.kv_cache_dtype)
    return _Seen(
        start=start,
        taken_bytes=learned.taken_bytes(start, cut.block_bytes),
        taken_estimate_bytes=estimate.requested_bytes - estimate.kv_bytes,
        outside_bytes=None if start.used_bytes is None else max(start.used_bytes - start.requested_bytes, 0),
        outside_estimate_bytes=estimate.outside_bytes,
    )


def layout(task: Task, split: Split, batched: int, kv_cache_dtype: str | None = None) -> kv.Layout:
    """The cut of the cache for that split and batch; `kv_cache_dtype` None: as wished."""
    return kv.layout(
        task.model.shape,
        task.release,
        tensor_parallel_size=split.tensor,
        pipeline_parallel_size=split.pipeline,
        kv_cache_dtype=kv_cache_dtype or task.wishes.kv_cache_dtype,
        prefix_caching=task.prefix_caching,
        gdn_prefill_backend=task.gdn_backend,
        draft_tokens=task.wishes.speculative_tokens,
        max_batched_tokens=batched,
        draft=task.draft.shape if task.draft else None,
    )


def _utilization(task: Task, load: memory.Load, outside_bytes: int | None) -> float:
    """The share of memory; `outside_bytes` is what an earlier start took beside its budget, None: the estimate."""
    gpus, share = task.gpus, task.wishes.memory_share
    outside = memory.outside_bytes(task.model.shape, task.release, load) if outside_bytes is None else outside_bytes
    safe = memory.safe_utilization(
        task.model.shape,
        task.release,
        load,
        total_bytes=gpus.usable_bytes,
        used_bytes=gpus.used_bytes,
        outside=outside,
    )
    if share is None:
        return safe
    within = math.floor(100 * (share * gpus.usable_bytes - outside) / gpus.usable_bytes) / 100
    if within <= 0:
        raise Refusal(
            found=f"memory_share {share} of {gpus.name} is {gib(share * gpus.usable_bytes)}",
            needed=f"more than the {gib(outside)} that the engine takes beside its budget",
            change="raise `memory_share`",
        )
    return min(safe, within)
