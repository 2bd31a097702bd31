"""Reads a streamed chat answer (server-sent events) and judges its form."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass

from .gate_judge import Answer, Usage, WrongAnswerError, usage_of


@dataclass(frozen=True)
class StreamedAnswer:
    """A whole streamed answer.

    Args:
        answer: content and reasoning put together from the chunks.
        usage: the counts of the last chunk.
        chunks: how many chunks carried content.
        first_content_seconds: from the call of `read_stream` to the first chunk with content.
        seconds: from the call of `read_stream` to the end of the stream.
        raw: the lines as they came, for an excerpt.

    """

    answer: Answer
    usage: Usage
    chunks: int
    first_content_seconds: float
    seconds: float
    raw: str


def read_stream(lines: Iterable[str]) -> StreamedAnswer:
    """Put a streamed answer together.

    Raises:
        WrongAnswerError: a chunk is not JSON or is an error, the stream ends without [DONE] or goes on after
            it, has no content, or has no usage in its last chunk.

    """
    started = time.monotonic()
    first_content_seconds = 0.0
    content: list[str] = []
    reasoning: list[str] = []
    finish_reason = ""
    last: dict[str, object] = {}
    raw: list[str] = []
    done = False
    for line in lines:
        if not line or line.startswith(":"):
            # Empty lines end an event; comments keep a connection alive.
            continue
        raw.append(line)
        field, _, value = line.partition(":")
        if field != "data":
            continue
        value = value.strip()
        if done:
            raise WrongAnswerError("data after [DONE]", "[DONE] as the last event", body="\n".join(raw[-3:]))
        if value == "[DONE]":
            done = True
            continue
        last = _chunk(value)
        delta, reason = _delta(last)
        finish_reason = reason or finish_reason
        reasoning.append(delta.get("reasoning") or delta.get("reasoning_content") or "")
        if delta.get("content"):
            first_content_seconds = first_content_seconds or time.monotonic() - started
            content.append(delta["content"])
    text = "\n".join(raw)
    if not done:
        raise WrongAnswerError(
            f"a stream that ends without [DONE] after {len(raw)} events", "data: [DONE] at its end", body=text
        )
    answer = Answer("".join(content), "".join(reasoning), finish_reason, [])
    if not content:
        raise WrongAnswerError(f"a stream with {answer.seen()}", "chunks with content", body=text)
    try:
        usage = usage_of(last, json.dumps(last))
    except WrongAnswerError as wrong:
        raise WrongAnswerError(f"{wrong.found} in the last chunk", wrong.expected, body=wrong.body) from None
    return StreamedAnswer(answer, usage, len(content), first_content_seconds, time.monotonic() - started, text)


def _chunk(value: str) -> dict[str, object]:
    try:
        chunk = json.loads(value)
    except (ValueError, RecursionError):
        raise WrongAnswerError("a chunk that is not JSON", "data: with a JSON object", body=value) from None
    if not isinstance(chunk, dict):
        raise WrongAnswerError("a chunk that is not an object", "data: with a JSON object", body=value)
    if chunk.get("error"):
        raise WrongAnswerError("an error inside the stream", "chunks of an answer", body=value)
    return chunk


def _delta(chunk: dict[str, object]) -> tuple[dict[str, str], str]:
    """The text fields of the first choice, and its finish reason; both may be empty."""
    choices = chunk.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    if not isinstance(choice, dict):
        return {}, ""
    delta = choice.get("delta")
    texts = {k: v for k, v in delta.items() if isinstance(v, str)} if isinstance(delta, dict) else {}
    reason = choice.get("finish_reason")
    return texts, reason if isinstance(reason, str) else ""
