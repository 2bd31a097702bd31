"""The plan of an SGLang deployment; the arithmetic is in sglang_rules.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from metalserve.errors import Refusal
from metalserve.planner import memory
from metalserve.planner.draft import STANDALONE, Draft, check_draft, draft_bytes, draft_problems, no_gpus
from metalserve.planner.hardware import Gpus, check_capability, chosen_gpus
from metalserve.planner.lora import Adapters, adapter_bytes, buffers_sentence
from metalserve.planner.parallel import tensor_parallel_problems, valid_tensor_parallel_sizes
from metalserve.planner.plan_types import Plan, PredictedBytes, Wishes
from metalserve.planner.resolve import PlannedModel
from metalserve.planner.sglang_cpu import plan_sglang_cpu
from metalserve.planner.sglang_rules import (
    MULTIMODAL_BYTES,
    Pools,
    Serving,
    default_fraction,
    pools,
    sees_pictures,
    tier,
)
from metalserve.planner.units import MIB, gib
from metalserve.planner.versions import newer_than_known
from metalserve.planner.vllm_cuda import check_context
from metalserve.planner.weights import weights

# Fractions tried, in this order, when the default leaves no room for one request of the wished length.
HIGHER_FRACTIONS = (0.88, 0.90)


def plan_sglang(
    model: PlannedModel,
    host: Mapping[str, Any],
    version: str,
    wishes: Wishes,
    adapters: Adapters | None = None,
    draft: Draft | None = None,
) -> Plan:
    """Plan SGLang on the host's GPUs.

    Raises:
        Refusal: the wishes cannot be met, or are ones SGLang does not know.
    """
    if not host.get("gpus"):
        if draft:
            raise no_gpus(draft)
        if adapters:
            raise Refusal(
                found="lora_adapters with SGLang on a host without GPUs",
                needed="GPUs: SGLang's adapters were not seen to run on a CPU",
                change="`engine: vllm`, or leave `lora_adapters` out",
            )
        return plan_sglang_cpu(model, host, version, wishes)
    if wishes.kv_cache_memory_bytes is not None:
        raise Refusal(
            found="kv_cache_memory_bytes with SGLang",
            needed="a share of memory: SGLang has no fixed KV pool in bytes",
            change="remove `kv_cache_memory_bytes`, or set `memory_share`",
        )
    shape = model.shape
    if draft:
        stages = wishes.pipeline_parallel_size
        check_draft(draft, model.key, shape, wishes.speculative_tokens, stages, "sglang", version)
        if adapters and draft.method == STANDALONE:
            raise Refusal(
                found=f"lora_adapters and the draft model {draft.key} with SGLang",
                needed="an EAGLE-3 head, or no adapters: SGLang stops at start otherwise",
                change="`draft_model` or `lora_adapters` of the deployment",
            )
    for name in ("radix_strategy", "state_dtype", "state_memory_ratio"):
        if getattr(wishes.sglang, name) is not None and not shape.hybrid:
            raise Refusal(
                found=f"sglang.{name} for {model.key}, which keeps no state",
                needed="a model with linear-attention layers; SGLang stops at start otherwise",
                change=f"remove `sglang.{name}`",
            )
    if wishes.sglang.static_fraction and wishes.memory_share:
        raise Refusal(
            found=f"memory_share {wishes.memory_share} and sglang.static_fraction {wishes.sglang.static_fraction}",
            needed="one of them: both say how much memory SGLang takes",
            change="remove `memory_share` or `sglang.static_fraction`",
        )
    gpus = chosen_gpus(host, wishes)
    check_capability(shape, gpus, "sglang", wishes.kv_cache_dtype)
    context = check_context(model, wishes)
    refusals: list[Refusal] = []
    for tp, replicas in _splits(model, wishes, gpus):
        problems = draft_problems(draft, tp, "sglang")
        if problems:
            refusals.append(
                Refusal(
                    found=f"tensor_parallel_size {tp} for {model.key}: {problems[0]}",
                    needed="a size that both models can be split by",
                    change="`tensor_parallel_size`, or another `draft_model`",
                )
            )
            continue
        try:
            return _plan(model, version, wishes, gpus, tp, replicas, context, adapters, draft)
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


def _plan(
    model: PlannedModel,
    version: str,
    wishes: Wishes,
    gpus: Gpus,
    tp: int,
    replicas: int,
    context: int,
    adapters: Adapters | None,
    draft: Draft | None,
) -> Plan:
    shape = model.shape
    loaded = weights(
        shape,
        tensor_parallel_size=tp,
        expert_parallel=wishes.expert_parallel,
        text_only=wishes.text_only,
        draft=wishes.speculative_tokens > 0 and draft is None,
        fp8_marlin=0 < gpus.capability < 89,
        stored=model.stored,
    ).total_bytes
    buffered = adapter_bytes(shape, adapters, tensor_parallel_size=tp, expert_parallel=wishes.expert_parallel)
    # Taken while the model is loaded, before the pools are sized (model_executor/model_runner.py).
    loaded += buffered + draft_bytes(draft, tp)
    # The draft's layers have the size of the model's, which SGLang takes for granted.
    pooled = replace(shape, draft_layers=len(draft.shape.layers)) if draft else shape
    total_mib = gpus.total_bytes / MIB
    vision = shape.vision is not None and not wishes.text_only
    own = default_fraction(
        shape,
        total_mib,
        tensor_parallel_size=tp,
        max_running=wishes.max_sequences,
        chunk_tokens=wishes.max_batched_tokens,
        text_only=wishes.text_only,
        graphs=not wishes.eager,
    )
    # What is free before loading: usable memory less the context, as far as it was measured under vLLM.
    contexts = memory.constants()["context_bytes"]
    free = gpus.usable_bytes - gpus.used_bytes - next(size for ranks, size in contexts.items() if ranks >= min(tp, 8))
    buffers = memory.buffers_bytes(shape, vision)
    # SGLang keeps room for pictures even where --language-model-only leaves their encoder out.
    multimodal = MULTIMODAL_BYTES if sees_pictures(shape) else 0
    options, share = wishes.sglang, wishes.memory_share
    serving = serving_of(model, wishes, context, tier(total_mib, tp)[0])
    if options.static_fraction:
        fractions = [options.static_fraction]
    elif share:
        fractions = [round(share * gpus.usable_bytes / free, 3)]
    else:
        fractions = [own, *(higher for higher in HIGHER_FRACTIONS if higher > own)]
    tried: list[tuple[float, Pools]] = []
    for fraction in fractions:
        # In SGLang's order: what is free after loading, less the slack, less the room for pictures.
        budget = free - loaded - buffers - free * (1 - fraction) - multimodal
        made = pools(pooled, budget, tp, serving)
        if made:
            # The engine is always given a limit, which without a radix cache sizes its pools.
            made = pools(pooled, budget, tp, replace(serving, max_running=made.max_running))
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
            + (f" ({found.slots} state slots, {serving.slots_per_request} for each request)" if shape.hybrid else ""),
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
            else "as the deployment says (sglang.static_fraction)"
            if options.static_fraction
            else f"the default of {own:.3f} leaves no room beside {gib(loaded)} of weights"
        ),
        "max_num_seqs": f"{found.slots} state slots, {serving.slots_per_request} for each request"
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
    if draft:
        reasons["draft_model"] = f"{gib(draft_bytes(draft, tp))} of the weights are {draft.key}"
    if adapters:
        reasons["lora_adapters"] = f"{gib(buffered)} of the weights are {buffers_sentence(adapters)}"
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


def serving_of(model: PlannedModel, wishes: Wishes, context_tokens: int, chunk_tokens: int) -> Serving:
    """The arguments that decide the pools, as the engine will be started with them."""
    declared = model.shape.quantization.kv_cache_dtype if model.shape.quantization else None
    small = wishes.kv_cache_dtype == "fp8" or (wishes.kv_cache_dtype == "auto" and declared == "fp8")
    return Serving(
        context_tokens=context_tokens,
        kv_element_bytes=1 if small else 2,
        radix_cache=wishes.prefix_caching is not False,
        strategy=wishes.sglang.radix_strategy or "extra_buffer",
        state_ratio=wishes.sglang.state_memory_ratio or 0.9,
        state_dtype=wishes.sglang.state_dtype,
        draft_tokens=wishes.speculative_tokens + 1 if wishes.speculative_tokens else 0,
        max_running=wishes.max_sequences,
        chunk_tokens=wishes.max_batched_tokens or chunk_tokens,
    )
