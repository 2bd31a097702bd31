"""vLLM's KV cache: bytes available -> block size, blocks, tokens, concurrency. Whole-number arithmetic throughout.

Follows vLLM 0.32/0.33: platforms/interface.py:_align_hybrid_block_size, v1/core/kv_cache_utils.py
(_get_kv_cache_groups_uniform_page_size, get_kv_cache_config_from_groups, get_max_concurrency_for_kv_cache_config),
v1/kv_cache_interface.py (max_memory_usage_bytes of each spec), mamba_utils.py:gated_delta_net_state_shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Any

from metalserve.errors import DoesNotFit, Refusal
from metalserve.planner.shape import FULL, LINEAR, SLIDING, Shape, pipeline_layers, read_shape
from metalserve.planner.units import ceil_div, gib
from metalserve.planner.versions import VllmBehaviour, behaviour, check_version

# Names of `--kv-cache-dtype`; fp8 is fp8_e4m3 there.
KV_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
GDN_PREFILL_BACKENDS = ("triton", "flashinfer")
DEFAULT_BLOCK_TOKENS = 16
CPU_BLOCK_TOKENS = 128
MLA_HYBRID_BLOCK_TOKENS = 128
GDN_CHECKPOINT_TOKENS = 64
_STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Group:
    """Layers that share one block table. `kind` is full, sliding or state; `layers` their places in the model."""

    kind: str
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How the cache of one GPU is cut (bytes per GPU, lengths in tokens)."""

    block_tokens: int
    page_bytes: int
    groups: tuple[Group, ...]
    block_bytes: int
    """Bytes one block takes in the pool: the largest group times the page."""
    state_blocks: int
    """Blocks one request holds in each state group."""
    window_tokens: int
    """Tokens a sliding-window group keeps of one request, batches in flight included."""

    def blocks_per_request(self, length_tokens: int) -> int:
        """Blocks of one request of that length, over all groups."""
        blocks = 0
        for group in self.groups:
            if group.kind == "state":
                blocks += self.state_blocks
            elif group.kind == "sliding":
                blocks += ceil_div(min(self.window_tokens, length_tokens), self.block_tokens) + 1
            else:
                blocks += ceil_div(length_tokens, self.block_tokens)
        return blocks

    def request_bytes(self, length_tokens: int) -> int:
        """Bytes that must be available so that one such request fits: its blocks and the null block."""
        return (self.blocks_per_request(length_tokens) + 1) * self.block_bytes

    def longest_tokens(self, available_bytes: int, limit_tokens: int) -> int:
        """The longest request that fits, at most the limit; 0 when not even one token does."""
        if self.request_bytes(limit_tokens) <= available_bytes:
            return limit_tokens
        low, high = 0, limit_tokens - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.request_bytes(middle) <= available_bytes:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(frozen=True)
class Capacity:
    """What the engine will report for a given number of bytes (per engine, all ranks alike)."""

    block_size_tokens: int
    num_blocks: int
    capacity_tokens: int
    max_concurrency: float
    block_bytes: int
    blocks_per_request: int
    max_num_seqs_limit: int
    """Sequences the engine can start with: one state block each for hybrid models."""


def state_bytes(shape: Shape, tp: int, draft_tokens: int, state_dtype: str | None = None) -> int:
    """Bytes of the convolution and recurrent state of one layer and sequence on one GPU.

    The convolution state is 16-bit; the recurrent state has the type the checkpoint names, or 16 bit.
    """
    gdn = shape.gdn
    if gdn is None:
        return 0
    element = _STATE_BYTES.get(state_dtype or gdn.state_dtype or "bfloat16", 2)
    convolution = gdn.conv_dim // tp * (gdn.conv_kernel - 1 + draft_tokens) * 2
    return convolution + gdn.value_heads // tp * gdn.value_head_dim * gdn.key_head_dim * element


