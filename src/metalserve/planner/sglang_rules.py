"""How SGLang 0.5.23 divides the memory of a GPU: its default fraction, and what it makes of a budget.

Sources: arg_groups/memory_hook.py (mem_fraction_static, chunked_prefill_size, graph sizes),
arg_groups/cuda_graph_hook.py, mem_cache/kv_cache_configurator.py and model_executor/pool_configurator.py (pools).
tests/differential/test_sglang.py holds all of it against that code, to the token; so the order of the floating-point
operations is SGLang's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml

from metalserve.planner import kv
from metalserve.planner.shape import Shape
from metalserve.planner.units import MIB

# memory.total below (MiB) -> chunk, captured decode batch, the same with tensor parallel 4 or more.
_TIERS = (
    (20480, 2048, 8, 8),
    (35840, 4096, 48, 160),
    (61440, 4096, 32, 160),
    (163840, 8192, 256, 512),
    (math.inf, 16384, 512, 512),
)
_LARGE_MIB = 61440
# Running requests that SGLang declares when it drafts and nothing is asked.
SPECULATIVE_RUNNING = 48
# Kept out of the budget for pictures: SGLANG_VLM_CACHE_SIZE_MB.
MULTIMODAL_BYTES = 100 * MIB
SLIDING_TOKENS_RATIO = 0.8
_EVICTION_INTERVAL_TOKENS = 128  # SGLANG_SWA_EVICTION_INTERVAL
# State slots one running request holds while the radix cache is on, with the overlap scheduler.
SLOTS_PER_REQUEST = {"no_buffer": 3, "extra_buffer_lazy": 4, "extra_buffer": 5}


@dataclass(frozen=True)
class Serving:
    """The arguments that decide the pools; the defaults are SGLang's own.

    `draft_tokens` counts what is verified at once: one more than the drafted tokens, 0 without drafts.
    `state_dtype`: type of the recurrent state, None for the checkpoint's.
    """

    context_tokens: int
    kv_element_bytes: int = 2
    radix_cache: bool = True
    strategy: str = "extra_buffer"
    state_ratio: float = 0.9
    state_dtype: str | None = None
    draft_tokens: int = 0
    max_running: int | None = None
    page_tokens: int = 1
    chunk_tokens: int = 8192

    @property
    def slots_per_request(self) -> int:
        """State slots that one running request holds."""
        return SLOTS_PER_REQUEST[self.strategy] if self.radix_cache else 1


@dataclass(frozen=True)
class Pools:
    """What SGLang makes of a budget (bytes per GPU).

    `slots` are state slots, `sliding_tokens` the tokens of a window pool.
    """

    slots: int
    state_bytes: int
    kv_bytes: int
    tokens: int
    sliding_tokens: int
    max_running: int


@cache
def _models() -> dict[str, frozenset[str]]:
    text = (resources.files("metalserve.planner") / "sglang_models.yaml").read_text(encoding="utf-8")
    return {name: frozenset(architectures) for name, architectures in yaml.safe_load(text).items()}


def sees_pictures(shape: Shape, text_only: bool = False) -> bool:
    """Whether SGLang serves the model as a multimodal one."""
    return shape.multimodal and not text_only and shape.architecture not in _models()["text_only_by_default"]


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
    chunk_tokens: int | None = None,
    text_only: bool = False,
    graphs: bool = True,
) -> float:
    """SGLang's own `mem_fraction_static` for a card of that memory.total (MiB)."""
    chunk, batch = tier(total_mib, tensor_parallel_size)
    chunk = chunk_tokens or chunk
    batch = min(batch, max_running) if max_running else batch
    pictures = sees_pictures(shape, text_only)
    reserved = 512 + 1.5 * max(chunk, 2048) + 1024 * tensor_parallel_size * pipeline_parallel_size / 8
    if graphs:
        reserved += 2 * batch
    # A multimodal model counts as one here even where only text is served.
    captures_pictures = not sees_pictures(shape) or shape.architecture in _models()["multimodal_prefill_graphs"]
    if graphs and pipeline_parallel_size == 1 and captures_pictures:
        reserved += 1536 if shape.mla else 8 * prefill_captures(chunk)
    if total_mib > _LARGE_MIB:
        reserved = max(reserved, 10240)
    fraction = round((total_mib - reserved) / total_mib, 3)
    if pictures:
        # The tower's depth is called `depth` there, so SGLang falls back to 24 layers; 1024 is its own default width.
        hidden = shape.vision.hidden if shape.vision else 1024
        ratio = 24 * hidden**2 / (24 * 1024**2)
        fraction *= 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (ratio - 1.0)))
    return fraction


