"""The life of a deployment's releases on a host: activate, prove, and the way back by itself.

For each deployment the wanted release is compared with what the host remembers (`releases`). A release that has never
been proven here and does not become ready, or that the gate refuses, is remembered as refused, and the last good one is
made current and proven again. Nothing follows from what this run changed: a run killed at any point heals on the next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Protocol

from .files import read_json_object
from .releases import (
    Refused,
    activate_release,
    active_release,
    link_target,
    mark_good,
    prune_releases,
    refusal_of,
    refuse,
    release_directory,
    stage_release,
)

ENDPOINT_FILE = "endpoint.json"
DEFAULT_KEEP = 5
# What a refusal depends on besides the release itself. When one of these differs, a new try is due.
WATCHED = {
    "start": ("unit", "weights", "driver", "boot"),
    "gate": ("unit", "weights", "driver", "gate"),
    "operator": (),
}


@dataclass(frozen=True)
class Wanted:
    """A release that the inventory asks for; `files` holds its texts by name, `endpoint.json` among them."""

    deployment: str
    release_id: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class Proof:
    """Whether a release that was started may take traffic.

    Args:
        ok: it may.
        stage: where it ended otherwise: `start` or `gate`.
        reason: one line for the record.
        text: all there is to say, several lines.
        table: the gate's rows.
        notes: further lines worth showing, such as the capacity against the plan.
        changed: whether a record beside the release is new.
        gate: how many of the gate's checks have passed, such as `15 of 15`; empty when it was not asked.
        capacity: measure, planned and reported of the capacity; empty when it is not known.
    """

    ok: bool
    stage: str
    reason: str
    text: str
    table: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    changed: bool = False
    gate: str = ""
    capacity: Mapping[str, Any] = field(default_factory=dict)


class Host(Protocol):
    """What a rollout does to a host, apart from files."""

    def running_release(self, deployment: str) -> Optional[str]:
        """The release of the deployment's container, None without one."""

    def unit_state(self, unit: str) -> str:
        """`running`, `stopped` or `failing`."""

    def other_units(self, deployment: str, engine: str) -> list[str]:
        """Units of this deployment for other engines that run or start at boot."""

    def start(self, unit: str) -> None:
        """Enable the unit and start it (again) with a new budget of starts."""

    def enable(self, unit: str) -> bool:
        """Have the unit start at boot; returns whether it did not."""

    def stop(self, unit: str) -> None:
        """Stop the unit and keep it from starting at boot."""

    def prove(self, deployment: str, release_id: str, directory: Path, endpoint: Mapping[str, Any]) -> Proof:
        """Wait until the engine is ready and run the gate; keep the results beside the release."""

    def circumstances(self, directory: Path, unit: str) -> dict[str, Any]:
        """What a refusal may depend on besides the release."""

    def now(self) -> str:
        """The time in UTC, `2027-01-02T01:04:05Z`."""


@dataclass
class Outcome:
    """What became of one deployment.

    Args:
        deployment: its name.
        wanted: the release that was asked for.
        active: the release that is current at the end.
        ok: whether the wanted release is current and has passed the gate.
        message: one paragraph; on failure what was refused and why, and what answers now.
        lines: what was done and seen, in order.
        changed: whether anything on the host is (or would be) other than before.
        started: whether an engine was (or would be) started.
        pruned: releases that were removed.
        replaced: the release that was current before, where a rollout has made another one current.
        before: the release that was current at the beginning.
        serving: whether the release that is current at the end has passed the gate.
        seconds: from the beginning of the run on this host to the end of this deployment's proof.
        gate: of the last proof, see `Proof`.
        capacity: of the last proof, see `Proof`.
    """

    deployment: str
    wanted: Optional[str]
    active: Optional[str] = None
    ok: bool = False
    message: str = ""
    lines: list[str] = field(default_factory=list)
    changed: bool = False
    started: bool = False
    pruned: list[str] = field(default_factory=list)
    replaced: Optional[str] = None
    before: Optional[str] = None
    serving: bool = False
    seconds: float = 0.0
    gate: str = ""
    capacity: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before = self.active

    def as_dict(self) -> dict[str, Any]:
        """The outcome as plain types."""
        return dict(vars(self))


