"""`metalserve bench`: show, compare and draw what benchmarks have measured."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from metalserve.benchmarks import comparison, page, read_result, table
from metalserve.errors import Refusal

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: SubParsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "bench",
        help="show one result of a benchmark, or compare two",
        description="Results are what playbooks/ops/benchmark.yml brings to artifacts/benchmarks.",
    )
    parser.add_argument("result", type=Path, nargs="+", help="one result, or the old and the new one")
    parser.add_argument("--page", type=Path, help="write a page with plots to this file, of up to four results")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table or the comparison, and write the page where one is asked for."""
    most = 4 if options.page else 2
    if len(options.result) > most:
        raise Refusal(
            found=f"{len(options.result)} results",
            needed=f"at most {most}",
            change="the names, or --page, which takes four",
        )
    results = [read_result(path) for path in options.result]
    if options.page:
        options.page.write_text(page(results), encoding="utf-8")
        print(options.page)
        return 0
    lines = table(results[0]) if len(results) == 1 else comparison(*results)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0
