"""The life of a deployment's releases on a host: activate, prove, and the way back by itself.

For each deployment the wanted release is compared with what the host remembers (`releases`). A release that has never
been proven here and does not become ready, or that the gate refuses, is remembered as refused, and the last good one is
made current and proven again. Nothing follows from what this run changed: a run killed at any point heals on the next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from .files import read_json_object
from .releases import (
    Refused,
    activate_release,
    active_release,
    forgive,
    link_target,
    mark_good,
    prune_releases,
    refusal_of,
    refuse,
    release_directory,
    release_ids,
    stage_release,
)
from .rollout_types import Host, Outcome, Proof, Wanted

ENDPOINT_FILE = "endpoint.json"
# Kept with what was taken back by hand: the release that took its place.
BACK_TO = "back_to"
DEFAULT_KEEP = 5
# What a refusal depends on besides the release itself. When one of these differs, a new try is due.
WATCHED = {
    "start": ("unit", "weights", "driver", "boot"),
    "gate": ("unit", "weights", "driver", "gate"),
    "operator": (),
}


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
        chosen = [self._begin(item, retry_refused) for item in wanted]
        for outcome, target, standing in chosen:
            if not self._dry_run:
                self._finish(outcome, target, standing)
            elif standing is not None:
                outcome.message = self._standing(outcome, standing, None)
            else:
                outcome.ok = True
        return [outcome for outcome, _, _ in chosen]

    def roll_back(self, deployment: str, release_id: Optional[str], reason: str) -> Outcome:
        """Make another release current and prove it; the one that is left is remembered as taken back by hand.

        A host that is back already is only proven: so a run over many hosts that was killed can be run again.

        Args:
            deployment: its name.
            release_id: the release to go to; None takes the last good one before the current one.
            reason: why, for the record.

        Raises:
            OSError: a link cannot be written.
        """
        left = active_release(self._root, deployment)
        target = release_id or self._way_back(deployment, left)
        outcome = Outcome(deployment, target, active=left)
        if target is None:
            outcome.message = (
                f"{deployment} has no release to go back to: none before {left or 'the first one'} has passed the gate "
                "here. Needed: one. Change: correct the inventory and run playbooks/rollout.yml."
            )
            return outcome
        endpoint = self._endpoint(deployment, target)
        if not endpoint:
            outcome.message = (
                f"the release {target} of {deployment} is not on this host. Needed: one of those that "
                f"`metalserve-host releases {deployment}` lists. Change: serving_release."
            )
            return outcome
        outcome.started = left != target or self._stale(deployment, target, str(endpoint["unit"]))
        outcome.changed = outcome.started
        if self._dry_run:
            outcome.ok = True
            return outcome
        taken_back = left if left != target else None
        standing = refusal_of(self._root, deployment, taken_back) if taken_back else None
        if taken_back:
            self._take_back(deployment, taken_back, target, reason)
        if outcome.started:
            self._activate_and_start(outcome, target)
        self._finish(outcome, target, None)
        if not taken_back:
            if outcome.ok and not release_id:
                outcome.message = (
                    f"{deployment} is back on the release {target} already, which has passed the gate. To go further "
                    "back, name a release: serving_release."
                )
        elif outcome.ok:
            outcome.message = (
                f"{deployment} is back on the release {target}, which has passed the gate. The release {taken_back} is "
                "remembered as taken back: the next run keeps away from it unless the inventory asks for another one "
                "or serving_unit_retry_refused is true."
            )
        elif standing is not None:
            refuse(self._root, deployment, taken_back, standing)
        else:
            forgive(self._root, deployment, taken_back)
        return outcome

    def _way_back(self, deployment: str, left: Optional[str]) -> Optional[str]:
        """The release to go back to from `left`: where an earlier run was going or has gone, else the last good."""
        if left is None:
            return self._good(deployment)
        begun = self._taken_back_to(deployment, left)
        if begun is not None:
            return begun
        if any(self._taken_back_to(deployment, each) == left for each in release_ids(self._root, deployment)):
            return left
        good = self._good(deployment)
        return good if good != left else link_target(self._root, deployment, "previous")

    def _take_back(self, deployment: str, left: str, target: str, reason: str) -> None:
        """Remember, before anything is done, that `left` is taken back: a killed run goes on where it stood."""
        unit = self._unit(deployment, left)
        if unit is not None:
            facts = {**self._host.circumstances(self._directory(deployment, left), unit), BACK_TO: target}
            refuse(self._root, deployment, left, Refused(self._host.now(), "operator", reason, facts))

    def _taken_back_to(self, deployment: str, release_id: str) -> Optional[str]:
        refused = refusal_of(self._root, deployment, release_id)
        return refused.circumstances.get(BACK_TO) if refused is not None and refused.stage == "operator" else None

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
        if outcome.active != target or self._stale(name, target, unit):
            outcome.changed = outcome.started = True
            outcome.lines.append(f"{name}: {outcome.active or 'nothing'} -> {target}, {unit} is started")
            if not self._dry_run:
                self._activate_and_start(outcome, target)
        elif not self._dry_run:
            outcome.changed = self._host.enable(unit) or outcome.changed
        return outcome, target, standing

    def _stale(self, deployment: str, release_id: str, unit: str) -> bool:
        """Whether the engine does not run, or runs another release."""
        return self._host.running_release(deployment) != release_id or self._host.unit_state(unit) != "running"

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
        name, endpoint = outcome.deployment, self._endpoint(outcome.deployment, target)
        proof = self._host.prove(name, target, self._directory(name, target), endpoint)
        outcome.endpoint = {**endpoint, "name": name}
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