class Rollout:
    """One run over the deployments of one host; the caller holds the host's lock."""

    def __init__(self, root: Path, host: Host, *, dry_run: bool = False, keep: int = DEFAULT_KEEP) -> None:
        self._root = root
        self._host = host
        self._dry_run = dry_run
        self._keep = keep
        self._began = time.monotonic()

    def roll_out(self, wanted: Sequence[Wanted], *, retry_refused: bool = False) -> list[Outcome]:
        """Bring the wanted releases up; all engines are started before the first is waited for.

        Raises:
            OSError: a release or a link cannot be written.
        """
        before = {item.deployment: active_release(self._root, item.deployment) for item in wanted}
        chosen = [self._begin(item, retry_refused) for item in wanted]
        for outcome, target, standing in chosen:
            if not self._dry_run:
                self._finish(outcome, target, standing)
            elif standing is not None:
                outcome.message = self._standing(outcome, standing, None)
            else:
                outcome.ok = True
            if outcome.active != before[outcome.deployment]:
                outcome.replaced = before[outcome.deployment]
        return [outcome for outcome, _, _ in chosen]

    def roll_back(self, deployment: str, release_id: Optional[str], reason: str) -> Outcome:
        """Make another release current and prove it; the one that is left is remembered as taken back by hand.

        Args:
            deployment: its name.
            release_id: the release to go to; None takes the last good one before the current one.
            reason: why, for the record.

        Raises:
            OSError: a link cannot be written.
        """
        left = active_release(self._root, deployment)
        good = self._good(deployment)
        target = release_id or (good if good != left else link_target(self._root, deployment, "previous"))
        outcome = Outcome(deployment, target, active=left)
        if target is None:
            outcome.message = (
                f"{deployment} has no release to go back to: none before {left or 'the first one'} has passed the gate "
                "here. Needed: one. Change: correct the inventory and run playbooks/rollout.yml."
            )
            return outcome
        if not (self._directory(deployment, target) / ENDPOINT_FILE).is_file():
            outcome.message = (
                f"the release {target} of {deployment} is not on this host. Needed: one of those that "
                f"`metalserve-host releases {deployment}` lists. Change: serving_release."
            )
            return outcome
        outcome.changed = outcome.started = left != target
        if self._dry_run:
            outcome.ok = True
            return outcome
        self._activate_and_start(outcome, target)
        self._finish(outcome, target, None)
        if outcome.ok and left is not None and left != target:
            unit, directory = self._unit(deployment, left), self._directory(deployment, left)
            if unit is not None:
                facts = self._host.circumstances(directory, unit)
                refuse(self._root, deployment, left, Refused(self._host.now(), "operator", reason, facts))
            outcome.message = (
                f"{deployment} is back on the release {target}, which has passed the gate. The release {left} is "
                "remembered as taken back: the next run keeps away from it unless the inventory asks for another one "
                "or serving_unit_retry_refused is true."
            )
        return outcome

    def restart(self, deployment: str) -> Outcome:
        """Start the current release of a deployment again and prove it.

        Raises:
            OSError: a record cannot be written.
        """
        current = active_release(self._root, deployment)
        outcome = Outcome(deployment, current, active=current)
        if current is None or self._unit(deployment, current) is None:
            outcome.message = (
                f"{deployment} has no current release on this host. Needed: one. Change: run playbooks/rollout.yml."
            )
            return outcome
        outcome.changed = outcome.started = True
        if self._dry_run:
            outcome.ok = True
            return outcome
        self._activate_and_start(outcome, current)
        self._finish(outcome, current, None)
        return outcome

    # ---- one deployment ----

    def _begin(self, item: Wanted, retry_refused: bool) -> tuple[Outcome, Optional[str], Optional[Refused]]:
        """Write the release, decide what shall be current, and start it where it does not run.

        Returns the target, and the refusal that keeps the wanted release away.
        """
        name, release_id = item.deployment, item.release_id
        outcome = Outcome(name, release_id, active=active_release(self._root, name))
        outcome.changed = stage_release(self._root, name, release_id, item.files, dry_run=self._dry_run)
        good = self._good(name)
        standing = None if retry_refused else self._standing_refusal(outcome, item, good)
        target: str = release_id if standing is None or good is None else good
        endpoint = json.loads(item.files[ENDPOINT_FILE]) if target == release_id else self._endpoint(name, target)
        unit = str(endpoint["unit"])
        stale = self._host.running_release(name) != target or self._host.unit_state(unit) != "running"
        if stale or outcome.active != target:
            outcome.changed = outcome.started = True
            outcome.lines.append(f"{name}: {outcome.active or 'nothing'} -> {target}, {unit} is started")
            if not self._dry_run:
                self._activate_and_start(outcome, target)
        elif not self._dry_run:
            outcome.changed = self._host.enable(unit) or outcome.changed
        return outcome, target, standing

    def _standing_refusal(self, outcome: Outcome, item: Wanted, good: Optional[str]) -> Optional[Refused]:
        """The refusal that still holds for the wanted release, if there is a good one that it would disturb."""
        refused = refusal_of(self._root, item.deployment, item.release_id)
        if refused is None or good is None or good == item.release_id:
            return None
        directory = self._directory(item.deployment, item.release_id)
        unit = str(json.loads(item.files[ENDPOINT_FILE])["unit"])
        facts = self._host.circumstances(directory, unit)
        differs = [
            name for name in WATCHED.get(refused.stage, ()) if facts.get(name) != refused.circumstances.get(name)
        ]
        if differs:
            outcome.lines.append(
                f"{item.deployment}: {item.release_id} was refused at {refused.when}; tried again, because since then "
                f"this has changed: {', '.join(differs)}"
            )
            return None
        return refused

    def _activate_and_start(self, outcome: Outcome, target: str) -> None:
        name = outcome.deployment
        endpoint = self._endpoint(name, target)
        for stray in self._host.other_units(name, str(endpoint["engine"])):
            self._host.stop(stray)
        activate_release(self._root, name, target, dry_run=False)
        outcome.active = target
        self._host.start(str(endpoint["unit"]))

    def _prove(self, outcome: Outcome, target: str) -> Proof:
        name = outcome.deployment
        proof = self._host.prove(name, target, self._directory(name, target), self._endpoint(name, target))
        outcome.lines += [*proof.notes, *proof.table]
        outcome.serving, outcome.gate, outcome.capacity = proof.ok, proof.gate, dict(proof.capacity)
        outcome.seconds = round(time.monotonic() - self._began, 1)
        outcome.changed = proof.changed or outcome.changed
        return proof

    def _finish(self, outcome: Outcome, target: Optional[str], standing: Optional[Refused]) -> None:
        name = outcome.deployment
        assert target is not None  # noqa: S101 (for mypy: a run that is no check run has a target)
        good = self._good(name)
        proof = self._prove(outcome, target)
        if proof.ok:
            outcome.changed = mark_good(self._root, name, target) or outcome.changed
            outcome.ok = standing is None
            outcome.message = f"{name}: the release {target} has passed the gate"
            if standing is not None:
                outcome.message = self._standing(outcome, standing, proof)
            else:
                needed = [target, *([outcome.wanted] if outcome.wanted else [])]
                outcome.pruned = prune_releases(self._root, name, self._keep, needed, dry_run=False)
                outcome.changed = bool(outcome.pruned) or outcome.changed
        elif standing is not None:
            outcome.message = self._standing(outcome, standing, proof)
        elif good == target:
            way = link_target(self._root, name, "previous")
            outcome.message = (
                f"{name}: the release {target}, which has passed the gate here before, fails now: {proof.text}\n"
                "Nothing was rolled back: what has changed is the host, not the release. Needed: what the lines above "
                "say. Change: that, and run again"
                + (f"; or go back to {way} with playbooks/ops/rollback.yml." if way else ".")
            )
        else:
            self._give_up(outcome, target, good, proof)

    def _give_up(self, outcome: Outcome, target: str, good: Optional[str], proof: Proof) -> None:
        """Refuse an unproven release and go back to the last good one."""
        name, unit = outcome.deployment, str(self._endpoint(outcome.deployment, target)["unit"])
        facts = self._host.circumstances(self._directory(name, target), unit)
        refuse(self._root, name, target, Refused(self._host.now(), proof.stage, proof.reason, facts))
        outcome.changed = True
        refused = f"{name}: the release {target} was refused: {proof.text}"
        if good is None:
            self._host.stop(unit)
            outcome.message = (
                f"{refused}\nThere is no release to go back to: none has passed the gate here, and {unit} was stopped. "
                "Needed: a release that passes. Change: what the lines above say, and run again."
            )
            return
        self._activate_and_start(outcome, good)
        back = self._prove(outcome, good)
        if back.ok:
            outcome.message = (
                f"{refused}\nThe release {good} is current again, has passed the gate and answers. "
                "Needed: a release that passes. Change: the inventory; this one is not tried again unless something "
                "it depends on changes, or with serving_unit_retry_refused: true."
            )
        else:
            outcome.message = (
                f"{refused}\nThe last good release {good} was made current again and fails as well: {back.text}\n"
                "Needed: a host on which it runs. Change: what the lines above say, and run again."
            )

    def _standing(self, outcome: Outcome, refused: Refused, proof: Optional[Proof]) -> str:
        name, good = outcome.deployment, self._good(outcome.deployment)
        by = {"operator": "taken back by hand", "gate": "refused by the gate"}.get(
            refused.stage, "refused at its start"
        )
        state = f"The release {good} stays current"
        if proof is not None and proof.ok:
            state = f"The release {good} is current, has passed the gate and answers"
        elif proof is not None:
            state = f"The last good release {good} is current and fails: {proof.text}"
        return (
            f"{name}: the release {outcome.wanted} was {by} on this host at {refused.when}: {refused.reason}\n"
            f"{state}. Needed: a release that passes. Change: the inventory, or -e serving_unit_retry_refused=true to "
            "try this one again."
        )

    # ---- names ----

    def _directory(self, deployment: str, release_id: str) -> Path:
        return release_directory(self._root, deployment, release_id)

    def _endpoint(self, deployment: str, release_id: str) -> dict[str, Any]:
        return read_json_object(self._directory(deployment, release_id) / ENDPOINT_FILE)

    def _good(self, deployment: str) -> Optional[str]:
        """The last good release, if its files are whole."""
        good = link_target(self._root, deployment, "good")
        return good if good is not None and self._unit(deployment, good) is not None else None

    def _unit(self, deployment: str, release_id: str) -> Optional[str]:
        unit = self._endpoint(deployment, release_id).get("unit")
        return unit if isinstance(unit, str) else None
