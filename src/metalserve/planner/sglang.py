"""The plan of an SGLang deployment on NVIDIA GPUs, as SGLang 0.5.23 divides the memory.

Sources: server_args.py (mem_fraction_static, chunked_prefill_size, graph sizes), mem_cache/kv_cache_configurator.py
(pools). The default fraction equals SGLang's own resolver on the GPUs it was compared for, see docs/planner.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metalserve.errors import Refusal
from metalserve.planner import kv, memory
from metalserve.planner.hardware import Gpus, check_capability, chosen_gpus
from metalserve.planner.parallel import tensor_parallel_problems, valid_tensor_parallel_sizes
from metalserve.planner.plan_types import Plan, PredictedBytes, Wishes
from metalserve.planner.resolve import PlannedModel
from metalserve.planner.shape import Shape
from metalserve.planner.units import MIB, gib
from metalserve.planner.versions import newer_than_known
from metalserve.planner.vllm_cuda import check_context
from metalserve.planner.weights import weights

# memory.total below (MiB) -> chunk, captured decode batch, the same with tensor parallel 4 or more.
_TIERS = (
    (20480, 2048, 8, 8),
    (35840, 4096, 48, 160),
    (61440, 4096, 32, 160),
    (163840, 8192, 256, 512),
    (math.inf, 16384, 512, 512),
)
_LARGE_MIB = 61440
MAMBA_RATIO = 0.9
# State slots one running request holds: the radix cache with an extra buffer (the default), or without the cache.
SLOTS_WITH_CACHE, SLOTS_WITHOUT_CACHE = 5, 1
MULTIMODAL_BYTES = 100 * MIB
# Fractions tried, in this order, when the default leaves no room for one request of the wished length.
HIGHER_FRACTIONS = (0.88, 0.90)
SPECULATIVE_RUNNING = 48


@dataclass(frozen=True)
class Pools:
    """What SGLang makes of a budget (bytes per GPU)."""

    slots: int
    state_bytes: int
    kv_bytes: int
    tokens: int
    max_running: int


def tier(total_mib: float, tensor_parallel_size: int) -> tuple[int, int]:
    """Chunk of prefill tokens and largest captured decode batch for a card of that memory.total."""
    for limit, chunk, small, large in _TIERS:
        if total_mib < limit:
            return chunk, large if tensor_parallel_size >= 4 else small
    raise AssertionError("the last tier has no limit")


def prefill_captures(largest: int) -> int:
    """Number of captured prefill sizes up to the largest."""
    sizes = [
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, max(largest, 4608) + 1, 512),
    ]
    return sum(size <= largest for size in sizes)


def default_fraction(
    shape: Shape,
    total_mib: float,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    max_running: int | None = None,
    multimodal: bool | None = None,
    vision_hidden: int | None = None,
) -> float:
    """SGLang's own `mem_fraction_static` for a card of that memory.total (MiB)."""
    chunk, batch = tier(total_mib, tensor_parallel_size)
    batch = min(batch, max_running) if max_running else batch
    reserved = 512 + 1.5 * max(chunk, 2048) + 1024 * tensor_parallel_size * pipeline_parallel_size / 8 + 2 * batch
    reserved += 1536 if shape.mla else 8 * prefill_captures(chunk)
    if total_mib > _LARGE_MIB:
        reserved = max(reserved, 10240)
    fraction = round((total_mib - reserved) / total_mib, 3)
    hidden = vision_hidden or (shape.vision.hidden if shape.vision else None)
    if multimodal if multimodal is not None else hidden is not None:
        # The tower's depth is called `depth` there, so SGLang falls back to 24 layers.
        ratio = 24 * (hidden or 1024) ** 2 / (24 * 1024 * 1024)
        fraction *= 0.95 * min(max(1 - 0.1 * (ratio - 1), 0.8), 1.05)
    return fraction


