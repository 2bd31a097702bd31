"""The `metalserve` command: one word for each thing it can do."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from metalserve.errors import MetalserveError

# Word typed first -> the module that brings it. Only that one is imported: a plan needs no gate, and should be quick.
MODULES = {
    "plan": "plan_command",
    "kv": "kv_command",
    "gate": "gate_command",
    "manifest": "manifest_command",
    "releases": "releases_command",
    "diff": "releases_command",
    "key": "key_command",
    "run": "run_command",
    "bench": "bench_command",
    "load": "load_command",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a refusal goes to standard error as a sentence and ends with status 2."""
    parser = argparse.ArgumentParser(
        prog="metalserve", description="Sizing and proof of OpenAI-compatible endpoints on bare-metal GPU hosts."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    words = sys.argv[1:] if arguments is None else list(arguments)
    asked = MODULES.get(words[0]) if words else None
    for module in [asked] if asked else dict.fromkeys(MODULES.values()):
        import_module(f"metalserve.{module}").add_parser(subparsers)
    options = parser.parse_args(words)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has seen enough (`metalserve plan ... | head`); Python must not complain when it closes the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MetalserveError as refusal:
        print(f"metalserve: {refusal}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
