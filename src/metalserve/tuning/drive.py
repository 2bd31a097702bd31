"""From a deployment to a tuned one: begins a trial on a host, searches, and ends the trial whatever happens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from metalserve.deployments import EAGER_FIRST, Inputs, normalize, serving_releases, with_kept_starts
from metalserve.errors import MetalserveError, Refusal
from metalserve.remote.benchmark import WORKLOADS
from metalserve.tuning.report import document, page
from metalserve.tuning.search import (
    OBJECTIVES,
    Budget,
    CandidateFailedError,
    Found,
    Search,
    Setting,
    StopSearchError,
    Tried,
    read_space,
)

# Runs the module serving_trial on the host with these arguments; gives what it returns, `failed` and `msg` among it.
Call = Callable[[Mapping[str, Any]], Mapping[str, Any]]
Plan = Callable[[Setting], Mapping[str, Any]]


def choose_item(
    deployments: Sequence[Mapping[str, Any]], name: str, facts: Mapping[str, Any]
) -> tuple[Mapping[str, Any], list[str]]:
    """The deployment as it is written, and the names of those for which it matters what the host keeps of their starts.

    Raises:
        Refusal: there is none of that name, or the deployments themselves are refused.
    """
    checked = normalize(deployments)
    for item in deployments:
        if item["name"] == name:
            return item, with_kept_starts(checked, facts)
    raise Refusal(
        found=f"no deployment {name!r} on this host",
        needed=f"one of {', '.join(item['name'] for item in checked)}",
        change="-e serving_deployment=NAME",
    )


def planner(
    item: Mapping[str, Any], facts: Mapping[str, Any], inputs: Mapping[str, Any], kept: Mapping[str, Any]
) -> Plan:
    """What plans the deployment with some fields changed, beside the others of its host.

    Args:
        item: one of the deployments.
        facts: of the host.
        inputs: arguments of `serving_plan` by name.
        kept: what the host keeps of starts, see `Inputs`.
    """
    given = Inputs(
        models=inputs.get("models") or {},
        engines=inputs.get("engines") or {},
        lock=inputs.get("lock") or {},
        weight_sources=inputs.get("weight_sources") or {},
        models_dir=inputs["models_dir"],
        kept=kept,
        image_keys=inputs.get("image_keys") or {},
        relearn=str(inputs.get("relearn", False)).lower() in ("true", "yes", "on", "1"),
    )

    def plan(changed: Setting) -> Mapping[str, Any]:
        wanted = [{**each, **changed} if each["name"] == item["name"] else each for each in inputs["deployments"]]
        (release,) = (each for each in serving_releases(wanted, facts, given) if each["deployment"] == item["name"])
        return release

    return plan


def write_report(folder: str, tuned: Mapping[str, Any]) -> list[str]:
    """Leave the document as JSON and as a page; the names of both, none without a folder.

    Raises:
        Refusal: they cannot be written.
    """
    if not folder:
        return []
    when = str(tuned["when"]).replace(":", "")
    name = Path(folder) / f"tune-{tuned['host']}-{tuned['deployment']}-{when}"
    try:
        name.parent.mkdir(parents=True, exist_ok=True)
        json_file, page_file = Path(f"{name}.json"), Path(f"{name}.html")
        json_file.write_text(json.dumps(tuned, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        page_file.write_text(page(tuned), encoding="utf-8")
    except OSError as error:
        raise Refusal(
            found=f"the result cannot be written to {folder}: {error.strerror}",
            needed="a folder that can be written",
            change="tune_results_dir",
        ) from error
    return [str(json_file), str(page_file)]


class Tuning:
    """The tuning of one deployment on one host.

    Args:
        item: the deployment as the inventory has it.
        plan: the release of the deployment with some fields changed; raises Refusal.
        objective: a key of `OBJECTIVES`.
        workload: a key of `WORKLOADS`.
        space: values to try by field; empty for those around the present ones.
        budget: candidates and seconds.

    Raises:
        Refusal: something in these is unknown or cannot be measured, or the planner refuses the deployment itself.
    """

    def __init__(
        self,
        item: Mapping[str, Any],
        plan: Plan,
        *,
        objective: str,
        workload: str,
        space: Mapping[str, Sequence[Any]] | str,
        budget: Budget,
    ) -> None:
        for name, value, known in (
            ("tune_objective", objective, OBJECTIVES),
            ("tune_workload", workload, WORKLOADS),
        ):
            if value not in known:
                raise Refusal(found=f"{name} {value!r}", needed=f"one of {', '.join(known)}", change=name)
        if budget.candidates < 1 or budget.seconds <= 0:
            raise Refusal(
                found=f"a budget of {budget.candidates} candidates and {budget.seconds / 60:g} minutes",
                needed="at least one candidate and some minutes",
                change="tune_candidates, tune_minutes",
            )
        if item["engine"] != "vllm":
            raise Refusal(
                found=f"{item['name']} is served by {item['engine']}, whose image has no `vllm bench serve`",
                needed="a deployment of vLLM",
                change="serving_deployment",
            )
        self.item, self.objective, self.workload, self._budget = item, objective, workload, budget
        self._plan = plan
        self.present = plan({})
        sizes = self.present["plan"]
        eager = item.get("eager") or False
        self._setting = {
            "max_batched_tokens": sizes["max_num_batched_tokens"],
            "max_sequences": sizes["max_num_seqs"],
            "kv_cache_dtype": item.get("kv_cache_dtype") or "auto",
            "eager": False if eager == EAGER_FIRST else eager,
        }
        self._space = read_space(space, self._setting)

    def preview(self) -> list[str]:
        """What a first round would try, and what the planner refuses of it; nothing is started."""
        rows = self._search(lambda release: {}, lambda: 0.0, lambda tried: None).first_round()
        return [f"{row.name}: {row.reason or row.release_id}" for row in rows]

    def run(
        self,
        call: Call,
        *,
        force: bool,
        clock: Callable[[], float],
        say: Callable[[str], None],
        told: Mapping[str, Any],
    ) -> tuple[dict[str, Any] | None, str]:
        """Search on the host, and bring the former release back.

        Args:
            call: see `Call`.
            force: also while others use the deployment.
            clock: seconds.
            say: gets a line for each candidate.
            told: when, host, and whatever else the document shall hold.

        Returns:
            The document of `report`, None where not even the present release was measured; and what went wrong (why it
            was broken off, that the host has not come back to its former release), empty where nothing did.

        Raises:
            MetalserveError: it could not begin.
        """
        begun = call({"state": "begun", "release": _release(self.present), "force": force})
        if begun.get("failed"):
            raise MetalserveError(str(begun.get("msg")))
        broken = ""
        found: Found | None = None
        search = self._search(
            lambda release: self._measure(call, release, force=force), clock, lambda row: say(_line(row))
        )
        try:
            found = search.run(self._budget)
        except (StopSearchError, Refusal) as error:
            broken = str(error)
            if search.best is not None and search.best.state == "measured":
                found = Found(search.tried, search.best, f"it was broken off: {broken}")
        except BaseException:
            self._end(call, {"measure": False}, say)
            raise
        back, lost = self._end(call, {"measure": not broken, "workload": self.workload, "force": force}, say)
        broken = "\n".join(text for text in (broken, lost) if text)
        if found is None:
            return None, broken
        again = back["result"]["workloads"][self.workload] if back.get("result") else None
        kept = document(found, self.item, objective=self.objective, workload=self.workload, again=again, told=told)
        return {**kept, "release": self.present["release_id"]}, broken

    def _search(
        self,
        measure: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        clock: Callable[[], float],
        say: Callable[[Tried], None],
    ) -> Search:
        return Search(
            self._setting,
            self._space,
            OBJECTIVES[self.objective],
            plan=self._plan,
            measure=measure,
            clock=clock,
            say=say,
        )

    def _measure(self, call: Call, release: Mapping[str, Any], *, force: bool) -> Mapping[str, Any]:
        answer = call({"state": "tried", "release": _release(release), "workload": self.workload, "force": force})
        if answer.get("failed"):
            raise StopSearchError(str(answer.get("msg")))
        if not answer["ok"]:
            raise CandidateFailedError(f"{answer['stage']}: {answer['reason']}")
        measured: Mapping[str, Any] = answer["result"]["workloads"][self.workload]
        return measured

    def _end(
        self, call: Call, arguments: Mapping[str, Any], say: Callable[[str], None]
    ) -> tuple[Mapping[str, Any], str]:
        """What the module returns, and what is wrong with the host where it has not come back."""
        back, former = call({"state": "ended", **arguments}), self.present["release_id"]
        if back.get("failed"):
            return {}, (
                f"The host has not come back to the release {former}: {back.get('msg')}\n"
                "Needed: that it serves again. Change: what these words say, and run this again, or "
                "playbooks/rollout.yml: either brings the former release back."
            )
        if back["release"] == former:
            say(f"{former} is back, proven by its gate")
        if back.get("reason"):
            say(str(back["reason"]))
        return back, ""


def _release(release: Mapping[str, Any]) -> dict[str, Any]:
    return {name: release[name] for name in ("release_id", "files")}


def _line(row: Tried) -> str:
    if row.state != "measured":
        return f"{row.name}: {row.state}: {row.reason}"
    values = ", ".join(
        f"{name} {row.summary[name]['median']:.2f}" for name in OBJECTIVES.values() if name in row.summary
    )
    return f"{row.name}: {values}{f' ({row.verdict})' if row.verdict else ''}, {row.seconds:.0f} s"
