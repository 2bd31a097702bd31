"""What differs between engine releases, as far as sizes depend on it.

Releases between two listed ones behave as the older one of the two in every respect except where noted in
`behaviour`. A release newer than the newest listed is planned as that one, with a wider margin.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from metalserve.errors import Refusal

NEWEST = {"vllm": "0.33.0", "sglang": "0.5.23"}
OLDEST = {"vllm": "0.17.0", "sglang": "0.5.9"}


@dataclass(frozen=True)
class VllmBehaviour:
    """How one vLLM release decides about memory.

    Sources: source of the 0.32 CPU and 0.33 CUDA wheels (platforms/interface.py, v1/core/kv_cache_utils.py,
    v1/kv_cache_interface.py, v1/worker/gpu_worker.py, config/vllm.py); parsers of 0.17.1, 0.20.2, 0.27.1, 0.33.0;
    starts of 0.24.0 on an H200.
    """

    version: str
    default_utilization: float
    graph_estimate: bool
    """Whether the CUDA-graph estimate is taken off the KV budget (V1 runner)."""
    mamba_check: bool
    """Whether a start with more sequences than state blocks is refused."""
    hybrid_prefix_caching: bool
    """Default of prefix caching for hybrid models."""
    gdn_checkpoint: bool
    """Whether FlashInfer's GDN prefill aligns blocks to 64 tokens and keeps one checkpoint block per group."""
    async_in_flight: bool
    """Whether sliding-window groups count (PP + 1) batches in flight instead of PP."""
    tokens_by_concurrency: bool
    """Whether the reported token count is concurrency x length; before, blocks // groups x smallest block."""
    v2_runner: str
    """Models on the V2 runner: none, listed (LISTED_V2_ARCHITECTURES) or all."""
    v2_graph_estimate: bool
    """Whether the V2 runner's graphs are taken off the KV budget."""
    mxfp4_scales_twice: bool
    """Whether the checkpoint's MXFP4 scales stay beside their reordered copy (Triton backend)."""
    exact_version: bool = True
    """False: not one of the releases that were looked at; planned with a wider margin."""


_VLLM = (
    VllmBehaviour("0.17", 0.90, False, False, False, False, False, False, "none", False, True),
    VllmBehaviour("0.20", 0.92, True, True, False, False, False, True, "none", False, True),
    VllmBehaviour("0.24", 0.92, True, True, False, False, False, True, "listed", False, True),
    VllmBehaviour("0.32", 0.92, True, True, True, False, True, True, "all", True, False),
    VllmBehaviour("0.33", 0.92, True, True, True, True, True, True, "all", True, False),
)
# config/vllm.py of 0.24.0, DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES; every other model is on the V1 runner there.
LISTED_V2_ARCHITECTURES = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "GraniteMoeForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
    }
)
# Releases with a reading of their own for the points above (0.27: parser only, so it is not among them).
_SEEN = ("0.17", "0.20", "0.24", "0.32", "0.33")


@lru_cache(maxsize=256)
def parse(version: str) -> tuple[int, ...]:
    """`v0.24.0+cu130` -> (0, 24, 0).

    Raises:
        Refusal: the text does not begin with a version number.
    """
    match = re.match(r"^v?(\d+(?:\.\d+)*)", version.strip())
    if not match:
        raise Refusal(
            found=f"engine version {version!r}",
            needed="a release number such as 0.33.0",
            change="set `engine_version` to a release, or leave it empty",
        )
    return tuple(int(part) for part in match[1].split("."))


def check_engine(engine: str) -> str:
    """The engine's name if it is known.

    Raises:
        Refusal: another engine.
    """
    if engine not in NEWEST:
        raise Refusal(found=f"engine {engine!r}", needed="vllm or sglang", change="set `engine` to one of them")
    return engine


def check_version(engine: str, version: str | None, model_key: str, minimum: str | None) -> str:
    """The version to plan for: the given one, or the newest that is known here.

    Raises:
        Refusal: older than the planner knows, or than the model needs.
    """
    chosen = version or NEWEST[engine]
    number = parse(chosen)
    if number < parse(OLDEST[engine])[: len(number)]:
        raise Refusal(
            found=f"{engine} {chosen}",
            needed=f"{OLDEST[engine]} or newer: older releases size their memory in ways not known here",
            change="set `engine_version`",
        )
    if minimum and number < parse(minimum)[: len(number)]:
        raise Refusal(
            found=f"{engine} {chosen} cannot load {model_key}",
            needed=f"{engine} {minimum} or newer",
            change="set `engine_version` (and `image`), or another `model`",
        )
    return chosen


@lru_cache(maxsize=64)
def behaviour(version: str) -> VllmBehaviour:
    """How that vLLM release decides about memory."""
    number = parse(version)[:2]
    known = [entry for entry in _VLLM if parse(entry.version) <= number]
    entry = known[-1] if known else _VLLM[0]
    exact = ".".join(str(part) for part in number) in _SEEN
    if not exact and entry.version == "0.24":
        # Somewhere between 0.24 and 0.32 sliding windows began to count the batch in flight: plan for the larger.
        entry = replace(entry, async_in_flight=True)
    return replace(entry, exact_version=exact)


def newer_than_known(engine: str, version: str) -> bool:
    """Whether the release is newer than the newest one that was looked at."""
    return (
        parse(version)[:2] > parse(NEWEST[engine])[:2] if engine == "vllm" else parse(version) > parse(NEWEST[engine])
    )
