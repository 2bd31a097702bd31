"""`metalserve load`: a concurrency ladder against an OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metalserve.errors import Refusal
from metalserve.load import ladder
from metalserve.remote import http_client
from metalserve.remote.gate_key import read_api_key

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_MEASURED, EXIT_NO_ANSWER = 0, 1


def add_parser(subparsers: SubParsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "load",
        help="load an OpenAI-compatible endpoint step by step, and see where queueing starts",
        description="So many streamed requests at a time, step by step. It is traffic: against a gateway in use it "
        "slows others down. Exit status: 0 measured, 1 a step had no whole answer, 2 nothing was measured.",
    )
    parser.add_argument("url", help="base URL, for example http://gateway:8000")
    parser.add_argument("--model", help="served name to ask; without it the first of /v1/models")
    parser.add_argument("--ladder", default="1,2,4,8,16", metavar="N,N,...", help="requests at a time, rising")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each step")
    parser.add_argument("--prompt-words", type=int, default=100, help="length of a prompt")
    parser.add_argument("--answer-tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="have every answer be that long; a server that is no vLLM or SGLang may refuse it",
    )
    parser.add_argument("--request-timeout", type=float, default=300.0, help="limit of one request, in seconds")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file that holds the API key")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a page with plots to this file as well")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Climb the ladder and show what was seen; gives the exit status.

    Raises:
        Refusal: what is asked for cannot be measured, or a first request has no answer.
    """
    steps = read_ladder(options.ladder)
    for name in ("seconds", "prompt_words", "answer_tokens", "request_timeout"):
        if getattr(options, name) <= 0:
            raise Refusal(found=f"{getattr(options, name)}", needed="more than 0", change=f"--{name.replace('_', '-')}")
    try:
        if http_client.parse_base_url(options.url).scheme == "http+unix":
            raise ValueError(f"the URL {options.url!r} is a Unix socket")
        key = read_api_key(options.api_key_file) if options.api_key_file else None
    except ValueError as error:
        raise Refusal(
            found=str(error),
            needed="a base URL of http or https, and a key on one line",
            change="the URL, or --api-key-file",
        ) from error
    client = _client()
    client.allow_connections(steps[-1])
    result = asyncio.run(_measure(client, options, steps, key))
    if options.page:
        options.page.write_text(ladder.page(result), encoding="utf-8")
    lines = [json.dumps(result, ensure_ascii=False, indent=2)] if options.json else ladder.table(result)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return EXIT_MEASURED if all(each["answered"] for each in result["steps"]) else EXIT_NO_ANSWER


async def _measure(client: Any, options: argparse.Namespace, steps: list[int], key: str | None) -> dict[str, Any]:
    url = options.url.rstrip("/").removesuffix("/v1")
    model = options.model or await client.first_model(url, key, options.request_timeout)
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    target = client.Target(
        url, model, key, options.prompt_words, options.answer_tokens, options.ignore_eos, options.request_timeout
    )

    def say(step: dict[str, Any]) -> None:
        first = f"{step['ttft_ms']['median']:.0f} ms to the first token, " if step["ttft_ms"] else ""
        print(f"{step['concurrency']} at a time: {first}{step['tokens_per_second']:.0f} tokens/s", file=sys.stderr)

    measured = await client.climb(target, steps, options.seconds, say)
    return {
        "schema": ladder.SCHEMA,
        "when": when,
        "url": url,
        "model": model,
        "asked": {
            "seconds": options.seconds,
            "prompt_words": options.prompt_words,
            "answer_tokens": options.answer_tokens,
            "ignore_eos": options.ignore_eos,
        },
        "steps": measured,
        "knee": ladder.knee(measured),
        "judged": ladder.judged(measured),
    }


def read_ladder(text: str) -> list[int]:
    """The steps of a ladder as it is typed.

    Raises:
        Refusal: they are no rising whole numbers from 1 on.
    """
    words = [word.strip() for word in text.split(",")]
    steps = [int(word) for word in words if word.isdecimal()]
    if len(steps) != len(words) or steps[0] < 1 or steps != sorted(set(steps)):
        raise Refusal(
            found=f"the ladder {text!r}", needed="rising whole numbers from 1 on, such as 1,2,4,8", change="--ladder"
        )
    return steps


def _client() -> Any:
    try:
        from metalserve.load import client
    except ImportError as error:
        raise Refusal(
            found=f"aiohttp is not installed ({error})",
            needed="aiohttp, which holds the connections",
            change="pip install 'metalserve[load]', or make venv in a checkout",
        ) from error
    return client
