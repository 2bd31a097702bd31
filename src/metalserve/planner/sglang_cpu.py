"""The plan of an SGLang deployment on a CPU host: no drafts, no graphs, a pool of a fixed number of tokens.

SGLang has no pool in bytes, so a wish in bytes becomes `max-total-tokens`, which SGLang takes as it is when its static
fraction leaves at least as much. Seen on SGLang 0.5.23 with CPU torch and `attention-backend: torch_native`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metalserve.errors import Refusal
from metalserve.planner import kv, memory
from metalserve.planner.plan_types import Plan, PredictedBytes, Wishes
from metalserve.planner.resolve import PlannedModel
from metalserve.planner.units import GIB, gib
from metalserve.planner.versions import newer_than_known
from metalserve.planner.vllm_cuda import check_context
from metalserve.planner.weights import weights

CHUNK_TOKENS = 2048
SEQUENCES = 128
# Large enough that the fixed number of tokens decides, not the memory that happens to be free at the start.
STATIC_FRACTION = 0.9
# Its four processes (server, scheduler, detokenizer, resource tracker); seen as about 2.5 GB for a tiny model.
PROCESS_BYTES = 3 * GIB


def plan_sglang_cpu(model: PlannedModel, host: Mapping[str, Any], version: str, wishes: Wishes) -> Plan:
    """Plan SGLang on a host without GPUs.

    Raises:
        Refusal: the model, the memory or the wishes do not allow it.
    """
    shape = model.shape
    pool = wishes.kv_cache_memory_bytes
    if shape.hybrid or shape.quantization or shape.mla:
        what = "Gated DeltaNet layers" if shape.hybrid else ("MLA" if shape.mla else "quantised weights")
        raise Refusal(
            found=f"{model.key} with {what} under SGLang on a host without GPUs",
            needed="plain attention and 16-bit weights: the rest needs compiled kernels",
            change="set `engine` to vllm, or plan a host with GPUs",
        )
    if pool is None:
        raise Refusal(
            found="SGLang on a host without GPUs and without a fixed KV pool",
            needed="a number of bytes, from which a number of tokens follows",
            change="set `kv_cache_memory_bytes`",
        )
    if wishes.gpus != "all":
        raise Refusal(
            found="gpus on a host without GPUs",
            needed="no GPU indexes on a CPU host",
            change="remove `gpus` from the deployment",
        )
    if (wishes.tensor_parallel_size or 1) * wishes.pipeline_parallel_size * (wishes.data_parallel_size or 1) > 1:
        raise Refusal(
            found="more than one rank on a CPU host",
            needed="tensor, pipeline and data parallel size 1",
            change="remove the parallel sizes from the deployment",
        )
    if wishes.speculative_tokens or wishes.kv_cache_dtype == "fp8":
        raise Refusal(
            found="drafts or an FP8 KV cache under SGLang on a host without GPUs",
            needed="neither: both need compiled kernels",
            change="set `speculative_tokens` to 0 and `kv_cache_dtype` to auto",
        )
    context = check_context(model, wishes)
    cell = kv.token_bytes(shape, 1, 2) * (shape.full_layers + shape.sliding_layers)
    tokens = pool // cell
    if tokens < (wishes.context_length or 2):
        raise Refusal(
            found=f"kv_cache_memory_bytes {pool} holds {tokens} tokens of {cell} bytes",
            needed=f"at least the {wishes.context_length or 2} tokens of one request",
            change="raise `kv_cache_memory_bytes`, or lower `context_length`",
        )
    loaded = weights(shape, text_only=wishes.text_only, stored=model.stored).total_bytes
    ram = (host.get("memory") or {}).get("total_bytes")
    if ram is not None and (pool + loaded) / STATIC_FRACTION + PROCESS_BYTES > ram:
        raise Refusal(
            found=f"{gib(loaded)} of weights, {gib(pool)} of KV cache and {gib(PROCESS_BYTES)} for the processes",
            needed=f"no more than {STATIC_FRACTION:.0%} of the {gib(int(ram))} of memory",
            change="lower `kv_cache_memory_bytes`, or plan a smaller model",
        )
    context = min(context, tokens)
    running = min(wishes.max_sequences or SEQUENCES, tokens // 2)
    return Plan(
        engine="sglang",
        engine_version=version,
        device="cpu",
        gpus_used=(),
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        expert_parallel=False,
        gpu_memory_utilization=STATIC_FRACTION,
        kv_cache_memory_bytes=None,
        max_model_len=context,
        max_num_seqs=running,
        max_num_batched_tokens=wishes.max_batched_tokens or CHUNK_TOKENS,
        kv_cache_dtype=wishes.kv_cache_dtype,
        block_size_tokens=1,
        num_blocks=tokens,
        kv_cache_tokens=tokens,
        max_concurrency=round(min(tokens / context, running), 2),
        state_slots=None,
        prefix_caching=wishes.prefix_caching is not False,
        disable_custom_all_reduce=False,
        enforce_eager=True,
        predicted_bytes=PredictedBytes(
            weights=loaded,
            buffers=memory.buffers_bytes(shape, vision=False),
            activation=0,
            graphs=0,
            kv=tokens * cell,
            outside=PROCESS_BYTES,
        ),
        gpu_memory_bytes=None,
        reasons={
            "device": "the host has no GPU",
            "engine_version": "planned with the rules of 0.5.23"
            + ("; it is newer than that" if newer_than_known("sglang", version) else ""),
            "gpu_memory_utilization": "large enough that the fixed number of tokens decides",
            "kv_cache_tokens": f"{gib(pool)} of KV cache as the deployment says, {cell} bytes a token",
            "max_model_len": "as the deployment says"
            if wishes.context_length
            else "the model's own, or what the pool holds",
            "max_num_seqs": "as the deployment says" if wishes.max_sequences else f"at most {SEQUENCES}",
            "predicted_bytes": f"weights and KV cache are exact; the processes are taken as {gib(PROCESS_BYTES)}",
        },
    )
