"""`metalserve plan`: size a model on a host shape, without a host."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Mapping
from typing import TextIO

from metalserve import catalogue
from metalserve.planner import Plan, make_plan
from metalserve.planner.units import gib

BAR_WIDTH = 60
# Letter of each part in the bar, in the order in which the engine takes the memory.
_PARTS = (("weights", "W"), ("buffers", "B"), ("activation", "A"), ("graphs", "G"), ("kv", "K"), ("outside", "o"))


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `plan` command."""
    parser = subparsers.add_parser(
        "plan",
        help="size a model on GPUs: parallel sizes, share of memory, context, capacity",
        description="Size a model on a host shape. Exit status: 0 it fits, 2 it does not (the reason is on stderr).",
    )
    parser.add_argument("--model", required=True, help="catalogue key, or a directory with config.json")
    parser.add_argument("--gpus", required=True, help="host shape: 8xH800, 1xL40S, 2xA100-SXM4-80GB, cpu-24GiB")
    parser.add_argument("--engine", default="vllm", choices=catalogue.ENGINES)
    parser.add_argument("--engine-version", help="release number (default: the newest known)")
    parser.add_argument("--context-length", type=int, help="tokens (default: as much as fits)")
    parser.add_argument("--max-sequences", type=int, help="requests that run at once")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "bfloat16", "fp8"))
    parser.add_argument("--tensor-parallel-size", type=int)
    parser.add_argument("--memory-share", type=float, help="share of each GPU this engine may take, above 0 to 1")
    parser.add_argument("--speculative-tokens", type=int, default=0, help="MTP draft tokens")
    parser.add_argument("--text-only", action="store_true", help="without the vision tower")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan and return 0.

    Raises:
        Refusal: it does not fit; the command line writes it on stderr and ends with status 2.
    """
    plan = make_plan(
        args.model,
        catalogue.host_from_shape(args.gpus),
        engine=args.engine,
        engine_version=args.engine_version,
        wishes={
            "context_length": args.context_length,
            "max_sequences": args.max_sequences,
            "kv_cache_dtype": args.kv_cache_dtype,
            "tensor_parallel_size": args.tensor_parallel_size,
            "memory_share": args.memory_share,
            "speculative_tokens": args.speculative_tokens,
            "text_only": args.text_only,
        },
    )
    if args.json:
        sys.stdout.write(json.dumps(plan.as_dict(), indent=2) + "\n")
    else:
        write_table(plan, f"{args.model} on {args.gpus}", sys.stdout)
    return 0


def write_table(plan: Plan, title: str, out: TextIO) -> None:
    """Write the plan for people: sizes, memory of one GPU, capacity, reasons."""
    out.write(f"{title}, {plan.engine} {plan.engine_version}\n\n")
    out.write(_rows(_sizes(plan)))
    out.write("\nMemory of one GPU\n" if plan.device == "cuda" else "\nMemory of the process\n")
    out.write(_rows(_memory(plan)))
    if plan.gpu_memory_bytes:
        out.write(f"  [{_bar(plan, plan.gpu_memory_bytes)}]\n")
    out.write("\nCapacity" + (" of each replica" if plan.data_parallel_size > 1 else "") + "\n")
    out.write(_rows(_capacity(plan)))
    out.write("\nReasons\n")
    for field, reason in plan.reasons.items():
        out.write(textwrap.fill(f"{field}: {reason}", 100, initial_indent="  ", subsequent_indent="    ") + "\n")


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
    yield "context", f"{plan.max_model_len} tokens"
    yield "sequences", str(plan.max_num_seqs)
    yield "batched tokens", str(plan.max_num_batched_tokens)
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
        yield "blocks", str(plan.num_blocks)
    if plan.state_slots is not None:
        yield "state slots", str(plan.state_slots)
    yield "KV cache", f"{plan.kv_cache_tokens} tokens"
    yield "requests of full length at once", f"{plan.max_concurrency:.2f}"


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    listed = list(rows)
    width = max(len(name) for name, _ in listed)
    return "".join(f"  {name:<{width}}  {value}\n" for name, value in listed)


def _bar(plan: Plan, total_bytes: int) -> str:
    """The memory of one GPU as letters, `BAR_WIDTH` wide; a part that exists has at least one letter."""
    sizes: Mapping[str, int] = plan.as_dict()["predicted_bytes"]
    bar = "".join(
        letter * max(round(sizes[part] * BAR_WIDTH / total_bytes), 1) for part, letter in _PARTS if sizes[part]
    )
    return bar[:BAR_WIDTH].ljust(BAR_WIDTH, ".")
