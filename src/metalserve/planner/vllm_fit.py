"""Which split of the GPUs, how many sequences and how much context fit, under vLLM on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from metalserve import catalogue
from metalserve.errors import Refusal
from metalserve.planner import kv, memory
from metalserve.planner.draft import draft_bytes, draft_problems
from metalserve.planner.hardware import default_batched_tokens
from metalserve.planner.lora import adapter_bytes
from metalserve.planner.parallel import tensor_parallel_problems, valid_tensor_parallel_sizes
from metalserve.planner.units import gib
from metalserve.planner.vllm_room import Room, Split, Task, layout, room_on_gpu
from metalserve.planner.weights import Weights, mxfp4_storage, weights

# Sequences that are tried in this order when the deployment names no number; 256 is the engine's default on
# GPUs below 70 GiB, and on larger ones more sequences only cost activation memory (14 B x vocabulary each).
SEQUENCES = (256, 128, 64, 32, 16, 8)
# A shorter context than this is not worth serving; rather refuse.
LEAST_CONTEXT_TOKENS = 2048
CONTEXT_STEP_TOKENS = 1024


@dataclass(frozen=True)
class Fit:
    """Sizes that fit on the GPUs of one split."""

    split: Split
    sequences: int
    batched_tokens: int
    context_tokens: int
    utilization: float | None
    budget: memory.Budget
    kv_bytes: int
    capacity: kv.Capacity
    cut: kv.Layout
    full_context: bool
    promise_margin_bytes: int
    measured: str | None
    """What an earlier start measured, as a sentence; None: the sizes are predicted."""
    adapter_bytes: int = 0
    """Of the weights: buffers of LoRA adapters."""
    draft_bytes: int = 0
    """Of the weights: a draft model, or the model's own MTP layers."""


def _splits(task: Task) -> Iterator[Split]:
    """The splits to try, best first."""
    wishes, shape, count = task.wishes, task.model.shape, len(task.gpus.indexes)
    pipeline = wishes.pipeline_parallel_size
    if pipeline > len(shape.layers):
        raise Refusal(
            found=f"pipeline_parallel_size {pipeline} for {len(shape.layers)} layers",
            needed="at most one stage per layer",
            change="lower `pipeline_parallel_size`",
        )
    places = count // pipeline
    if wishes.tensor_parallel_size is not None:
        sizes = [wishes.tensor_parallel_size]
        if wishes.tensor_parallel_size * pipeline > count:
            raise Refusal(
                found=f"tensor_parallel_size {wishes.tensor_parallel_size} x pipeline_parallel_size {pipeline}"
                f" on {count} GPU{'s' * (count > 1)}",
                needed=f"{wishes.tensor_parallel_size * pipeline} GPUs",
                change="lower `tensor_parallel_size`, or give the deployment more `gpus`",
            )
    else:
        valid = valid_tensor_parallel_sizes(
            shape, max(places, 1), expert_parallel=wishes.expert_parallel, text_only=wishes.text_only
        ) or [1]
        order = _with_nvlink(task, valid) if task.gpus.nvlink else valid
        sizes = [tp for tp in order if places % tp == 0] + [tp for tp in order if places % tp]
    for tp in sizes:
        replicas = places // tp if places % tp == 0 else 1
        data = wishes.data_parallel_size or replicas
        if tp * pipeline * data > count:
            raise Refusal(
                found=f"{tp} x {pipeline} x {data} GPUs (tensor x pipeline x data parallel) on {count}",
                needed=f"{tp * pipeline * data} GPUs",
                change="lower `data_parallel_size`, or give the deployment more `gpus`",
            )
        # Replicas of a mixture of experts share their experts; whole experts keep FP8 blocks and groups intact.
        yield Split(tp, pipeline, data, wishes.expert_parallel or (data > 1 and shape.experts is not None))


def _with_nvlink(task: Task, valid: list[int]) -> list[int]:
    """The largest size that copies no KV heads, then those that do, then the smaller ones.

    Beyond the KV heads each further GPU holds keys and values that another one has: replicas hold more (vLLM,
    docs/serving/data_parallel_deployment.md). An MLA latent is on every GPU whatever the size; there the largest goes
    first.
    """
    shape = task.model.shape
    if shape.mla:
        return sorted(valid, reverse=True)
    best = max(tp for tp in valid if tp <= shape.kv_heads or tp == min(valid))
    return [best, *(tp for tp in valid if tp > best), *sorted((tp for tp in valid if tp < best), reverse=True)]