def pools(
    shape: Shape,
    budget_bytes: float,
    *,
    tensor_parallel_size: int,
    context_tokens: int,
    kv_element_bytes: int = 2,
    radix_cache: bool = True,
    draft_tokens: int = 0,
    page_tokens: int = 1,
) -> Pools | None:
    """Divide a budget into state slots and tokens; None when there is no room for one request."""
    tp = tensor_parallel_size
    per_token = kv.token_bytes(shape, tp, kv_element_bytes)
    cell = per_token * shape.full_layers
    if shape.sliding_layers:
        cell += int(0.8 * per_token * shape.sliding_layers)
    attention = shape.full_layers + shape.sliding_layers
    if draft_tokens and attention:
        cell = cell * (attention + shape.draft_layers) // attention
    slots = state = 0
    per_request = SLOTS_WITH_CACHE if radix_cache else SLOTS_WITHOUT_CACHE
    if shape.hybrid:
        slot = shape.linear_layers * kv.state_bytes(shape, tp, 0)
        share = budget_bytes * MAMBA_RATIO / (1 + MAMBA_RATIO)
        slots = math.floor((share - slot * (1 + draft_tokens)) / (slot * (1 + draft_tokens / per_request)))
        if slots < per_request:
            return None
        state = (slots + 1) * slot
        if draft_tokens:
            state += slot * (min(SPECULATIVE_RUNNING, slots // per_request) + 1) * draft_tokens
    tokens = math.floor((budget_bytes - state) / cell) // page_tokens * page_tokens
    if tokens < page_tokens:
        return None
    running = min(max(min(int(tokens / context_tokens * 512), 4096), 2048), tokens // 2)
    if shape.hybrid:
        running = min(running, slots // per_request)
    if draft_tokens:
        running = min(running, SPECULATIVE_RUNNING)
    return Pools(slots=slots, state_bytes=state, kv_bytes=tokens * cell, tokens=tokens, max_running=running)


def plan_sglang(model: PlannedModel, host: Mapping[str, Any], version: str, wishes: Wishes) -> Plan:
    """Plan SGLang on the host's GPUs.

    Raises:
        Refusal: the wishes cannot be met, or are ones SGLang does not know.
    """
    if not host.get("gpus"):
        raise Refusal(
            found="SGLang on a host without GPUs",
            needed="a GPU: SGLang's CPU build is not planned here",
            change="set `engine` to vllm",
        )
    if wishes.kv_cache_memory_bytes is not None:
        raise Refusal(
            found="kv_cache_memory_bytes with SGLang",
            needed="a share of memory: SGLang has no fixed KV pool in bytes",
            change="remove `kv_cache_memory_bytes`, or set `memory_share`",
        )
    shape = model.shape
    gpus = chosen_gpus(host, wishes)
    check_capability(shape, gpus, "sglang", wishes.kv_cache_dtype)
    context = check_context(model, wishes)
    refusals: list[Refusal] = []
    for tp, replicas in _splits(model, wishes, gpus):
        try:
            return _plan(model, version, wishes, gpus, tp, replicas, context)
        except Refusal as refusal:
            refusals.append(refusal)
    raise refusals[0 if gpus.nvlink else -1]


def _splits(model: PlannedModel, wishes: Wishes, gpus: Gpus) -> list[tuple[int, int]]:
    count = len(gpus.indexes)
    shape = model.shape
    if wishes.tensor_parallel_size is not None:
        problems = tensor_parallel_problems(
            shape,
            wishes.tensor_parallel_size,
            engine="sglang",
            expert_parallel=wishes.expert_parallel,
            text_only=wishes.text_only,
        )
        if wishes.tensor_parallel_size > count:
            problems = [f"the deployment has {count} GPUs"]
        if problems:
            valid = valid_tensor_parallel_sizes(shape, count, engine="sglang", text_only=wishes.text_only)
            raise Refusal(
                found=f"tensor_parallel_size {wishes.tensor_parallel_size} for {model.key}: {problems[0]}",
                needed=f"one of {', '.join(map(str, valid))}",
                change="set `tensor_parallel_size`",
            )
        sizes = [wishes.tensor_parallel_size]
    else:
        valid = valid_tensor_parallel_sizes(
            shape, count, engine="sglang", expert_parallel=wishes.expert_parallel, text_only=wishes.text_only
        )
        order = sorted(valid, reverse=gpus.nvlink)
        sizes = [tp for tp in order if count % tp == 0] + [tp for tp in order if count % tp]
    return [(tp, wishes.data_parallel_size or (count // tp if count % tp == 0 else 1)) for tp in sizes]


def _plan(model: PlannedModel, version: str, wishes: Wishes, gpus: Gpus, tp: int, replicas: int, context: int) -> Plan:
    shape = model.shape
    loaded = weights(
        shape,
        tensor_parallel_size=tp,
        expert_parallel=wishes.expert_parallel,
        text_only=wishes.text_only,
        draft=wishes.speculative_tokens > 0,
        fp8_marlin=0 < gpus.capability < 89,
        stored=model.stored,
    ).total_bytes
    total_mib = gpus.total_bytes / MIB
    vision = shape.vision is not None and not wishes.text_only
    own = default_fraction(
        shape, total_mib, tensor_parallel_size=tp, max_running=wishes.max_sequences, multimodal=vision
    )
    # What is free before loading: usable memory less the context, as far as it was measured under vLLM.
    contexts = memory.constants()["context_bytes"]
    free = gpus.usable_bytes - gpus.used_bytes - next(size for ranks, size in contexts.items() if ranks >= min(tp, 8))
    buffers = memory.buffers_bytes(shape, vision)
    multimodal = MULTIMODAL_BYTES if vision else 0
    element = 1 if wishes.kv_cache_dtype == "fp8" else 2
    share = wishes.memory_share
    fractions = (
        [round(share * gpus.usable_bytes / free, 3)]
        if share
        else [own, *(higher for higher in HIGHER_FRACTIONS if higher > own)]
    )
    tried: list[tuple[float, Pools]] = []
    for fraction in fractions:
        budget = free - loaded - buffers - free * (1 - fraction) - multimodal
        made = pools(
            shape,
            budget,
            tensor_parallel_size=tp,
            context_tokens=context,
            kv_element_bytes=element,
            radix_cache=wishes.prefix_caching is not False,
            draft_tokens=wishes.speculative_tokens,
        )
        if made:
            tried.append((fraction, made))
            if made.tokens >= context:
                break
    fraction, found = tried[-1] if tried else (fractions[-1], None)
    if found is None:
        raise Refusal(
            found=f"{model.key} needs {gib(loaded)} of weights on each GPU; with a static fraction of {fraction} of "
            f"{gib(free)} nothing is left for state and KV cache",
            needed="room for at least one request",
            change="use the FP8 revision, a larger `tensor_parallel_size`, or a larger GPU",
        )
    running = wishes.max_sequences or found.max_running
    if running > found.max_running:
        raise Refusal(
            found=f"max_sequences {running}, but the pools hold {found.max_running} running requests",
            needed=f"at most {found.max_running}"
            + (f" ({found.slots} state slots, {SLOTS_WITH_CACHE} for each request)" if shape.hybrid else ""),
            change="lower `max_sequences`, or give the deployment more memory",
        )
    length = min(context, found.tokens)
    if wishes.context_length is not None and length < wishes.context_length:
        raise Refusal(
            found=f"the KV pool holds {found.tokens} tokens, context_length is {wishes.context_length}",
            needed=f"{wishes.context_length - found.tokens} more",
            change=f"context_length at most {found.tokens}, kv_cache_dtype fp8, or a larger `tensor_parallel_size`",
        )
    chunk, _ = tier(total_mib, tp)
    reasons = {
        "engine_version": "planned with the rules of 0.5.23"
        + ("; it is newer than that" if newer_than_known("sglang", version) else ""),
        "gpu_memory_utilization": f"SGLang's own default for {total_mib:.0f} MiB"
        if fraction == own
        else (
            f"memory_share {share}"
            if share
            else f"the default of {own:.3f} leaves no room beside {gib(loaded)} of weights"
        ),
        "max_num_seqs": f"{found.slots} state slots, {SLOTS_WITH_CACHE} for each request"
        if shape.hybrid and not wishes.max_sequences
        else ("as the deployment says" if wishes.max_sequences else "SGLang's own limit for this pool"),
        "max_num_batched_tokens": f"chunk of prefill tokens for {total_mib:.0f} MiB",
        "max_model_len": "as the deployment says"
        if wishes.context_length
        else ("the model's own context fits" if length == context else "the KV pool holds no more"),
        "tensor_parallel_size": "as the deployment says"
        if wishes.tensor_parallel_size
        else ("the largest valid size that divides the GPUs" if gpus.nvlink else "the smallest size that fits"),
        "kv_cache_tokens": f"{gib(found.kv_bytes)} of KV cache"
        + (f" beside {gib(found.state_bytes)} of state" if shape.hybrid else ""),
        "predicted_bytes": "free memory before loading is an estimate: SGLang was not measured on a GPU",
        "gpus_used": "; ".join(gpus.notes) or f"{tp * replicas} of {len(gpus.indexes)}",
    }
    if replicas > 1:
        reasons["data_parallel_size"] = f"{replicas} independent replicas use all {tp * replicas} GPUs"
    return Plan(
        engine="sglang",
        engine_version=version,
        device="cuda",
        gpus_used=gpus.indexes[: tp * replicas],
        tensor_parallel_size=tp,
        pipeline_parallel_size=1,
        data_parallel_size=replicas,
        expert_parallel=wishes.expert_parallel,
        gpu_memory_utilization=round(fraction, 3),
        kv_cache_memory_bytes=None,
        max_model_len=length,
        max_num_seqs=running,
        max_num_batched_tokens=wishes.max_batched_tokens or chunk,
        kv_cache_dtype=wishes.kv_cache_dtype,
        block_size_tokens=1,
        num_blocks=found.tokens,
        kv_cache_tokens=found.tokens,
        max_concurrency=round(min(found.tokens / length, found.max_running), 2),
        state_slots=found.slots if shape.hybrid else None,
        prefix_caching=wishes.prefix_caching is not False,
        disable_custom_all_reduce=tp > 1 and not gpus.nvlink,
        enforce_eager=wishes.eager,
        predicted_bytes=PredictedBytes(
            weights=loaded,
            buffers=buffers,
            activation=int(free * (1 - fraction)),
            graphs=0,
            kv=found.kv_bytes + found.state_bytes,
            outside=gpus.usable_bytes - free,
        ),
        gpu_memory_bytes=gpus.usable_bytes,
        reasons=reasons,
    )
