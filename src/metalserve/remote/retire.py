"""Take a deployment off a host: its units stop and do not start again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

from .releases import active_release
from .rollout_types import Outcome


class Stopper(Protocol):
    """The part of a host that retiring needs."""

    def other_units(self, deployment: str, engine: str) -> list[str]:
        """Units of the deployment for engines other than `engine` that run or start at boot."""

    def stop(self, unit: str) -> None:
        """Stop the unit and keep it from starting at boot."""


def retire(root: Path, host: Stopper, deployment: str, *, purge: bool, dry_run: bool) -> Outcome:
    """Stop and disable all units of a deployment; with `purge` its releases go as well.

    Raises:
        OSError: the releases cannot be removed.
    """
    outcome = Outcome(deployment, None, active=active_release(root, deployment), ok=True)
    units = host.other_units(deployment, "")
    if units:
        outcome.changed = outcome.stopped = True
        outcome.lines.append(f"{deployment}: {', '.join(units)} stopped and disabled")
        for unit in [] if dry_run else units:
            host.stop(unit)
    directory = root / deployment
    if purge and directory.is_dir():
        outcome.changed = True
        outcome.lines.append(f"{deployment}: {directory} removed")
        if not dry_run:
            shutil.rmtree(directory)
            outcome.active = None
    if not outcome.changed:
        outcome.lines.append(f"{deployment}: nothing runs and nothing starts at boot")
    outcome.message = outcome.lines[-1]
    return outcome
