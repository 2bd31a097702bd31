"""What a search has found, for people: the verdict, a table, a page, and the deployment to paste."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from metalserve import pages
from metalserve.benchmarks import TITLES, Change, direction, judge, span_of
from metalserve.remote.benchmark import MEASURES, summary
from metalserve.tuning.search import OBJECTIVES, Found

SCHEMA = 1
_SHOWN = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "output_throughput")


def document(
    found: Found,
    item: Mapping[str, Any],
    *,
    objective: str,
    workload: str,
    again: Mapping[str, Any] | None,
    told: Mapping[str, Any],
) -> dict[str, Any]:
    """All that is kept of a search.

    The best candidate has to be better than both measurements of the present release together, that of the beginning
    and that of the end: what the host itself drifts meanwhile, and what chance does among many, must not count.

    Args:
        found: by the search.
        item: the deployment as the inventory has it.
        objective: a key of `OBJECTIVES`.
        workload: what was asked.
        again: the present release measured once more at the end; None where that was not possible.
        told: when, host, and whatever else shall be kept.
    """
    present, best = found.tried[0], found.best
    runs = [*present.result["runs"], *(again["runs"] if again else ())]
    change = _change(objective, summary(runs), best.summary)
    chosen = best if best is not present and change.verdict == "better" else present
    drift = _change(objective, present.summary, again["summary"]) if again else None
    return {
        "schema": SCHEMA,
        **told,
        "deployment": item["name"],
        "objective": objective,
        "workload": workload,
        "asked": present.result["asked"],
        "ended": found.ended,
        "candidates": [
            {
                "name": each.name,
                **{name: value for name, value in vars(each).items() if name not in ("summary", "setting")},
                "setting": dict(each.setting),
                "chosen": each is chosen,
            }
            for each in found.tried
        ],
        "present_again": dict(again) if again else None,
        "judged": _judged(objective, found, change, drift, chosen is present),
        "snippet": snippet(item, chosen.changed),
    }


def _change(objective: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Change:
    measure = OBJECTIVES[objective]
    return judge("", measure, old[measure], new[measure])


def _judged(objective: str, found: Found, change: Change, drift: Change | None, stays: bool) -> list[str]:
    present, best = found.tried[0], found.best
    title = TITLES[OBJECTIVES[objective]]
    if best is present:
        said = [f"Nothing is better than the present sizes for {objective}: no candidate by more than its spread."]
    elif stays:
        said = [
            f"The present sizes stay: {best.name} seemed better, but not than both measurements of the present release."
        ]
    else:
        values = f"{change.old['median']:.2f} -> {change.new['median']:.2f} ({change.percent or 0:+.1f} %)"
        said = [f"{best.name}: {title}: {values}."]
    if drift is None:
        said.append("The present release was not measured again at the end, so a drift of the host would not be seen.")
    elif drift.verdict != "same":
        said.append(
            f"The host drifted: the present release itself changed by {drift.percent or 0:+.1f} % from the beginning "
            "to the end. Smaller differences than that say nothing."
        )
    return [*said, f"Ended, because {found.ended}."]


def snippet(item: Mapping[str, Any], changed: Mapping[str, Any]) -> str:
    """The deployment with the fields that were found, as YAML for serving_deployments."""
    return str(yaml.safe_dump([{**item, **changed}], sort_keys=False, allow_unicode=True, width=120))


def _rows(tuned: Mapping[str, Any]) -> tuple[Sequence[str], list[Sequence[str]]]:
    measures = list(dict.fromkeys((OBJECTIVES[tuned["objective"]], *_SHOWN)))
    rows: list[Sequence[str]] = []
    for place, each in enumerate(tuned["candidates"]):
        seen = each["result"].get("summary", {})
        numbers = [f"{seen[name]['median']:.2f}" if name in seen else "-" for name in measures]
        word = each["verdict"] if each["state"] == "measured" else each["state"]
        mark = "chosen" if each["chosen"] else ""
        rows.append((str(place), each["name"], *numbers, word or "-", mark, f"{each['seconds']:.0f}"))
    return ("", "candidate", *(TITLES[name] for name in measures), "", "", "seconds"), rows


def name_of(tuned: Mapping[str, Any]) -> str:
    """A search in a few words."""
    asked = ", ".join(f"{key} {value}" for key, value in tuned["asked"].items())
    what = f"{tuned['objective']} of {tuned['workload']} ({asked})"
    return f"{tuned['deployment']} on {tuned['host']}, {tuned['when']}: {what}"


def lines(tuned: Mapping[str, Any]) -> list[str]:
    """The table, what was refused or failed, the verdict, and the snippet."""
    header, rows = _rows(tuned)
    reasons = [f"{each['name']}: {each['state']}: {each['reason']}" for each in tuned["candidates"] if each["reason"]]
    return [
        name_of(tuned),
        *pages.aligned([header, *rows]),
        *reasons,
        *tuned["judged"],
        "",
        *tuned["snippet"].splitlines(),
    ]


def page(tuned: Mapping[str, Any]) -> str:
    """A page of one file: the verdict, the snippet, a plot for each measure, the table, and the reasons."""
    places = [place for place, each in enumerate(tuned["candidates"]) if each["state"] == "measured"]
    summaries = [tuned["candidates"][place]["result"]["summary"] for place in places]
    first = OBJECTIVES[tuned["objective"]]
    plots = [
        pages.plot(
            TITLES[name],
            direction(name),
            [str(place) for place in places],
            [[span_of(found, name) for found in summaries]],
        )
        for name in dict.fromkeys((first, *MEASURES))
    ]
    header, rows = _rows(tuned)
    reasons = [(each["name"], each["state"], each["reason"]) for each in tuned["candidates"] if each["reason"]]
    return pages.page(
        "Tuning",
        [name_of(tuned), *tuned["judged"], "A bar is the candidate of that number in the table below."],
        [],
        plots,
        [
            pages.Table(
                header, rows, "A verdict is against the best candidate before it; “same” is within the spread."
            ),
            pages.Table(("candidate", "", "why"), reasons),
        ],
        tuned["snippet"],
    )
