"""Sends streamed requests, so many at a time, and notes when their pieces arrive."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from metalserve.errors import Refusal
from metalserve.load.ladder import GOOD, Answer, step

# The first requests of a step come all at once; so much of the step does not count.
SETTLE_SHARE = 0.2
# After an answer that is none, or a server that turns requests away would be asked without a pause.
PAUSE_SECONDS = 0.2
_TICK_SECONDS = 0.05
# For everything that is no connection to the server.
_OTHER_FILES = 64
_WORDS = ("the", "of", "to", "and", "in", "is", "it", "you", "that", "was", "for", "on", "are", "with", "as", "they")


@dataclass(frozen=True)
class Target:
    """Whom to ask, and what.

    Attributes:
        url: base URL, without /v1.
        model: served name.
        api_key: sent as a bearer token; None sends none.
        prompt_words: length of a prompt. Each is different, so that no prefix cache answers.
        answer_tokens: most tokens of an answer.
        ignore_eos: have the engine go on to the last of them; both engines know it, another server may not.
        limit_seconds: of one request.
    """

    url: str
    model: str
    api_key: str | None = None
    prompt_words: int = 100
    answer_tokens: int = 64
    ignore_eos: bool = True
    limit_seconds: float = 300.0

    def body(self, number: int) -> dict[str, Any]:
        """The request with that number."""
        chosen = random.Random(number).choices(_WORDS, k=self.prompt_words)  # noqa: S311 (no secret)
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": f"{number:08d} {' '.join(chosen)}"}],
            "max_tokens": self.answer_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }


def allow_connections(most: int) -> None:
    """Raise the limit of open files of this process to what so many connections take.

    Raises:
        Refusal: the system's own limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = most + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise Refusal(
            found=f"a limit of {hard} open files",
            needed=f"{needed} for {most} connections",
            change=f"`ulimit -Hn {needed}` as root before it, LimitNOFILE= of the unit, or a shorter --ladder",
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


async def climb(
    target: Target, ladder: Sequence[int], seconds: float, say: Callable[[dict[str, Any]], None] = lambda step: None
) -> list[dict[str, Any]]:
    """Take the steps of the ladder one after the other.

    Args:
        target: whom to ask.
        ladder: requests at a time of each step.
        seconds: of each step; requests that are under way then still get their answer.
        say: is told each step when it is done.

    Raises:
        Refusal: a first request has no streamed answer.
    """
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    async with aiohttp.ClientSession(
        # One connection a request that is under way, and as many of them as are asked for.
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=target.limit_seconds),
        headers=headers,
    ) as session:
        await _try_first(session, target)
        steps = []
        asked = 1
        for concurrency in ladder:
            done, answers = await _step(session, target, concurrency, seconds, asked)
            asked += len(answers)
            steps.append(done)
            say(done)
        return steps


async def first_model(url: str, api_key: str | None, limit_seconds: float) -> str:
    """The first model that the server lists.

    Raises:
        Refusal: it lists none.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=limit_seconds)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(f"{url}/v1/models") as response,
        ):
            return str(json.loads(await response.text())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise Refusal(
            found=f"{url}/v1/models lists no model: {type(error).__name__} {error}",
            needed="a server with the OpenAI API",
            change="the URL, --api-key-file, or SSL_CERT_FILE= before the command where the certificate is your own",
        ) from error


async def _try_first(session: aiohttp.ClientSession, target: Target) -> None:
    notes: list[str] = []
    answer = await _ask(session, target, 0, notes)
    if answer.status != GOOD:
        seen = f"{answer.status} {' '.join(notes)}".strip()
        raise Refusal(
            found=f"{target.url} gives no streamed answer to a first request: {seen}",
            needed="one, of the model that is named",
            change="the URL, --model, --api-key-file, SSL_CERT_FILE= before the command where the certificate is your "
            "own, or --no-ignore-eos for a server that does not know ignore_eos",
        )


async def _step(
    session: aiohttp.ClientSession, target: Target, concurrency: int, seconds: float, first: int
) -> tuple[dict[str, Any], list[Answer]]:
    loop = asyncio.get_running_loop()
    answers: list[Answer] = []
    begin, end = loop.time() + SETTLE_SHARE * seconds, loop.time() + seconds
    sent = first

    async def work() -> None:
        nonlocal sent
        while loop.time() < end:
            number, sent = sent, sent + 1
            answer = await _ask(session, target, number, [])
            answers.append(answer)
            if answer.status != GOOD:
                await asyncio.sleep(PAUSE_SECONDS)

    late: list[float] = []
    watch = asyncio.create_task(_watch_loop(late))
    try:
        await asyncio.gather(*(work() for _ in range(concurrency)))
    finally:
        watch.cancel()
    late_ms = 1000 * statistics.quantiles(late, n=20)[-1] if len(late) > 1 else 0.0
    return step(concurrency, answers, begin, end, late_ms), answers


async def _watch_loop(late: list[float]) -> None:
    """How late this process comes to what is due."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _TICK_SECONDS
        await asyncio.sleep(_TICK_SECONDS)
        late.append(max(0.0, loop.time() - due))


async def _ask(session: aiohttp.ClientSession, target: Target, number: int, notes: list[str]) -> Answer:
    """One request; `notes` gets what the server says where it refuses."""
    loop = asyncio.get_running_loop()
    body = target.body(number)
    pieces: list[float] = []
    tokens, began = 0, loop.time()
    try:
        async with session.post(f"{target.url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                notes.append((await response.text())[:300])
                return Answer(began, str(response.status))
            async for line in response.content:
                if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    notes.append(str(event["error"])[:300])
                    return Answer(began, "broken", pieces, len(pieces))
                tokens = int((event.get("usage") or {}).get("completion_tokens") or tokens)
                if _has_text(event):
                    pieces.append(loop.time())
    except TimeoutError:
        return Answer(began, "timeout", pieces, len(pieces))
    except (aiohttp.ClientError, OSError, ValueError, AttributeError) as error:
        notes.append(f"{type(error).__name__} {error}")
        return Answer(began, "broken", pieces, len(pieces))
    return Answer(began, GOOD if pieces else "empty", pieces, tokens or len(pieces))


def _has_text(event: dict[str, Any]) -> bool:
    """Whether there is a piece of the answer in it; the first event of a stream may only name the role."""
    deltas = (choice.get("delta") or {} for choice in event.get("choices") or ())
    return any(
        delta.get(name) for delta in deltas for name in ("content", "reasoning_content", "reasoning", "tool_calls")
    )
