"""Releases on trial: one after another is made current, proven and measured, and the former one comes back.

    /etc/metalserve/<deployment>/trial.json    while a trial is on: the former release, and what has been put there

It is written before anything changes, so a trial that was killed at any point is ended by the next one. A rollout ends
it as well, because what is current is not what the inventory wants. A release on trial is never `good` or `previous`,
whatever it has passed: nothing goes back to it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional

from .benchmark import BenchmarkError, OthersUseItError, Settings, benchmark, check_unused
from .files import read_json_object, write_json
from .releases import (
    LINKS,
    activate_release,
    active_release,
    link_target,
    release_directory,
    release_ids,
    stage_release,
)
from .rollout import ENDPOINT_FILE
from .rollout_types import Host, Proof, Wanted

NOTE = "trial.json"
Benchmark = Callable[[Path, str, Settings], "tuple[Path, dict[str, Any]]"]
Unused = Callable[..., float]


class TrialError(Exception):
    """A trial that cannot go on; the text says what was found, what is needed and what to change."""


class Trial:
    """The trial of one deployment; the caller holds the host's lock at each call.

    Args:
        root: where deployments keep their releases.
        host: the machine.
        deployment: its name.
        measure: the benchmark; played in tests.
        unused: whether others use it; played in tests.
    """

    def __init__(
        self,
        root: Path,
        host: Host,
        deployment: str,
        *,
        measure: Benchmark = benchmark,
        unused: Unused = check_unused,
    ) -> None:
        self._root, self._host, self._name = root, host, deployment
        self._measure, self._unused = measure, unused
        self._note = root / deployment / NOTE

    def heal(self) -> Optional[str]:
        """End a trial that was killed: bring the former release back, unless another run has done so.

        Returns:
            What was found of it, in a sentence; None without any.

        Raises:
            TrialError: the former release does not come back.
            HostError: the host does not do what it must.
            OSError: a link cannot be written.
        """
        note = read_json_object(self._note)
        if not note:
            return None
        current = active_release(self._root, self._name)
        if current in (note["trial"], note["former"]):
            self._come_back(note)
            return f"a trial was killed while {note['trial']} was current; {note['former']} is back, proven by its gate"
        self._clean(note)
        return f"a trial was killed while {note['trial']} was current; another run has made {current} current since"

    def begin(self, wanted: str, *, force: bool = False) -> None:
        """Begin a trial, after `heal`.

        Args:
            wanted: the release that the inventory asks for; it has to be the current one.
            force: also while others use the deployment.

        Raises:
            TrialError: the host has another release, or one that is not proven.
            OthersUseItError: others use the deployment.
            OSError: the note cannot be written.
        """
        current = active_release(self._root, self._name)
        if current != wanted:
            raise TrialError(
                f"{self._name} has the release {current or 'none'} here, and the inventory asks for {wanted}. Needed: "
                "the same, because a trial begins and ends with it. Change: run playbooks/rollout.yml first."
            )
        if link_target(self._root, self._name, "good") != current:
            raise TrialError(
                f"the release {current} of {self._name} has not passed its gate here. Needed: one that has, to come "
                "back to. Change: run playbooks/rollout.yml first."
            )
        if self._runs(current):
            self._unused(self._name, self._endpoint(current), force=force)
        write_json(self._note, {"schema": 1, "former": current, "trial": current, "made": []})

    def attempt(self, release: Wanted, settings: Settings) -> dict[str, Any]:
        """Make a release current, prove it and measure it; one that runs already is not started again.

        Returns:
            ok, stage (`start`, `gate`, `benchmark`; None when it is measured), reason, result (of the benchmark).

        Raises:
            TrialError: no trial has begun, or somebody else has made another release current.
            OthersUseItError: others use the deployment.
            HostError: the host does not do what it must.
            OSError: a release or a link cannot be written.
        """
        note = self._noted()
        made = list(note["made"])
        if release.release_id not in (*made, *release_ids(self._root, self._name)):
            made.append(release.release_id)
        write_json(self._note, {**note, "trial": release.release_id, "made": made})
        stage_release(self._root, self._name, release.release_id, release.files, dry_run=False)
        proof = self._bring_up(release.release_id)
        if not proof.ok:
            return {"ok": False, "stage": proof.stage, "reason": proof.reason, "result": None}
        return self._measured(settings)

    def end(self, settings: Optional[Settings] = None) -> dict[str, Any]:
        """Bring the former release back, prove it, and remove what was on trial; without a trial nothing is done.

        Args:
            settings: measure it once more; None does not.

        Returns:
            release that is current (None without a trial), and what `attempt` returns of it. What another run has made
            current meanwhile stays.

        Raises:
            TrialError: the former release does not come back.
            HostError: the host does not do what it must.
            OSError: a link cannot be written.
        """
        note = read_json_object(self._note)
        if not note:
            return {"release": None, "ok": True, "stage": None, "reason": "", "result": None}
        former, current = str(note["former"]), active_release(self._root, self._name)
        if current not in (note["trial"], former):
            self._clean(note)
            reason = f"another run has made {current} current meanwhile, which stays"
            return {"release": current, "ok": False, "stage": None, "reason": reason, "result": None}
        self._come_back(note)
        measured: dict[str, Any] = {"ok": True, "stage": None, "reason": "", "result": None}
        if settings is not None:
            try:
                measured = self._measured(settings)
            except OthersUseItError as error:
                # It serves again, and that comes first.
                measured = {"ok": False, "stage": "benchmark", "reason": str(error), "result": None}
        return {"release": former, **measured}

    def _noted(self) -> dict[str, Any]:
        note = read_json_object(self._note)
        current = active_release(self._root, self._name)
        if not note or current not in (note["trial"], note["former"]):
            raise TrialError(
                f"the release {current or 'none'} of {self._name} is current, and no trial has made it so. Needed: "
                "nobody else who changes this host meanwhile. Change: wait for the other run, and begin again."
            )
        return note

    def _come_back(self, note: Mapping[str, Any]) -> None:
        former = str(note["former"])
        proof = self._bring_up(former)
        if not proof.ok:
            raise TrialError(
                f"the former release {former} of {self._name} is current again and fails: {proof.text} Needed: a host "
                "on which it runs, as it did before. Change: what these words say, and run again, which tries it again."
            )
        self._clean(note)

    def _clean(self, note: Mapping[str, Any]) -> None:
        """Remove what the trial has put here, and then the note: a kill in between leaves the note."""
        kept = {link_target(self._root, self._name, name) for name in LINKS}
        for release_id in note["made"]:
            if release_id not in kept:
                shutil.rmtree(release_directory(self._root, self._name, release_id), ignore_errors=True)
        self._note.unlink()

    def _bring_up(self, release_id: str) -> Proof:
        endpoint = self._endpoint(release_id)
        if not self._runs(release_id):
            for stray in self._host.other_units(self._name, str(endpoint["engine"])):
                self._host.stop(stray)
            activate_release(self._root, self._name, release_id, dry_run=False)
            self._host.start(str(endpoint["unit"]))
        return self._host.prove(self._name, release_id, release_directory(self._root, self._name, release_id), endpoint)

    def _measured(self, settings: Settings) -> dict[str, Any]:
        try:
            _, result = self._measure(self._root, self._name, settings)
        except OthersUseItError:
            raise
        except BenchmarkError as error:
            return {"ok": False, "stage": "benchmark", "reason": str(error), "result": None}
        return {"ok": True, "stage": None, "reason": "", "result": result}

    def _runs(self, release_id: str) -> bool:
        unit = str(self._endpoint(release_id)["unit"])
        current = active_release(self._root, self._name) == release_id
        return (
            current
            and self._host.running_release(self._name) == release_id
            and self._host.unit_state(unit) == "running"
        )

    def _endpoint(self, release_id: str) -> dict[str, Any]:
        return read_json_object(release_directory(self._root, self._name, release_id) / ENDPOINT_FILE)
