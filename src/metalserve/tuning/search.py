"""The search: coordinate descent over a few sizes, within a budget, with whatever plans and measures a candidate.

Every candidate costs a start of an engine (minutes), there are a dozen of them, and these sizes act nearly one by one.
So one field after the other is tried through with all others at their best, again until a whole round brings nothing.
A model of the space (as optuna's samplers make) needs more candidates than there are before it knows more than chance
does, and measuring many of them shortly first (successive halving) saves nothing where the start is what costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import yaml

from metalserve.benchmarks import judge
from metalserve.errors import Refusal

# What is tried, in this order: what acts most first.
FIELDS = ("max_batched_tokens", "max_sequences", "kv_cache_dtype", "eager")
# What is to be best -> the measure of the benchmark that says it.
OBJECTIVES = {
    "first_token": "median_ttft_ms",
    "between_tokens": "median_itl_ms",
    "throughput": "output_throughput",
}
Setting = Mapping[str, Any]
Summary = Mapping[str, Mapping[str, float]]


class CandidateFailedError(Exception):
    """A candidate that did not start, did not pass its gate, or could not be measured; the text is for a person."""


class StopSearchError(Exception):
    """The host cannot go on; the text is for a person."""


@dataclass(frozen=True)
class Budget:
    """How much may be spent: candidates that are started beside the present release, and seconds for all of it."""

    candidates: int
    seconds: float


@dataclass
class Tried:
    """One candidate.

    Attributes:
        setting: value of each field.
        changed: those that differ from the present ones.
        state: `measured`, `refused` (by the planner: never started), `same` (as a release that was tried), `failed`.
        release_id: None where it was refused.
        reason: why it was refused, or failed, or which candidate it is the same as.
        summary: median, least and greatest of each measure.
        result: all that was measured.
        verdict: against the best one before it: `better`, `worse`, `same`.
        seconds: what it took.
    """

    setting: Setting
    changed: Setting
    state: str
    release_id: str | None = None
    reason: str = ""
    summary: Summary = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    verdict: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """What is different, in a few words."""
        return ", ".join(f"{key} {_word(value)}" for key, value in self.changed.items()) or "present"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass
class Found:
    """What a search has found: all candidates in order, the best of them, and why it ended."""

    tried: list[Tried]
    best: Tried
    ended: str


def read_space(given: Mapping[str, Sequence[Any]] | str, present: Setting) -> dict[str, list[Any]]:
    """The values of each field that are tried, the present one among them; without `given` those around the present.

    Args:
        given: {field: values}, also as the text that comes from `-e name=value` or from a survey.
        present: value of each field now.

    Raises:
        Refusal: no mapping, an unknown field, or no list of values.
    """
    given = _read_text(given) if isinstance(given, str) else given
    for name, values in given.items():
        if name not in FIELDS:
            raise Refusal(found=f"tune_space with {name!r}", needed=f"of {', '.join(FIELDS)}", change="tune_space")
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise Refusal(
                found=f"tune_space.{name} {values!r}", needed="a list of values to be tried", change="tune_space"
            )
    chosen = {name: list(given[name]) for name in FIELDS if name in given} if given else _around(present)
    return {
        name: [present[name], *(value for value in values if value != present[name])] for name, values in chosen.items()
    }


def _read_text(text: str) -> Mapping[str, Sequence[Any]]:
    try:
        found = yaml.safe_load(text) or {}
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict):
        raise Refusal(
            found=f"tune_space {text!r}",
            needed="fields with lists of values, such as {max_sequences: [64, 128]}",
            change="tune_space",
        )
    return found


def _around(present: Setting) -> dict[str, list[Any]]:
    tokens, sequences = int(present["max_batched_tokens"]), int(present["max_sequences"])
    return {
        "max_batched_tokens": [max(1, tokens // 2), tokens * 2, tokens * 4],
        "max_sequences": [max(1, sequences // 2), max(1, sequences // 4), sequences * 2],
        "kv_cache_dtype": ["auto", "fp8"],
        "eager": [False, True],
    }


class Search:
    """One search.

    Args:
        present: value of each field now.
        space: values of each field, see `read_space`.
        measure_name: a key of `MEASURES`; it says what is better.
        plan: makes a candidate's release (`release_id` and whatever `measure` needs) of the fields that differ.
            Raises Refusal.
        measure: starts and measures it: the result, with its `summary`. Raises CandidateFailedError, StopSearchError.
        clock: seconds.
        say: is told each candidate when it is done.
    """

    def __init__(
        self,
        present: Setting,
        space: Mapping[str, Sequence[Any]],
        measure_name: str,
        *,
        plan: Callable[[Setting], Mapping[str, Any]],
        measure: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        clock: Callable[[], float],
        say: Callable[[Tried], None] = lambda tried: None,
    ) -> None:
        self._present, self._space, self._measure_name = dict(present), space, measure_name
        self._plan, self._measure, self._clock, self._say = plan, measure, clock, say
        self.tried: list[Tried] = []
        self.best: Tried | None = None

    def first_round(self) -> list[Tried]:
        """What would be tried if nothing were better than the present, planned and not started."""
        changes = [
            {name: value} for name, values in self._space.items() for value in values if value != self._present[name]
        ]
        rows: list[Tried] = []
        for changed in [{}, *changes]:
            row = self._planned(changed, rows)[0]
            rows.append(row)
        return rows

    def run(self, budget: Budget) -> Found:
        """Search until a round brings nothing, or the budget is spent.

        Raises:
            Refusal: the present release is refused by the planner, or cannot be measured.
            StopSearchError: the host cannot go on; `tried` holds what was done until then.
        """
        began = self._clock()
        best = self.best = self._try({})
        self._say(best)
        if best.state != "measured":
            raise Refusal(
                found=f"the present release cannot be measured: {best.reason}",
                needed="something to compare with",
                change="what these words say",
            )
        while True:
            before = best
            for name, values in self._space.items():
                for value in sorted(values, key=partial(_distance, best.setting[name])):
                    changed = self._changed({**best.setting, name: value})
                    if self._known(changed) or self._failed_before(name, value):
                        continue
                    ended = self._spent(budget, began)
                    if ended:
                        return Found(self.tried, best, ended)
                    found = self._try(changed)
                    if found.state == "measured":
                        found.verdict = self._judge(best.summary, found.summary)
                        best = self.best = found if found.verdict == "better" else best
                    self._say(found)
            if best is before:
                return Found(self.tried, best, "a whole round brought nothing better")

    def _spent(self, budget: Budget, began: float) -> str:
        """Why no further candidate is begun. One that takes as long as the longest so far must fit."""
        started = [each for each in self.tried if each.state in ("measured", "failed")]
        if len(started) - 1 >= budget.candidates:
            return f"the budget of {budget.candidates} candidates is spent"
        longest = max((each.seconds for each in started), default=0.0)
        if self._clock() - began + longest > budget.seconds:
            return f"another candidate would not fit into the {budget.seconds / 60:g} minutes"
        return ""

    def _known(self, changed: Setting) -> bool:
        return any(each.changed == changed for each in self.tried)

    def _failed_before(self, name: str, value: Any) -> bool:
        """Whether a candidate has failed that differs from a measured one by this value alone: then that is why."""
        return any(
            bad.state == "failed"
            and bad.setting[name] == value
            and any(good.state == "measured" and {**good.setting, name: value} == bad.setting for good in self.tried)
            for bad in self.tried
        )

    def _changed(self, setting: Setting) -> dict[str, Any]:
        return {name: value for name, value in setting.items() if value != self._present[name]}

    def _planned(self, changed: Setting, rows: Sequence[Tried]) -> tuple[Tried, Mapping[str, Any]]:
        row = Tried({**self._present, **changed}, changed, "planned")
        try:
            release = self._plan(changed)
        except Refusal as refusal:
            row.state, row.reason = "refused", str(refusal)
            return row, {}
        row.release_id = str(release["release_id"])
        for other in rows:
            if other.release_id == row.release_id:
                row.state, row.reason = "same", f"the same release as {other.name}"
        return row, release

    def _try(self, changed: Setting) -> Tried:
        row, release = self._planned(changed, self.tried)
        if row.state == "planned":
            begin = self._clock()
            try:
                row.result = self._measure(release)
                row.summary, row.state = row.result["summary"], "measured"
            except CandidateFailedError as error:
                row.state, row.reason = "failed", str(error)
            row.seconds = self._clock() - begin
        self.tried.append(row)
        return row

    def _judge(self, old: Summary, new: Summary) -> str:
        name = self._measure_name
        return judge("", name, old[name], new[name]).verdict


def _distance(here: Any, value: Any) -> float:
    """How far a value is from the present one: factors of numbers, and everything else in its order."""
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) and each > 0 for each in (here, value))
    return abs(math.log(value / here)) if numbers else float(value != here)
