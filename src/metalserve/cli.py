"""The `metalserve` command: one word for each thing it can do."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from metalserve import gate_command, key_command, kv_command, manifest_command, plan_command, releases_command
from metalserve.errors import MetalserveError

COMMANDS = (plan_command, kv_command, gate_command, manifest_command, releases_command, key_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a refusal goes to standard error as a sentence and ends with status 2."""
    parser = argparse.ArgumentParser(
        prog="metalserve", description="Sizing and proof of OpenAI-compatible endpoints on bare-metal GPU hosts."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    options = parser.parse_args(arguments)
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
