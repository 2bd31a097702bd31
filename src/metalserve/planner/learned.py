"""What an engine measured at an earlier start, and how the next plan uses it.

One start tells, for its model, GPU and sizes, how much of the engine's budget did not become KV cache. That number does
not depend on the share of memory or on the context length (starts of vLLM 0.24 on an H200: 4.009 GiB of activation at
0.90 and 0.55, at 32 768 and 262 144 tokens), so it replaces the estimate in every later plan of the same sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from metalserve.errors import Refusal
from metalserve.planner.plan_types import Plan
from metalserve.planner.units import gib

SCHEMA = 1
# Usable memory of the same GPU may differ a little with the driver; a plan for another card is not corrected.
_SAME_MEMORY = 0.01


@dataclass(frozen=True)
class MeasuredStart:
    """One start of vLLM on CUDA GPUs (bytes of one GPU, lengths in tokens).

    The fields up to `speculative_tokens` must equal those of a plan for the start to say anything about it; with the
    same sequences and batched tokens it replaces the estimate. Where image, model revision, driver or arguments are
    known, a caller compares them too. `used_bytes` is what the GPU had in use after the start,
    None when nobody looked.
    """

    engine: str
    engine_version: str
    model: str
    gpu_name: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    expert_parallel: bool
    enforce_eager: bool
    text_only: bool
    speculative_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    image: str | None
    gpu_memory_bytes: int
    gpu_memory_utilization: float
    kv_cache_dtype: str
    block_size_tokens: int
    num_blocks: int
    used_bytes: int | None = None
    model_revision: str | None = None
    driver: str | None = None
    arguments: str | None = None
    """Of what else was given to the engine: a hash."""

    @property
    def requested_bytes(self) -> int:
        """The budget the engine had."""
        return math.ceil(self.gpu_memory_bytes * self.gpu_memory_utilization)


# Fields that a start and a plan must have in common for the start to say anything about it.
SAME = tuple(field.name for field in fields(MeasuredStart))[:11]


def expected_start(
    plan: Plan,
    *,
    model: str,
    gpu_name: str,
    text_only: bool = False,
    speculative_tokens: int = 0,
    image: str | None = None,
    model_revision: str | None = None,
    driver: str | None = None,
    arguments: str | None = None,
) -> dict[str, Any] | None:
    """The record of a start with this plan but for what the engine will report (`num_blocks`, `used_bytes`).

    None where a start tells nothing new: there is no share of GPU memory, so nothing is estimated. The arguments are
    those of `measured_start` and fields of `MeasuredStart`.
    """
    if plan.engine != "vllm" or plan.gpu_memory_utilization is None or plan.gpu_memory_bytes is None:
        return None
    return {
        "schema": SCHEMA,
        "engine": plan.engine,
        "engine_version": plan.engine_version,
        "model": model,
        "gpu_name": gpu_name,
        "tensor_parallel_size": plan.tensor_parallel_size,
        "pipeline_parallel_size": plan.pipeline_parallel_size,
        "data_parallel_size": plan.data_parallel_size,
        "expert_parallel": plan.expert_parallel,
        "enforce_eager": plan.enforce_eager,
        "text_only": text_only,
        "speculative_tokens": speculative_tokens,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "image": image,
        "gpu_memory_bytes": plan.gpu_memory_bytes,
        "gpu_memory_utilization": plan.gpu_memory_utilization,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "block_size_tokens": plan.block_size_tokens,
        "model_revision": model_revision,
        "driver": driver,
        "arguments": arguments,
    }


def measured_start(
    plan: Plan,
    *,
    model: str,
    gpu_name: str,
    reported: Mapping[str, Any],
    used_bytes: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The record of a start that went well, of plain types, to be kept with the release.

    Args:
        plan: the plan it was started with.
        model: catalogue key.
        gpu_name: name of the GPU, as in the host facts.
        reported: labels of the engine's metric `vllm:cache_config_info` (num_gpu_blocks, block_size).
        used_bytes: memory in use on the fullest GPU after the start, without the driver's reserve.
        more: text_only, speculative_tokens, image and so on, as for `expected_start`.

    Raises:
        Refusal: a plan without a share of GPU memory, or an engine that runs with other blocks than planned.
    """
    expected = expected_start(plan, model=model, gpu_name=gpu_name, **more)
    if expected is None:
        raise Refusal(
            found=f"a start of {plan.engine} on {plan.device}"
            + (" with a fixed KV pool" if plan.kv_cache_memory_bytes is not None else ""),
            needed="vLLM with a share of GPU memory: only there is something estimated that a start measures",
            change="keep no measurement of this deployment",
        )
    try:
        blocks, block = int(reported["num_gpu_blocks"]), int(reported["block_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(
            found=f"a report of the engine without a readable {error}",
            needed="the labels num_gpu_blocks and block_size of vllm:cache_config_info",
            change="read the metric again after the engine is ready",
        ) from error
    if block != plan.block_size_tokens:
        raise Refusal(
            found=f"the engine runs with blocks of {block} tokens, the plan says {plan.block_size_tokens}",
            needed="the engine of this plan",
            change="plan again with the engine's version, or remove what engine_args override",
        )
    return {**expected, "num_blocks": blocks, "used_bytes": used_bytes}


def read_measured(records: Iterable[Mapping[str, Any] | MeasuredStart] | None) -> tuple[MeasuredStart, ...]:
    """Check records of earlier starts. One of another schema is left out: it says nothing about this release.

    Raises:
        Refusal: a record that is incomplete or of the wrong kinds.
    """
    return tuple(
        record if isinstance(record, MeasuredStart) else _read(record)
        for record in records or ()
        if isinstance(record, MeasuredStart) or not isinstance(record, Mapping) or record.get("schema") == SCHEMA
    )


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "str | None": (str, type(None)),
    "int | None": (int, type(None)),
}


