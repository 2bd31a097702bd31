"""The planner asked the other way round: the longest context, the most requests at once, the fewest GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from metalserve import catalogue
from metalserve.errors import Refusal
from metalserve.planner import ModelName, Plan, Wishes, make_plan, read_wishes
from metalserve.planner.resolve import resolve
from metalserve.planner.vllm_fit import SEQUENCES

GPU_COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class GpuSet:
    """The fewest GPUs of one kind on which everything fits, with the plan."""

    gpu: str
    count: int
    memory_bytes: int
    """Usable memory of all of them together."""
    plan: Plan


def at_once(plan: Plan) -> int:
    """Requests of full length that run at once, over all replicas."""
    return min(int(plan.max_concurrency), plan.max_num_seqs) * plan.data_parallel_size


def longest_context(
    model: ModelName,
    host_facts: Mapping[str, Any],
    engine: str = "vllm",
    engine_version: str | None = None,
    wishes: Mapping[str, Any] | Wishes | None = None,
) -> Plan:
    """The plan with the longest context that fits; `context_length` of the wishes is not looked at.

    Raises:
        Refusal: not even a short context fits.
    """
    return make_plan(model, host_facts, engine, engine_version, replace(read_wishes(wishes), context_length=None))


def most_requests(
    model: ModelName,
    host_facts: Mapping[str, Any],
    engine: str = "vllm",
    engine_version: str | None = None,
    wishes: Mapping[str, Any] | Wishes | None = None,
) -> Plan:
    """The plan with the most requests of the wished length (None: the model's own) at once.

    Raises:
        Refusal: not one such request fits.
    """
    asked = read_wishes(wishes)
    planned = resolve(model)
    context = asked.context_length or planned.context_tokens
    best: Plan | None = None
    refused: Refusal | None = None
    # Fewer rows leave more memory for the cache; more rows let more requests run.
    for sequences in (None, *SEQUENCES, 512, 1024):
        try:
            found = make_plan(
                planned,
                host_facts,
                engine,
                engine_version,
                replace(asked, context_length=context, max_sequences=sequences),
            )
        except Refusal as refusal:
            refused = refused or refusal
            continue
        if best is None or at_once(found) > at_once(best):
            best = found
    if best is None:
        raise refused if refused is not None else AssertionError("there is always one attempt")
    return best


def smallest_gpus(
    model: ModelName,
    engine: str = "vllm",
    engine_version: str | None = None,
    wishes: Mapping[str, Any] | Wishes | None = None,
    *,
    requests: int = 1,
    gpus: Sequence[str] | None = None,
) -> list[GpuSet]:
    """For each kind of GPU the fewest (1, 2, 4 or 8) that hold the wished context, the least memory first.

    Args:
        model: as for `make_plan`.
        engine: vllm or sglang.
        engine_version: release number; None: the newest one known.
        wishes: as for `make_plan`; without `context_length` the model's own context must fit.
        requests: how many requests of that length must run at once.
        gpus: names of GPUs of the catalogue; None: all of them.

    Raises:
        Refusal: no such set; says what the largest lacks. Or bad wishes, an unknown model or GPU.
    """
    asked = read_wishes(wishes)
    planned = resolve(model)
    context = asked.context_length or planned.context_tokens
    asked = replace(asked, context_length=context, gpus="all")
    found: list[GpuSet] = []
    last = ""
    cards = [catalogue.gpu(name) for name in gpus] if gpus is not None else list(catalogue.gpus().values())
    for card in cards:
        for count in GPU_COUNTS:
            try:
                plan = make_plan(
                    planned, catalogue.host_from_shape(f"{count}x{card.key}"), engine, engine_version, asked
                )
            except Refusal as refusal:
                last = f"{count}x{card.key}: {refusal.found}"
                continue
            if at_once(plan) >= requests:
                found.append(GpuSet(card.key, count, count * card.memory_usable_bytes, plan))
                break
            last = f"{count}x{card.key} runs {at_once(plan)} at once"
    if not found:
        raise Refusal(
            found=f"{planned.key} with {requests} request{'s' * (requests > 1)} of {context} tokens at once fits on no "
            f"set of up to {GPU_COUNTS[-1]} GPUs of one kind; {last}",
            needed="one kind of GPU on which it fits",
            change="a shorter context_length, fewer requests, kv_cache_dtype fp8, or a smaller model or format",
        )
    return sorted(found, key=lambda entry: (entry.memory_bytes, entry.count, entry.gpu))
