"""Plans as text for people: one in full, several side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from metalserve.errors import Refusal
from metalserve.planner import Plan
from metalserve.planner.inverse import GpuSet, at_once
from metalserve.planner.units import gib

BAR_WIDTH = 60
# Letter of each part in the bar, in the order in which the engine takes the memory.
_PARTS = (("weights", "W"), ("buffers", "B"), ("activation", "A"), ("graphs", "G"), ("kv", "K"), ("outside", "o"))
_HEAD = ("GPUs", "TP x DP", "weights", "KV cache", "context", "sequences", "KV tokens", "at once")


def write_table(plan: Plan, title: str, out: TextIO) -> None:
    """Write the plan for people: sizes, memory of one GPU, capacity, reasons."""
    out.write(f"{title}, {plan.engine} {plan.engine_version}\n\n")
    out.write(rows(_sizes(plan)))
    out.write("\nMemory of one GPU\n" if plan.device == "cuda" else "\nMemory of the process\n")
    out.write(rows(_memory(plan)))
    if plan.gpu_memory_bytes:
        out.write(f"  [{_bar(plan, plan.gpu_memory_bytes)}]\n")
    out.write("\nCapacity" + (" of each replica" if plan.data_parallel_size > 1 else "") + "\n")
    out.write(rows(_capacity(plan)))
    out.write("\nReasons\n")
    _sentences((f"{field}: {reason}" for field, reason in plan.reasons.items()), out)
    if plan.alternatives:
        out.write("\nAlternatives on the same GPUs\n")
        _sentences(plan.alternatives, out)


def _sentences(sentences: Iterable[str], out: TextIO) -> None:
    for sentence in sentences:
        out.write(textwrap.fill(sentence, 100, initial_indent="  ", subsequent_indent="    ") + "\n")


def write_compared(answers: Iterable[tuple[str, str, Plan | Refusal]], out: TextIO) -> None:
    """Write (model, host, plan or refusal) as one line each; bytes are per GPU, capacities over all replicas."""
    lines: list[tuple[str, ...]] = [("model", *_HEAD)]
    refused = []
    for model, host, answer in answers:
        if isinstance(answer, Plan):
            lines.append((model, host, *_columns(answer)))
        else:
            lines.append((model, host, "does not fit", *[""] * (len(_HEAD) - 2)))
            refused.append(f"{model} on {host}: {answer}")
    out.write(_aligned(lines))
    for sentence in refused:
        out.write("\n" + textwrap.fill(sentence, 100, subsequent_indent="    ") + "\n")


def write_sets(sets: Sequence[GpuSet], model: str, out: TextIO) -> None:
    """Write the smallest sets of GPUs, the least memory first."""
    out.write(f"{model}: the fewest GPUs of each kind, the least memory first\n\n")
    out.write(_aligned([_HEAD, *((f"{entry.count}x{entry.gpu}", *_columns(entry.plan)) for entry in sets)]))


def rows(named: Iterable[tuple[str, str]]) -> str:
    """Names and values as two columns."""
    listed = list(named)
    width = max(len(name) for name, _ in listed)
    return "".join(f"  {name:<{width}}  {value}\n" for name, value in listed)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in lines
    )


def _columns(plan: Plan) -> tuple[str, ...]:
    split = f"{plan.tensor_parallel_size} x {plan.data_parallel_size}"
    if plan.pipeline_parallel_size > 1:
        split += f" (PP {plan.pipeline_parallel_size})"
    return (
        split,
        gib(plan.predicted_bytes.weights),
        gib(plan.predicted_bytes.kv),
        f"{plan.max_model_len:,}",
        str(plan.max_num_seqs),
        f"{plan.kv_cache_tokens * plan.data_parallel_size:,}",
        str(at_once(plan)),
    )


def _sizes(plan: Plan) -> Iterable[tuple[str, str]]:
    gpus = f"{len(plan.gpus_used)} ({', '.join(map(str, plan.gpus_used))})" if plan.gpus_used else "none"
    yield "GPUs", gpus
    yield "tensor parallel", str(plan.tensor_parallel_size)
    if plan.pipeline_parallel_size > 1:
        yield "pipeline parallel", str(plan.pipeline_parallel_size)
    if plan.data_parallel_size > 1:
        yield "data parallel", str(plan.data_parallel_size)
    if plan.expert_parallel:
        yield "expert parallel", "yes"
    if plan.gpu_memory_utilization is not None:
        name = "static fraction" if plan.engine == "sglang" else "memory utilization"
        yield name, f"{plan.gpu_memory_utilization:g}"
    if plan.kv_cache_memory_bytes is not None:
        yield "fixed KV pool", gib(plan.kv_cache_memory_bytes)
    yield "context", f"{plan.max_model_len:,} tokens"
    yield "sequences", str(plan.max_num_seqs)
    yield "batched tokens", f"{plan.max_num_batched_tokens:,}"
    yield "KV data type", plan.kv_cache_dtype
    yield "prefix caching", "on" if plan.prefix_caching else "off"
    if plan.disable_custom_all_reduce:
        yield "custom all-reduce", "off"


def _memory(plan: Plan) -> Iterable[tuple[str, str]]:
    sizes: Mapping[str, int] = plan.as_dict()["predicted_bytes"]
    names = {"kv": "KV cache" if plan.state_slots is None else "state and KV", "outside": "outside the budget"}
    for part, letter in _PARTS:
        if sizes[part]:
            yield f"{letter} {names.get(part, part)}", gib(sizes[part])
    if plan.gpu_memory_bytes:
        yield ". free", gib(plan.gpu_memory_bytes - sum(sizes.values()))
        yield "  usable", gib(plan.gpu_memory_bytes)


def _capacity(plan: Plan) -> Iterable[tuple[str, str]]:
    if plan.engine == "vllm":
        yield "block", f"{plan.block_size_tokens} tokens"
        yield "blocks", f"{plan.num_blocks:,}"
    if plan.state_slots is not None:
        yield "state slots", str(plan.state_slots)
    yield "KV cache", f"{plan.kv_cache_tokens:,} tokens"
    yield "requests of full length at once", f"{plan.max_concurrency:.2f}"


def _bar(plan: Plan, total_bytes: int) -> str:
    """The memory of one GPU as letters, `BAR_WIDTH` wide; a part that exists has at least one letter."""
    sizes: Mapping[str, int] = plan.as_dict()["predicted_bytes"]
    bar = "".join(
        letter * max(round(sizes[part] * BAR_WIDTH / total_bytes), 1) for part, letter in _PARTS if sizes[part]
    )
    return bar[:BAR_WIDTH].ljust(BAR_WIDTH, ".")
