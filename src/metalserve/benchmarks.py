"""Results of benchmarks (remote/benchmark.py) for people: a table, a comparison of two, a page with plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from metalserve.errors import Refusal
from metalserve.remote.benchmark import MEASURES, SCHEMA

_TITLES = {
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
            rows.append((workload, _TITLES[measure], *(f"{number:.2f}" for number in numbers)))
    return [name_of(result), *_aligned(rows)]


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
        _change(name, measure, *(result["workloads"][name]["summary"][measure] for result in (old, new)))
        for name in both
        for measure in MEASURES
        if all(measure in result["workloads"][name]["summary"] for result in (old, new))
    ]


def _asked(asked: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in asked.items())


def _change(workload: str, measure: str, old: Mapping[str, float], new: Mapping[str, float]) -> Change:
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
        rows.append((change.workload, _TITLES[change.measure], *medians, percent, change.verdict))
    return [f"old: {name_of(old)}", f"new: {name_of(new)}", *_aligned(rows)]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """A page of one file with a plot for each measure: bars are medians, lines reach from the least to the greatest."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(files("metalserve").joinpath("benchmarks.html.j2").read_text(encoding="utf-8"))
    return template.render(
        names=[name_of(result) for result in results],
        plots=[
            {
                "title": title,
                "better": "more is better" if MEASURES[measure] else "less is better",
                **_plot(results, measure),
            }
            for measure, title in _TITLES.items()
        ],
        changes=compare(*results) if len(results) == 2 else [],
        titles=_TITLES,
    )


def _plot(results: Sequence[Mapping[str, Any]], measure: str) -> dict[str, Any]:
    """Bars by workload and result, in the units of the drawing: 0 to 100 high, 24 wide each."""
    workloads = list(dict.fromkeys(name for result in results for name in result["workloads"]))
    found = [
        (place, number, result["workloads"][name]["summary"][measure])
        for place, name in enumerate(workloads)
        for number, result in enumerate(results)
        if measure in result["workloads"].get(name, {}).get("summary", {})
    ]
    most = max((values["greatest"] for _, _, values in found), default=0) or 1
    group = 24 * len(results) + 40
    return {
        "width": group * len(workloads),
        "labels": [{"x": group * place + group / 2, "text": name} for place, name in enumerate(workloads)],
        "bars": [
            {
                "x": group * place + 20 + 24 * number,
                "number": number,
                "height": 100 * values["median"] / most,
                "low": 100 * values["least"] / most,
                "high": 100 * values["greatest"] / most,
                "text": f"{values['median']:.4g}",
            }
            for place, number, values in found
        ],
    }
