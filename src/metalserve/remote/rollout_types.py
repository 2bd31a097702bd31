"""What a rollout on a host is asked for, what it needs of the host, and what became of each deployment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Protocol


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
        stopped: whether its engine was (or would be) stopped for good.
        pruned: releases that were removed.
        before: the release that was current at the beginning.
        serving: whether the release that is current at the end has passed the gate.
        seconds: from the beginning of the run on this host to the end of this deployment's proof.
        gate: of the last proof, see `Proof`.
        capacity: of the last proof, see `Proof`.
        endpoint: how the release that was proven last is asked, with the deployment as `name`.
    """

    deployment: str
    wanted: Optional[str]
    active: Optional[str] = None
    ok: bool = False
    message: str = ""
    lines: list[str] = field(default_factory=list)
    changed: bool = False
    started: bool = False
    stopped: bool = False
    pruned: list[str] = field(default_factory=list)
    before: Optional[str] = None
    serving: bool = False
    seconds: float = 0.0
    gate: str = ""
    capacity: dict[str, Any] = field(default_factory=dict)
    endpoint: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before = self.active

    @property
    def replaced(self) -> Optional[str]:
        """The release whose place another one has taken; None where none has, and where there was none before."""
        return self.before if self.before != self.active else None

    def as_dict(self) -> dict[str, Any]:
        """The outcome as plain types."""
        return dict(vars(self))
