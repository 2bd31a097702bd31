"""`metalserve gate`: the gate from the command line, against any OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from metalserve.remote import gate, http_client
from metalserve.remote.gate_key import read_api_key

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_PASSED = 0
EXIT_REFUSED = 1
EXIT_USAGE = 2


def add_parser(subparsers: SubParsers) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "gate",
        help="check by behaviour that an OpenAI-compatible endpoint may take traffic",
        description="Asks questions with known answers. Exit status: 0 passed, 1 refused, 2 usage error.",
    )
    parser.add_argument("url", type=_base_url, help="base URL, for example http://host:8000")
    parser.add_argument("--model", help="served name to ask; without it the first of /v1/models")
    parser.add_argument("--engine", choices=gate.ENGINE_NAMES, default="vllm", help="whose differences to expect")
    parser.add_argument("--checks", type=_check_names, metavar="A,B", help=f"out of {','.join(gate.CHECK_NAMES)}")
    parser.add_argument("--thinking", choices=tuple(gate.THINKING), default="absent", help="enable_thinking to send")
    parser.add_argument("--max-tokens", type=_positive, help="room for one answer, in tokens")
    parser.add_argument("--burst", type=_positive, default=gate.DEFAULT_BURST_SIZE, help="concurrent requests")
    parser.add_argument(
        "--hidden-routes",
        type=lambda text: [route for route in text.split(",") if route],
        default=[],
        metavar="/A,/B",
        help="routes that must not answer without a key; without it those of the engine",
    )
    parser.add_argument(
        "--long-prompt",
        type=_positive,
        default=gate.DEFAULT_LONG_PROMPT_TOKENS,
        help="the longest prompt that is asked, in tokens",
    )
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=int(gate.DEFAULT_TIMEOUT_SECONDS),
        help="limit of it all, in seconds",
    )
    parser.add_argument(
        "--request-timeout",
        type=_positive,
        default=int(gate.DEFAULT_REQUEST_TIMEOUT_SECONDS),
        help="limit of one request, in seconds",
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file that holds the API key")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the gate and print its result; gives the exit status."""
    api_key = None
    if args.api_key_file is not None:
        try:
            api_key = read_api_key(args.api_key_file)
        except ValueError as error:
            sys.stderr.write(f"metalserve gate: {error}\n")
            return EXIT_USAGE
    result = gate.run_gate(
        args.url,
        args.model,
        timeout_seconds=args.timeout,
        request_timeout_seconds=args.request_timeout,
        api_key=api_key,
        checks=args.checks,
        engine=args.engine,
        thinking=args.thinking,
        max_tokens=args.max_tokens,
        burst_size=args.burst,
        hidden_routes=args.hidden_routes,
        long_prompt_tokens=args.long_prompt,
    )
    if args.json:
        sys.stdout.write(json.dumps(result.as_dict(), ensure_ascii=False, indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(result.table()) + "\n")
    return EXIT_PASSED if result.passed else EXIT_REFUSED


def _base_url(text: str) -> str:
    try:
        http_client.parse_base_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _check_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in gate.CHECK_NAMES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"found {', '.join(unknown) or 'no name'}; needed: names out of {', '.join(gate.CHECK_NAMES)}"
        )
    return names


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; needed: a whole number of 1 or more")
    return number
