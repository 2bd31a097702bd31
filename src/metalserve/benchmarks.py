"""Results of benchmarks (remote/benchmark.py) for people: a table, a comparison of two, a page with plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metalserve import pages
from metalserve.errors import Refusal
from metalserve.remote.benchmark import MEASURES, SCHEMA

# What the measures are called for people.
TITLES = {
    "median_ttft_ms": "time to the first token, half of them, ms",
    "p99_ttft_ms": "time to the first token, 99 %, ms",
    "median_itl_ms": "between two tokens, half of them, ms",
    "p99_itl_ms": "between two tokens, 99 %, ms",
    "median_e2el_ms": "whole answer, half of them, ms",
    "output_throughput": "generated tokens a second",
    "request_throughput": "answers a second",
}


@dataclass(frozen=True)
class Change:
    """One measure of one workload in two results.

    Attributes:
        old: median, least and greatest over the runs of the first result; `new` of the second.
        percent: change of the median.
        verdict: `better`, `worse`, or `same` where the runs of both overlap: the difference is within their spread.
    """

    workload: str
    measure: str
    old: Mapping[str, float]
    new: Mapping[str, float]
    percent: float | None
    verdict: str


def read_result(path: Path) -> dict[str, Any]:
    """A result out of its file.

    Raises:
        Refusal: the file is not there, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _no_result(path, str(error)) from error
    if not isinstance(value, dict) or value.get("schema") != SCHEMA or "workloads" not in value:
        raise _no_result(path, "it is another JSON")
    return value


def _no_result(path: Path, why: str) -> Refusal:
    return Refusal(
        found=f"{path} is no result of a benchmark: {why}",
        needed="a file that playbooks/ops/benchmark.yml or `metalserve-host bench` has left",
        change="the name",
    )


def name_of(result: Mapping[str, Any]) -> str:
    """A result in a few words."""
    beside = ", beside others" if result["beside_others"] else ""
    return (
        f"{result['deployment']} on {result['host']}: release {result['release']}, {result['engine']} "
        f"{result['engine_version']}, {result['model']}, {result['when']}{beside}"
    )


def table(result: Mapping[str, Any]) -> list[str]:
    """Medians with their spread, aligned."""
    rows = [("workload", "measure", "median", "least", "greatest")]
    for workload, content in result["workloads"].items():
        for measure, values in content["summary"].items():
            numbers = (values["median"], values["least"], values["greatest"])
            rows.append((workload, TITLES[measure], *(f"{number:.2f}" for number in numbers)))
    return [name_of(result), *pages.aligned(rows)]


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """What differs between two results, measure by measure.

    Raises:
        Refusal: no workload was measured in both, or one was asked differently.
    """
    both = [name for name in old["workloads"] if name in new["workloads"]]
    for name in both:
        asked = [result["workloads"][name]["asked"] for result in (old, new)]
        if asked[0] != asked[1]:
            raise Refusal(
                found=f"{name} was {_asked(asked[0])} first and {_asked(asked[1])} then",
                needed="the same requests in both",
                change="measure again with the same --prompts and --concurrency",
            )
    if not both:
        raise Refusal(
            found=f"{', '.join(old['workloads'])} in one result and {', '.join(new['workloads'])} in the other",
            needed="a workload that was measured in both",
            change="--workload of the benchmark",
        )
    return [
        judge(name, measure, *(result["workloads"][name]["summary"][measure] for result in (old, new)))
        for name in both
        for measure in MEASURES
        if all(measure in result["workloads"][name]["summary"] for result in (old, new))
    ]


def _asked(asked: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in asked.items())


def judge(workload: str, measure: str, old: Mapping[str, float], new: Mapping[str, float]) -> Change:
    """One measure of two results; both are medians with their least and greatest run."""
    overlap = old["least"] <= new["greatest"] and new["least"] <= old["greatest"]
    rises = new["median"] > old["median"]
    verdict = "same" if overlap else "better" if rises == MEASURES[measure] else "worse"
    percent = 100 * (new["median"] / old["median"] - 1) if old["median"] else None
    return Change(workload, measure, old, new, percent, verdict)


def comparison(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The comparison as aligned lines."""
    rows = [("workload", "measure", "old", "new", "change", "")]
    for change in compare(old, new):
        percent = "-" if change.percent is None else f"{change.percent:+.1f} %"
        medians = (f"{change.old['median']:.2f}", f"{change.new['median']:.2f}")
        rows.append((change.workload, TITLES[change.measure], *medians, percent, change.verdict))
    return [f"old: {name_of(old)}", f"new: {name_of(new)}", *pages.aligned(rows)]


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """A page of one file with a plot for each measure: bars are medians, lines reach from the least to the greatest."""
    changes = compare(*results) if len(results) == 2 else []
    rows = [
        (
            change.workload,
            TITLES[change.measure],
            f"{change.old['median']:.2f}",
            f"{change.new['median']:.2f}",
            "-" if change.percent is None else f"{change.percent:+.1f} %",
            change.verdict,
        )
        for change in changes
    ]
    return pages.page(
        "Benchmark",
        ["Bars are medians over the runs; the line on a bar reaches from the least run to the greatest."],
        [name_of(result) for result in results],
        [_plot(results, measure) for measure in TITLES],
        [
            pages.Table(
                ("workload", "measure", "first", "second", "change", ""),
                rows,
                "“same” says that the runs of both overlap: the difference is within their spread.",
            )
        ],
    )


def _plot(results: Sequence[Mapping[str, Any]], measure: str) -> dict[str, Any]:
    workloads = list(dict.fromkeys(name for result in results for name in result["workloads"]))
    series = [
        [span_of(result["workloads"].get(name, {}).get("summary", {}), measure) for name in workloads]
        for result in results
    ]
    note = f"{direction(measure)}; each workload on its own scale"
    return pages.plot(TITLES[measure], note, workloads, series, apart=True)


def span_of(summary: Mapping[str, Mapping[str, float]], measure: str) -> pages.Span | None:
    """The bar of a measure; None where it was not measured."""
    values = summary.get(measure)
    return pages.Span(values["median"], values["least"], values["greatest"]) if values else None


def direction(measure: str) -> str:
    """Whether more of a measure is better, in words."""
    return "more is better" if MEASURES[measure] else "less is better"
