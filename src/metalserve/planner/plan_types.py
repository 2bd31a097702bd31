"""What goes into a plan and what comes out: the wishes of a deployment, and the plan itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from metalserve.engines.behaviour import FIELDS as BEHAVIOUR_FIELDS
from metalserve.errors import Refusal
from metalserve.planner.sglang_options import SglangOptions, read_options

# Fields of a deployment that decide no size; a whole deployment may be given as wishes.
_NOT_SIZES = frozenset(
    {
        "name",
        "engine",
        "engine_version",
        "image",
        "model",
        "served_names",
        "port",
        "bind_address",
        "engine_args",
        "environment",
        "api_key_file",
        "lora_adapters",
        "lora_slots",
        "lora",
        "draft_model",
        "draft",
        *BEHAVIOUR_FIELDS,
    }
)
_KV_DTYPES = ("auto", "bfloat16", "fp8")


@dataclass(frozen=True)
class Wishes:
    """What a deployment asks for; None: the planner decides. Lengths in tokens, sizes in bytes.

    `gpus`: all, indexes, or how many; a number is filled with GPUs that are joined well.
    `memory_share`: share (0..1] of each GPU's memory that this engine may take altogether.
    `kv_cache_memory_bytes`: a fixed KV pool.
    `keep_used_memory`: leave out what other processes use on the GPUs now; off by default, because it makes the
    plan depend on the moment.
    """

    gpus: str | int | tuple[int, ...] = "all"
    context_length: int | None = None
    max_sequences: int | None = None
    max_batched_tokens: int | None = None
    kv_cache_dtype: str = "auto"
    memory_share: float | None = None
    kv_cache_memory_bytes: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int = 1
    data_parallel_size: int | None = None
    expert_parallel: bool = False
    speculative_tokens: int = 0
    text_only: bool = False
    eager: bool = False
    prefix_caching: bool | None = None
    gdn_prefill_backend: str | None = None
    keep_used_memory: bool = False
    sglang: SglangOptions = field(default_factory=SglangOptions)


@dataclass(frozen=True)
class PredictedBytes:
    """Predicted bytes on each GPU (on a CPU host: of the process)."""

    weights: int
    buffers: int
    activation: int
    graphs: int
    kv: int
    outside: int
    """Taken beyond the engine's own budget: context, communication, runner."""


@dataclass(frozen=True)
class Plan:
    """The sizing of one deployment on one host.

    Capacities are per engine replica, as the engine reports them; `data_parallel_size` replicas exist. Bytes are per
    GPU. On SGLang `gpu_memory_utilization` is its static fraction, and a block is one token.
    `reasons` maps field names to sentences.
    """

    engine: str
    engine_version: str
    device: str
    gpus_used: tuple[int, ...]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    expert_parallel: bool
    gpu_memory_utilization: float | None
    kv_cache_memory_bytes: int | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str
    block_size_tokens: int
    num_blocks: int
    kv_cache_tokens: int
    max_concurrency: float
    state_slots: int | None
    prefix_caching: bool
    disable_custom_all_reduce: bool
    enforce_eager: bool
    predicted_bytes: PredictedBytes
    gpu_memory_bytes: int | None
    reasons: Mapping[str, str]
    alternatives: tuple[str, ...] = ()
    """Sentences on other divisions of the same GPUs, with what they would hold."""

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain types (dict, list, str, int, float, bool, None)."""
        plain = asdict(self)
        plain["gpus_used"] = list(self.gpus_used)
        plain["reasons"] = dict(self.reasons)
        plain["alternatives"] = list(self.alternatives)
        return plain


def read_wishes(wishes: Mapping[str, Any] | Wishes | None) -> Wishes:
    """Check the wishes of a deployment.

    Raises:
        Refusal: unknown name, a value of the wrong kind or out of range, or two wishes that contradict each other.
    """
    if isinstance(wishes, Wishes):
        return _check(wishes)
    given = {key: value for key, value in (wishes or {}).items() if key not in _NOT_SIZES}
    known = {item.name for item in fields(Wishes)}
    for key in given:
        if key not in known:
            close = get_close_matches(key, known, n=2, cutoff=0.5)
            raise Refusal(
                found=f"the wish {key!r} is not known",
                needed="one of " + ", ".join(close or sorted(known)),
                change="correct the name in the deployment",
            )
    values = {key: value for key, value in given.items() if value is not None}
    if isinstance(values.get("gpus"), list | tuple):
        values["gpus"] = tuple(values["gpus"])
    values["sglang"] = read_options(values.get("sglang"))
    return _check(Wishes(**values))


def _check(wishes: Wishes) -> Wishes:
    for name, smallest in (
        ("context_length", 1),
        ("max_sequences", 1),
        ("max_batched_tokens", 1),
        ("kv_cache_memory_bytes", 1),
        ("tensor_parallel_size", 1),
        ("pipeline_parallel_size", 1),
        ("data_parallel_size", 1),
        ("speculative_tokens", 0),
    ):
        value = getattr(wishes, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < smallest):
            raise Refusal(
                found=f"{name} {value!r}", needed=f"a whole number, at least {smallest}", change=f"set `{name}`"
            )
    for name in ("expert_parallel", "text_only", "eager", "keep_used_memory"):
        value = getattr(wishes, name)
        if not isinstance(value, bool):
            raise Refusal(found=f"{name} {value!r}", needed="true or false", change=f"set `{name}`")
    share = wishes.memory_share
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
        raise Refusal(
            found=f"memory_share {share!r}", needed="a number above 0 and at most 1", change="set `memory_share`"
        )
    if share is not None and wishes.kv_cache_memory_bytes is not None:
        raise Refusal(
            found=f"memory_share {share} and kv_cache_memory_bytes {wishes.kv_cache_memory_bytes} together",
            needed="one of them: a fixed KV pool makes the engine ignore its share of memory",
            change="remove `memory_share` or `kv_cache_memory_bytes`",
        )
    if wishes.kv_cache_dtype not in _KV_DTYPES:
        raise Refusal(
            found=f"kv_cache_dtype {wishes.kv_cache_dtype!r}",
            needed=f"one of {', '.join(_KV_DTYPES)}",
            change="set `kv_cache_dtype`",
        )
    if (
        wishes.max_batched_tokens is not None
        and wishes.max_sequences is not None
        and wishes.max_batched_tokens < wishes.max_sequences
    ):
        raise Refusal(
            found=f"max_batched_tokens {wishes.max_batched_tokens} is below max_sequences {wishes.max_sequences}",
            needed=f"at least {wishes.max_sequences} batched tokens: every running sequence gets one",
            change="raise `max_batched_tokens` or lower `max_sequences`",
        )
    _check_gpus(wishes.gpus)
    return wishes


def _check_gpus(gpus: str | int | tuple[int, ...]) -> None:
    if gpus == "all" or (isinstance(gpus, int) and not isinstance(gpus, bool) and gpus > 0):
        return
    whole = isinstance(gpus, tuple) and all(
        isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in gpus
    )
    if whole and isinstance(gpus, tuple) and gpus and len(set(gpus)) == len(gpus):
        return
    raise Refusal(
        found=f"gpus {list(gpus) if isinstance(gpus, tuple) else gpus!r}",
        needed="`all`, a number of GPUs, or a list of different GPU indexes such as [0, 1]",
        change="set `gpus`",
    )