def state_slot_bytes(shape: Shape, tensor_parallel_size: int, state_dtype: str | None = None) -> int:
    """Bytes of one state slot on one GPU: the states of all linear layers of one sequence.

    Where neither the deployment nor the checkpoint names the state's type, SGLang takes float32.
    """
    declared = shape.gdn.state_dtype if shape.gdn else None
    return shape.linear_layers * kv.state_bytes(shape, tensor_parallel_size, 0, state_dtype or declared or "float32")


def pools(shape: Shape, budget_bytes: float, tensor_parallel_size: int, serving: Serving) -> Pools | None:
    """Divide a budget into state slots and tokens; None when SGLang would refuse to start.

    `budget_bytes` is what is free after loading, less the slack outside the static fraction, per GPU.
    """
    running = serving.max_running or (SPECULATIVE_RUNNING if serving.draft_tokens else None)
    rest, slots = budget_bytes, 0
    if shape.hybrid:
        slot = state_slot_bytes(shape, tensor_parallel_size, serving.state_dtype)
        slots, rest = _state_pool(budget_bytes, slot, running, serving)
        if slots < serving.slots_per_request:
            return None
    if rest <= 0:
        return None
    cell, own_window = _cell_bytes(shape, tensor_parallel_size, serving)
    tokens = int(int(rest) // cell) // serving.page_tokens * serving.page_tokens
    sliding = int(tokens * SLIDING_TOKENS_RATIO) // serving.page_tokens * serving.page_tokens if own_window else 0
    if own_window and not serving.radix_cache and serving.max_running and not serving.draft_tokens:
        tokens, sliding = _capped_window(shape, int(rest), tensor_parallel_size, serving)
    if tokens < serving.page_tokens:
        return None
    limit = running or min(max(int(tokens / serving.context_tokens * 512), 2048), 4096)
    limit = min(limit, tokens // 2)
    if shape.hybrid:
        limit = min(limit, slots // serving.slots_per_request)
    if limit < 1:
        return None
    state = round(budget_bytes - rest)
    return Pools(
        slots=slots,
        state_bytes=state,
        kv_bytes=int(rest),
        tokens=tokens,
        sliding_tokens=sliding,
        max_running=limit,
    )


def _state_pool(budget: float, slot: int, running: int | None, serving: Serving) -> tuple[int, float]:
    """State slots, and what is left of the budget beside them (and beside the states of the drafts)."""
    drafts, ratio = serving.draft_tokens, serving.slots_per_request
    if not serving.radix_cache and running is not None:
        slots, capped = running, running
    else:
        share = budget * serving.state_ratio / (1 + serving.state_ratio)
        slots = int((share - slot * (1 + drafts)) // (slot * (1 + drafts / ratio)))
        capped = min(running or slots, slots // ratio)
    if drafts:
        budget -= slot * (capped + 1) * drafts
    return slots, budget - (slots + 1) * slot


def _cell_bytes(shape: Shape, tp: int, serving: Serving) -> tuple[float, bool]:
    """Bytes of one token of capacity, and whether the window has a pool of its own."""
    per_token = kv.token_bytes(shape, tp, serving.kv_element_bytes)
    own_window = shape.sliding_layers > 0 and shape.architecture in _models()["sliding_window_pool"]
    drafts = shape.draft_layers if serving.draft_tokens else 0
    if own_window:
        return per_token * (shape.full_layers + drafts) + SLIDING_TOKENS_RATIO * (
            per_token * shape.sliding_layers
        ), True
    layers = shape.full_layers + shape.sliding_layers
    return per_token * layers + int(per_token * layers * drafts / layers), False


def _capped_window(shape: Shape, rest: int, tp: int, serving: Serving) -> tuple[int, int]:
    """Without a radix cache the window pool holds what the running requests can need; the rest is for full layers.

    From compute_swa_request_cap, without drafts and with the overlap scheduler (two chunks in flight).
    """
    page, per_token = serving.page_tokens, kv.token_bytes(shape, tp, serving.kv_element_bytes)
    per_request = (shape.sliding_window_tokens or 0) + _EVICTION_INTERVAL_TOKENS + 2 * page
    window = per_request * (serving.max_running or 1) + 2 * serving.chunk_tokens + page
    window = math.ceil(window / page) * page
    left = rest - window * per_token * shape.sliding_layers
    return max(0, int(left // (per_token * shape.full_layers)) // page * page), window
