"""What a load test has seen: numbers of each step, where queueing begins, and how people are shown it."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metalserve import pages

SCHEMA = 1
GOOD = "200"
# Where queueing begins: no later step brings that much more throughput, and each has first tokens that much later.
MORE_THROUGHPUT = 1.1
MORE_WAITING = 1.25
# A client that is itself so late tells more of itself than of the server.
LATE_MS = 50.0
_MEASURES = {
    "ttft_ms": "time to the first token, ms",
    "itl_ms": "between two pieces, ms",
    "tokens_per_second": "tokens a second",
    "answers_per_second": "answers a second",
}


@dataclass(frozen=True)
class Answer:
    """One request.

    Attributes:
        began: when it was sent, in seconds of the clock of all requests.
        status: `200`, another status, or in a word why there was no whole answer: `timeout`, `broken`, `empty`.
        pieces: when the pieces of its text arrived, on the same clock.
        tokens: of the answer by the server's own count; the number of pieces where it gives none.
    """

    began: float
    status: str
    pieces: Sequence[float] = ()
    tokens: int = 0


def step(concurrency: int, answers: Sequence[Answer], begin: float, end: float, late_ms: float = 0.0) -> dict[str, Any]:
    """One step of the ladder.

    Times are those of the requests sent between `begin` and `end`, however long they took: those that wait longest must
    not be missing. Throughput is what arrived in that time, whenever it was asked for.

    Args:
        concurrency: requests at a time.
        answers: of all requests of the step.
        begin: of the time that counts, in seconds of the answers' clock.
        end: of it.
        late_ms: how late this client itself was, 95 % of the time.
    """
    counted = [answer for answer in answers if begin <= answer.began < end]
    good = [answer for answer in counted if answer.status == GOOD]
    tokens = answered = 0.0
    for answer in answers:
        if answer.pieces:
            within = bisect_left(answer.pieces, end) - bisect_left(answer.pieces, begin)
            tokens += answer.tokens * within / len(answer.pieces)
            answered += answer.status == GOOD and begin <= answer.pieces[-1] < end
    gaps = [
        later - earlier for answer in good for earlier, later in zip(answer.pieces, answer.pieces[1:], strict=False)
    ]
    return {
        "concurrency": concurrency,
        "seconds": round(end - begin, 3),
        "requests": len(counted),
        "answered": len(good),
        "errors": dict(sorted(Counter(answer.status for answer in counted if answer.status != GOOD).items())),
        "ttft_ms": _spread([answer.pieces[0] - answer.began for answer in good]),
        "itl_ms": _spread(gaps),
        "tokens_per_second": round(tokens / (end - begin), 2),
        "answers_per_second": round(answered / (end - begin), 3),
        "client_late_ms": round(late_ms, 1),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median and 95th percentile in milliseconds; None without any."""
    if not seconds:
        return None
    last = statistics.quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    return {"median": round(1000 * statistics.median(seconds), 3), "p95": round(1000 * last, 3)}


def knee(steps: Sequence[Mapping[str, Any]]) -> int | None:
    """The concurrency of the step after which requests only wait longer; None where the ladder does not reach it.

    It is the first step after which no step brings `MORE_THROUGHPUT` times its tokens a second, while the median time
    to the first token of each is more than `MORE_WAITING` times its own. Both are needed: a batch that grows makes
    first tokens later while it still brings more, and a server that turns requests away brings no more without a wait.
    """
    for place, here in enumerate(steps[:-1]):
        later = [each for each in steps[place + 1 :] if each["ttft_ms"]]
        if not here["ttft_ms"] or not later:
            continue
        if all(
            each["tokens_per_second"] < MORE_THROUGHPUT * here["tokens_per_second"]
            and each["ttft_ms"]["median"] > MORE_WAITING * here["ttft_ms"]["median"]
            for each in later
        ):
            return int(here["concurrency"])
    return None


def judged(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the steps mean, in sentences."""
    found, last = knee(steps), steps[-1]["concurrency"]
    said = [
        f"Queueing starts beyond {found} at a time: no later step brings {round(100 * MORE_THROUGHPUT - 100)} % more "
        f"tokens a second, and first tokens take more than {MORE_WAITING} times as long."
        if found is not None
        else f"No queueing seen up to {last} at a time: throughput still rises, or first tokens come no later."
    ]
    errors = [each for each in steps if each["errors"]]
    if errors:
        first = errors[0]
        words = ", ".join(f"{count} of {first['requests']} {status}" for status, count in first["errors"].items())
        said.append(f"From {first['concurrency']} at a time on requests fail: {words}.")
    short = [each for each in steps if not each["requests"]]
    if short:
        said.append(
            f"At {short[0]['concurrency']} at a time nobody had an answer in time to ask again: nothing was measured "
            "there. Take a longer --seconds, or shorter answers."
        )
    late = [each for each in steps if each["client_late_ms"] > LATE_MS]
    if late:
        first = late[0]
        said.append(
            f"From {first['concurrency']} at a time on this client was itself late by {first['client_late_ms']} ms: "
            "run it on a quieter or faster machine, or several of them."
        )
    return said


def _rows(result: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    header = ("at a time", "ttft ms", "p95", "itl ms", "p95", "tokens/s", "answers/s", "requests", "errors")
    rows = []
    for each in result["steps"]:
        times = [
            f"{each[name][key]:.1f}" if each[name] else "-"
            for name in ("ttft_ms", "itl_ms")
            for key in ("median", "p95")
        ]
        errors = ", ".join(f"{status}: {count}" for status, count in each["errors"].items()) or "none"
        rates = (f"{each['tokens_per_second']:.1f}", f"{each['answers_per_second']:.2f}")
        rows.append((str(each["concurrency"]), *times, *rates, str(each["requests"]), errors))
    return header, rows


def name_of(result: Mapping[str, Any]) -> str:
    """A result in a few words."""
    asked = result["asked"]
    return (
        f"{result['model']} at {result['url']}, {result['when']}: about {asked['prompt_words']} words in, "
        f"up to {asked['answer_tokens']} tokens out, {asked['seconds']:g} s a step"
    )


def table(result: Mapping[str, Any]) -> list[str]:
    """The steps as aligned lines, and what they mean."""
    header, rows = _rows(result)
    return [name_of(result), *pages.aligned([header, *rows]), *result["judged"]]


def page(result: Mapping[str, Any]) -> str:
    """A page of one file with a plot for each measure."""
    steps = result["steps"]

    def bar(each: Mapping[str, Any], measure: str) -> pages.Span | None:
        value = each[measure]
        if isinstance(value, int | float):
            return pages.Span(value, value, value)
        return pages.Span(value["median"], value["median"], value["p95"]) if value else None

    labels = [str(each["concurrency"]) for each in steps]
    plots = [
        pages.plot(
            title,
            "at a time; more is better" if measure.endswith("second") else "at a time; less is better",
            labels,
            [[bar(each, measure) for each in steps]],
        )
        for measure, title in _MEASURES.items()
    ]
    explained = "Bars of times are medians; the line on a bar reaches to the 95th percentile."
    header, rows = _rows(result)
    return pages.page("Load", [explained, *result["judged"]], [name_of(result)], plots, [pages.Table(header, rows)])