def best_fit(task: Task) -> Fit:
    """The first split with the full context, else the one with the longest.

    Raises:
        Refusal: no split fits.
    """
    fits: list[Fit] = []
    refusals: list[Refusal] = []
    for split in _splits(task):
        problems = tensor_parallel_problems(
            task.model.shape,
            split.tensor,
            expert_parallel=split.expert_parallel,
            text_only=task.wishes.text_only,
            expert_ranks=split.tensor * split.data,
        ) or draft_problems(task.draft, split.tensor)
        if problems:
            refusals.append(_invalid_split(task, split, problems))
            continue
        try:
            fit = fit_split(task, split)
        except Refusal as refusal:
            refusals.append(refusal)
            continue
        if fit.full_context:
            return fit
        fits.append(fit)
    if fits:
        return max(fits, key=lambda fit: fit.context_tokens)
    raise refusals[-1 if not task.gpus.nvlink else 0]


def _invalid_split(task: Task, split: Split, problems: list[str]) -> Refusal:
    valid = valid_tensor_parallel_sizes(
        task.model.shape, 16, expert_parallel=split.expert_parallel, text_only=task.wishes.text_only
    )
    return Refusal(
        found=f"tensor_parallel_size {split.tensor} for {task.model.key}: {problems[0]}",
        needed=f"one of {', '.join(map(str, valid))}",
        change="set `tensor_parallel_size`",
    )


def _adapter_bytes(task: Task, split: Split) -> int:
    return adapter_bytes(
        task.model.shape,
        task.adapters,
        tensor_parallel_size=split.tensor,
        data_parallel_size=split.data,
        pipeline_parallel_size=split.pipeline,
        expert_parallel=split.expert_parallel,
    )


def _load(task: Task, split: Split, sequences: int, batched: int) -> memory.Load:
    return memory.Load(
        tensor_parallel_size=split.tensor,
        max_sequences=sequences,
        max_batched_tokens=batched,
        eager=task.wishes.eager,
        vision=task.vision,
        communicating=split.tensor * split.data if task.model.shape.experts else split.tensor,
        draft_tokens=task.wishes.speculative_tokens,
        capability=task.gpus.capability or 90,
        adapters=task.adapters is not None,
        draft=task.draft,
    )


def fit_split(task: Task, split: Split) -> Fit:
    """The most sequences with which the wished context fits; the longest context when none does.

    Raises:
        Refusal: weights do not fit, or not even a short context does.
    """
    wishes, shape = task.wishes, task.model.shape
    loaded = weights(
        shape,
        tensor_parallel_size=split.tensor,
        data_parallel_size=split.data,
        pipeline_parallel_size=split.pipeline,
        expert_parallel=split.expert_parallel,
        text_only=wishes.text_only,
        draft=wishes.speculative_tokens > 0 and task.draft is None,
        fp8_marlin=0 < task.gpus.capability < 89,
        mxfp4=mxfp4_storage(task.gpus.capability, task.release.mxfp4_scales_twice),
        stored=task.model.stored,
    )
    if task.adapters:
        loaded = replace(loaded, adapter_bytes=_adapter_bytes(task, split))
    if task.draft:
        loaded = replace(loaded, draft_bytes=draft_bytes(task.draft, split.tensor))
    options: tuple[int, ...] = (wishes.max_sequences,) if wishes.max_sequences else SEQUENCES
    if wishes.max_batched_tokens and not wishes.max_sequences:
        # Every running sequence takes at least one token of a batch.
        options = tuple(n for n in SEQUENCES if n <= wishes.max_batched_tokens) or (wishes.max_batched_tokens,)
    last: Refusal | None = None
    for sequences in options:
        try:
            return _sized(task, split, loaded, sequences, shrink=False)
        except Refusal as refusal:
            last = refusal
    if wishes.context_length is None:
        # As much context as fits: with few sequences, so that length wins.
        for sequences in options[min(3, len(options) - 1) :]:
            try:
                return _sized(task, split, loaded, sequences, shrink=True)
            except Refusal as refusal:
                last = refusal
    if last is None:
        raise AssertionError("there is always one option")
    raise last