def token_bytes(shape: Shape, tp: int, kv_element_bytes: int) -> int:
    """Bytes of keys and values of one token in one attention layer on one GPU; an MLA latent is not split."""
    if shape.mla:
        return (shape.mla.kv_rank + shape.mla.rope_dim) * kv_element_bytes
    return max(1, shape.kv_heads // tp) * 2 * shape.head_dim * kv_element_bytes


def layout(
    shape: Shape,
    release: VllmBehaviour,
    *,
    tensor_parallel_size: int,
    pipeline_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    prefix_caching: bool = True,
    gdn_prefill_backend: str = "triton",
    draft_tokens: int = 0,
    max_batched_tokens: int = 8192,
    device: str = "cuda",
    state_dtype: str | None = None,
    kernel_block_tokens: int | None = None,
    draft: Shape | None = None,
) -> Layout:
    """The cut of the cache on the fullest pipeline stage.

    `draft`: a draft model of its own, in the place of the model's MTP layers. Its layers join those with full
    attention. Where theirs are of another size, a block holds the sum of both (vLLM 0.24, UniformTypeKVCacheSpecs; for
    a model with full attention alone).
    """
    element = KV_BYTES[kv_cache_dtype]
    if kv_cache_dtype == "auto" and shape.quantization and shape.quantization.kv_cache_dtype == "fp8":
        element = 1
    per_token = token_bytes(shape, tensor_parallel_size, element)
    block = kernel_block_tokens or (CPU_BLOCK_TOKENS if device == "cpu" else DEFAULT_BLOCK_TOKENS)
    checkpoint = 0
    if shape.hybrid:
        alignment = max(block, MLA_HYBRID_BLOCK_TOKENS) if shape.mla else block
        if prefix_caching and release.gdn_checkpoint and gdn_prefill_backend == "flashinfer" and device == "cuda":
            alignment, checkpoint = lcm(alignment, GDN_CHECKPOINT_TOKENS), 1
        state = state_bytes(shape, tensor_parallel_size, draft_tokens, state_dtype)
        block = max(block, alignment * ceil_div(state, alignment * per_token))
    in_flight = pipeline_parallel_size * max_batched_tokens
    if release.async_in_flight and device == "cuda":
        in_flight += max_batched_tokens
    window = (shape.sliding_window_tokens or 0) - 1 + in_flight
    page = block * per_token
    drafts, other = shape.draft_layers if draft_tokens else 0, 0
    if draft is not None:
        drafts = len(draft.layers)
        draft_token = token_bytes(draft, tensor_parallel_size, element)
        if draft_token != per_token:
            drafts, other = 0, drafts * block * draft_token
    groups = _groups(shape.layers, drafts)
    largest = _largest_on_a_stage(groups, len(shape.layers), pipeline_parallel_size)
    return Layout(
        block_tokens=block,
        page_bytes=page,
        groups=groups,
        block_bytes=largest * page + other,
        state_blocks=(2 if prefix_caching else 1) + draft_tokens + checkpoint,
        window_tokens=window,
    )


def capacity(
    cut: Layout, available_bytes: int, max_model_tokens: int, release: VllmBehaviour, hybrid: bool
) -> Capacity | None:
    """What fits into the available bytes; None when not one request of that length does."""
    blocks = available_bytes // cut.block_bytes if available_bytes > 0 else 0
    needed = cut.blocks_per_request(max_model_tokens)
    # One block is the null block; the report counts it nevertheless.
    if needed > blocks - 1:
        return None
    concurrency = blocks / needed
    if release.tokens_by_concurrency:
        tokens = int(concurrency * max_model_tokens)
    else:
        tokens = blocks // len(cut.groups) * cut.block_tokens
    return Capacity(
        block_size_tokens=cut.block_tokens,
        num_blocks=blocks,
        capacity_tokens=tokens,
        max_concurrency=concurrency,
        block_bytes=cut.block_bytes,
        blocks_per_request=needed,
        max_num_seqs_limit=blocks if hybrid else max(1, blocks - 1),
    )


def kv_capacity(
    config: Mapping[str, Any] | Shape,
    *,
    tensor_parallel_size: int,
    available_bytes: int,
    max_model_len: int,
    pipeline_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    prefix_caching: bool = True,
    gdn_prefill_backend: str = "triton",
    num_speculative_tokens: int = 0,
    max_num_batched_tokens: int = 8192,
    engine: str = "vllm",
    engine_version: str | None = None,
) -> Capacity:
    """Capacity of vLLM's KV cache for a parsed config.json and the bytes available on each GPU.

    `config` may also be a shape that was read before.

    The tensor parallel size only has to be a number here; whether a model can be split so is said by
    `tensor_parallel_problems`.

    Raises:
        DoesNotFit: one request of `max_model_len` tokens does not fit; names the longest length that would.
        Refusal: the config cannot be read, another engine, a release older than is known, an unknown KV dtype or
            prefill backend, or a number out of range.
    """
    if engine != "vllm":
        raise Refusal(
            found=f"engine {engine!r} has no blocks of this kind",
            needed="vllm",
            change="leave `engine` empty, or plan SGLang with make_plan",
        )
    if kv_cache_dtype not in KV_BYTES:
        raise Refusal(
            found=f"kv_cache_dtype {kv_cache_dtype!r}",
            needed=f"one of {', '.join(KV_BYTES)}",
            change="set `kv_cache_dtype`",
        )
    if gdn_prefill_backend not in GDN_PREFILL_BACKENDS:
        raise Refusal(
            found=f"gdn_prefill_backend {gdn_prefill_backend!r}",
            needed=f"one of {', '.join(GDN_PREFILL_BACKENDS)}",
            change="set `gdn_prefill_backend` to the one that the engine's log names",
        )
    for name, value, least in (
        ("tensor_parallel_size", tensor_parallel_size, 1),
        ("pipeline_parallel_size", pipeline_parallel_size, 1),
        ("max_model_len", max_model_len, 1),
        ("max_num_batched_tokens", max_num_batched_tokens, 1),
        ("num_speculative_tokens", num_speculative_tokens, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise Refusal(found=f"{name} {value!r}", needed=f"a whole number, at least {least}", change=f"set `{name}`")
    shape = config if isinstance(config, Shape) else read_shape(config)
    if pipeline_parallel_size > len(shape.layers):
        raise Refusal(
            found=f"pipeline_parallel_size {pipeline_parallel_size} for {len(shape.layers)} layers",
            needed="at most one stage per layer",
            change="lower `pipeline_parallel_size`",
        )
    release = behaviour(check_version("vllm", engine_version, shape.architecture, None))
    available_bytes = int(available_bytes)
    cut = layout(
        shape,
        release,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        kv_cache_dtype=kv_cache_dtype,
        prefix_caching=prefix_caching,
        gdn_prefill_backend=gdn_prefill_backend,
        draft_tokens=num_speculative_tokens,
        max_batched_tokens=max_num_batched_tokens,
    )
    found = capacity(cut, available_bytes, max_model_len, release, shape.hybrid)
    if found is None:
        raise too_short(cut, available_bytes, max_model_len)
    return found


def too_short(cut: Layout, available_bytes: int, length_tokens: int) -> DoesNotFit:
    """The refusal for one request that does not fit, naming the longest that would."""
    longest = cut.longest_tokens(available_bytes, length_tokens)
    advice = f"context_length at most {longest}" if longest else "more memory for the KV cache"
    return DoesNotFit(
        found=f"{gib(max(available_bytes, 0))} for the KV cache on each GPU; "
        f"one request of {length_tokens} tokens takes {gib(cut.request_bytes(length_tokens))}",
        needed=f"{gib(cut.request_bytes(length_tokens) - max(available_bytes, 0))} more",
        change=f"{advice}, kv_cache_dtype fp8, a larger tensor_parallel_size, or a larger share of memory",
    )


@lru_cache(maxsize=256)
def _groups(layers: tuple[str, ...], draft_layers: int) -> tuple[Group, ...]:
    """The grouping of vLLM: the smallest kind gives the group size, unless the largest is under 1.5 times that."""
    count = len(layers)
    kinds: dict[str, list[int]] = {"full": [], "sliding": [], "state": []}
    names = {FULL: "full", SLIDING: "sliding", LINEAR: "state"}
    for place, kind in enumerate(layers):
        kinds[names[kind]].append(place)
    kinds["full"] += range(count, count + draft_layers)
    present = {kind: places for kind, places in kinds.items() if places}
    smallest, largest = (f(len(places) for places in present.values()) for f in (min, max))
    size = largest if largest < smallest * 1.5 else smallest
    groups = []
    for kind, places in present.items():
        number = ceil_div(len(places), size)
        groups += [Group(kind, tuple(places[i::number])) for i in range(number)]
    return tuple(groups)


@lru_cache(maxsize=256)
def _largest_on_a_stage(groups: tuple[Group, ...], layers: int, stages: int) -> int:
    """Layers of the largest group on the fullest pipeline stage; the rank with the fewest blocks decides for all."""
    largest, start = 0, 0
    for stage, size in enumerate(pipeline_layers(layers, stages)):
        # Draft layers have places behind the model's own and live on the last stage.
        end = start + size if stage < stages - 1 else layers + 1_000_000
        largest = max(largest, *(sum(start <= place < end for place in group.layers) for group in groups))
        start = end
    return largest
