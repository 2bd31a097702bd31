"""`metalserve kv`: the capacity of a KV cache of known size, as vLLM reports it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict

from metalserve.errors import Refusal
from metalserve.plan_command import BAD_INPUT, BadInput, end_usage_errors_with_1, whole
from metalserve.planner import kv_capacity, tensor_parallel_problems
from metalserve.planner.resolve import resolve
from metalserve.planner.table import rows
from metalserve.planner.units import gib
from metalserve.planner.versions import check_version

_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*(GiB|MiB|KiB|GB|MB|kB|B)?$")
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `kv` command."""
    parser = subparsers.add_parser(
        "kv",
        help="what a KV cache of known size holds: block, blocks, tokens, concurrency",
        description="Blocks, tokens and concurrency of vLLM's KV cache, for the memory available on each GPU. "
        "Exit status: 0 it fits, 2 one request does not fit, 1 bad input.",
    )
    parser.add_argument("--config", required=True, help="config.json, a directory with one, or a catalogue key")
    parser.add_argument("--available", required=True, help="memory for the KV cache on each GPU: 20GiB, 512MiB, bytes")
    parser.add_argument("--context", "--context-length", type=whole, help="tokens (default: the model's own)")
    parser.add_argument("--tensor-parallel", "--tensor-parallel-size", type=whole, default=1)
    parser.add_argument("--pipeline-parallel", "--pipeline-parallel-size", type=whole, default=1)
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "bfloat16", "fp8"))
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--gdn-prefill-backend", default="triton", choices=("triton", "flashinfer"))
    parser.add_argument("--speculative-tokens", type=int, default=0, help="MTP draft tokens")
    parser.add_argument("--max-batched-tokens", type=whole, default=8192)
    parser.add_argument("--engine-version", help="vLLM release (default: the newest known)")
    parser.add_argument("--format", default="table", choices=("table", "json"))
    end_usage_errors_with_1(parser)
    parser.set_defaults(run=run)


def read_size(text: str) -> int:
    """`20GiB` -> bytes.

    Raises:
        Refusal: not a size.
    """
    match = _SIZE.match(text.strip())
    if not match:
        raise Refusal(
            found=f"{text!r} is not a size",
            needed=f"a number and one of {', '.join(_UNITS)}, or bytes alone",
            change="write for example --available 20GiB",
        )
    return int(float(match[1]) * _UNITS[match[2] or "B"])


def run(args: argparse.Namespace) -> int:
    """Print the capacity and return 0; 1 on bad input.

    Raises:
        DoesNotFit: one request of that length does not.
    """
    with BadInput() as reading:
        model = resolve(args.config)
        available = read_size(args.available)
        version = check_version("vllm", args.engine_version, model.key, None)
        problems = tensor_parallel_problems(model.shape, args.tensor_parallel)
        if problems:
            raise Refusal(
                found=f"tensor parallel {args.tensor_parallel} for {model.key}: {problems[0]}",
                needed="a size the model can be split into",
                change="set --tensor-parallel",
            )
        context = args.context or model.context_tokens
        found = kv_capacity(
            model.shape,
            tensor_parallel_size=args.tensor_parallel,
            pipeline_parallel_size=args.pipeline_parallel,
            available_bytes=available,
            max_model_len=context,
            kv_cache_dtype=args.kv_cache_dtype,
            prefix_caching=not args.no_prefix_caching,
            gdn_prefill_backend=args.gdn_prefill_backend,
            num_speculative_tokens=args.speculative_tokens,
            max_num_batched_tokens=args.max_batched_tokens,
            engine_version=version,
        )
    if reading.failed:
        return BAD_INPUT
    if args.format == "json":
        sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")
        return 0
    sys.stdout.write(f"{model.key}, tensor parallel {args.tensor_parallel}, vllm {version}\n\n")
    sys.stdout.write(
        rows(
            [
                ("available on each GPU", gib(available)),
                ("block", f"{found.block_size_tokens} tokens, {gib(found.block_bytes)}"),
                ("blocks", f"{found.num_blocks:,}"),
                ("KV cache", f"{found.capacity_tokens:,} tokens"),
                (f"a request of {context:,} tokens", f"{found.blocks_per_request:,} blocks"),
                ("such requests at once", f"{found.max_concurrency:.2f}"),
            ]
        )
    )
    return 0