def _sized(task: Task, split: Split, loaded: Weights, sequences: int, *, shrink: bool) -> Fit:
    wishes, shape = task.wishes, task.model.shape
    batched = max(wishes.max_batched_tokens or default_batched_tokens(task.gpus), 1)
    if wishes.max_batched_tokens is None:
        batched = max(batched, sequences)
    cut = layout(task, split, batched)
    if shape.hybrid and task.prefix_caching and wishes.max_batched_tokens is None:
        # A prefill step ends on a block boundary, so a step must hold at least one block.
        while batched < cut.block_tokens:
            batched *= 2
        cut = layout(task, split, batched)
    load = _load(task, split, sequences, batched)
    room: Room = room_on_gpu(task, split, load, loaded)
    _check_weights(task, split, room.budget)
    fixed = wishes.kv_cache_memory_bytes
    if fixed is not None:
        _check_fixed(task, room.budget, fixed)
    available = room.budget.kv_bytes if fixed is None else fixed
    margin = room.margin_bytes if fixed is None else 0
    promised = available - margin
    context = task.context_tokens
    longest = cut.longest_tokens(promised, context)
    if longest < context:
        if not shrink or longest < LEAST_CONTEXT_TOKENS:
            raise kv.too_short(cut, promised, context)
        context = longest // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS
    capacity = kv.capacity(cut, available, context, task.release, shape.hybrid)
    if capacity is None:
        raise kv.too_short(cut, available, context)
    sequences = _checked_sequences(task, cut, promised, capacity, sequences)
    if sequences != load.max_sequences:
        room = room_on_gpu(task, split, replace(load, max_sequences=sequences), loaded)
        available = room.budget.kv_bytes if fixed is None else fixed
        capacity = kv.capacity(cut, available, context, task.release, shape.hybrid)
        if capacity is None:
            raise kv.too_short(cut, available, context)
    return Fit(
        split=split,
        sequences=sequences,
        batched_tokens=batched,
        context_tokens=context,
        utilization=None if fixed is not None else room.utilization,
        budget=room.budget,
        kv_bytes=available,
        capacity=capacity,
        cut=cut,
        full_context=context == task.context_tokens,
        promise_margin_bytes=margin,
        measured=room.measured if fixed is None else None,
        adapter_bytes=loaded.adapter_bytes,
        draft_bytes=loaded.draft_bytes,
    )


def _check_weights(task: Task, split: Split, budget: memory.Budget) -> None:
    """Refuse when the weights alone are more than the budget."""
    if budget.kv_bytes > 0 or task.wishes.kv_cache_memory_bytes is not None:
        return
    # What the rest of the start takes is named too when the weights would just fit.
    short = budget.weights_bytes < budget.requested_bytes
    rest = budget.requested_bytes - budget.kv_bytes - budget.weights_bytes
    also = f" and {gib(rest)} of buffers, activations and graphs" if short else ""
    one = "one " if split.tensor * split.pipeline == 1 else "each "
    raise Refusal(
        found=f"{task.model.key} needs {gib(budget.weights_bytes)} of weights{also}, "
        f"{one}{task.gpus.name} gives {gib(budget.requested_bytes)}",
        needed=f"{gib(-budget.kv_bytes)} more on each GPU before any KV cache",
        change=_advice(task, split),
    )


def _advice(task: Task, split: Split) -> str:
    ideas = []
    key = f"{task.model.key}-fp8"
    if task.model.shape.quantization is None and key in catalogue.models():
        ideas.append(f"use the FP8 revision ({key})")
    larger = [
        tp
        for tp in valid_tensor_parallel_sizes(task.model.shape, 16, text_only=task.wishes.text_only)
        if tp > split.tensor
    ]
    total = weights(task.model.shape, text_only=task.wishes.text_only).total_bytes
    fitting = [tp for tp in larger if total / tp < 0.8 * task.gpus.usable_bytes]
    if fitting or larger:
        ideas.append(f"tensor_parallel_size {(fitting or larger)[0]}")
    return ", or ".join(ideas) or "use a smaller model or larger GPUs"


def _check_fixed(task: Task, budget: memory.Budget, fixed: int) -> None:
    """Refuse a fixed KV pool that does not fit beside everything else."""
    rest = budget.requested_bytes - budget.kv_bytes + budget.outside_bytes + budget.unprofiled_bytes
    room = budget.total_bytes - task.gpus.used_bytes - rest - memory.constants()["margin_bytes"]
    if fixed > room:
        raise Refusal(
            found=f"kv_cache_memory_bytes is {gib(fixed)}; {task.gpus.name} has {gib(budget.total_bytes)}, "
            f"of which weights, activations and the runtime take {gib(rest)}",
            needed=f"at most {gib(max(room, 0))} for the KV cache",
            change="lower `kv_cache_memory_bytes`, or leave it out",
        )


def _checked_sequences(task: Task, cut: kv.Layout, promised: int, capacity: kv.Capacity, sequences: int) -> int:
    """Never more sequences than the cache can start with."""
    blocks = max(promised // cut.block_bytes, 1)
    if task.wishes.max_sequences is not None:
        limit = blocks if task.model.shape.hybrid else max(blocks - 1, 1)
        if sequences > limit and task.model.shape.hybrid and task.release.mamba_check and not task.wishes.eager:
            raise Refusal(
                found=f"max_sequences {sequences}, but only {limit} state blocks fit beside the rest",
                needed="one state block for each sequence, or the engine refuses to capture its graphs",
                change=f"set `max_sequences` to at most {limit}, or give the deployment more memory",
            )
        return sequences
    # A short request still holds one block of each group, so more sequences than this never run.
    runnable = max(blocks // cut.blocks_per_request(1), 1)
    if runnable >= sequences:
        return sequences
    return max(runnable // 8 * 8, min(runnable, 8), 1)