def _read(record: object) -> MeasuredStart:
    if not isinstance(record, Mapping):
        raise _unreadable(f"is a {type(record).__name__}", "a mapping")
    values = {key: value for key, value in record.items() if key != "schema"}
    known = {field.name: str(field.type) for field in fields(MeasuredStart)}
    stray = sorted(set(values) ^ set(known))
    if stray:
        word = "has the unknown field" if stray[0] in values else "has no"
        raise _unreadable(f"{word} {stray[0]}", f"exactly {', '.join(known)}")
    for name, kind in known.items():
        value = values[name]
        if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise _unreadable(f"has {name} {value!r}", f"{name} as {kind}")
    start = MeasuredStart(**values)
    if start.num_blocks < 1 or start.gpu_memory_bytes < 1 or not 0 < start.gpu_memory_utilization <= 1:
        raise _unreadable("has sizes out of range", "blocks and memory above 0, a share above 0 and at most 1")
    return start


def _unreadable(found: str, needed: str) -> Refusal:
    return Refusal(
        found=f"a record of an earlier start {found}",
        needed=needed,
        change="remove the record; the plan then goes by its estimate",
    )


def matching(
    starts: Iterable[MeasuredStart], wanted: Mapping[str, object], *, gpu_memory_bytes: int, image: str | None
) -> list[MeasuredStart]:
    """The starts whose fields equal the wanted ones, on a GPU of the same memory.

    `wanted` maps the names in `SAME` to values. Starts of another image do not count when both images are known.
    """
    return [
        start
        for start in starts
        if all(getattr(start, name) == wanted[name] for name in SAME)
        and abs(start.gpu_memory_bytes - gpu_memory_bytes) <= _SAME_MEMORY * gpu_memory_bytes
        and (image is None or start.image is None or start.image == image)
    ]


def taken_bytes(start: MeasuredStart, block_bytes: int) -> int:
    """Bytes of the engine's budget that did not become KV cache; up to one block too many."""
    return start.requested_bytes - start.num_blocks * block_bytes


def sentence(start: MeasuredStart, taken: int, estimated: int) -> str:
    """The reason of a plan that goes by a measurement."""
    return (
        f"measured at an earlier start with these sizes ({start.num_blocks} blocks at a share of "
        f"{start.gpu_memory_utilization:g}): {gib(taken)} beside the KV cache, where the estimate says {gib(estimated)}"
    )


def warning(taken_more: int, outside_more: int) -> str:
    """The reason of a plan whose estimate was lowered after starts with other numbers of sequences or tokens."""
    parts = [f"{gib(size)} {place}" for size, place in ((taken_more, "inside"), (outside_more, "outside")) if size]
    return f"lowered after an earlier start took {' and '.join(parts)} of its budget more than estimated"
