"""One question about a host and its answer, in words that a person can act on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from metalserve.errors import Refusal

OK, WARN, AFTER, REFUSED = "ok", "warn", "ok_after", "refused"
# From good to bad: the worst check of a group is the group's verdict.
SEVERITY = (OK, WARN, AFTER, REFUSED)
# The columns of the fleet's table, in their order.
GROUPS = ("host", "gpus", "driver", "cuda", "toolkit", "health", "links", "disk", "plan")
# Every check and its column. Those of a GPU's health have the names of metalserve.health.
GROUP_OF = {
    "facts": "host",
    "systemd": "host",
    "docker": "host",
    "memory": "host",
    "expected": "gpus",
    "gpu_count": "gpus",
    "gpu_ids": "gpus",
    "gpu_memory": "gpus",
    "compute_capability": "gpus",
    "mig": "gpus",
    "driver": "driver",
    "driver_change": "driver",
    "driver_branch": "driver",
    "kernel_headers": "driver",
    "next_boot": "driver",
    "fabric_manager": "driver",
    "image_cuda": "cuda",
    "container_toolkit": "toolkit",
    "cdi": "toolkit",
    "ecc": "health",
    "remapped_rows": "health",
    "sram": "health",
    "recovery_action": "health",
    "gpu_errors": "health",
    "compute_mode": "health",
    "persistence": "health",
    "throttle": "health",
    "processes": "health",
    "pcie_width": "links",
    "pcie_generation": "links",
    "nvlink": "links",
    "topology": "links",
    "fabric_state": "links",
    "acs": "links",
    "iommu": "links",
    "disk": "disk",
    "plan": "plan",
}


@dataclass(frozen=True)
class Check:
    """One row of a host's verdict.

    Attributes:
        name: what was asked, one of GROUP_OF; the name under which a refusal can be accepted.
        verdict: `ok`, `warn` (it will serve, but look), `ok_after` (right once `action` is done), `refused`.
        found: what was seen, with its numbers.
        needed: what would have been right; empty where all is well.
        change: the variable or the action that leads there; empty where all is well.
        action: what the playbooks will do by themselves; empty unless `ok_after`.
    """

    name: str
    verdict: str
    found: str
    needed: str = ""
    change: str = ""
    action: str = ""

    @property
    def group(self) -> str:
        """The column of the table, one of GROUPS."""
        return GROUP_OF.get(self.name, "health")

    def as_dict(self) -> dict[str, Any]:
        """The row of plain types, with its group."""
        return {**asdict(self), "group": self.group}


def ok(name: str, found: str) -> Check:
    """All is well."""
    return Check(name, OK, found)


def warn(name: str, *, found: str, needed: str, change: str) -> Check:
    """The host will serve, but a person should look."""
    return Check(name, WARN, found, needed, change)


def after(name: str, *, action: str, found: str, needed: str, change: str) -> Check:
    """Right once the playbooks have done what `action` says."""
    return Check(name, AFTER, found, needed, change, action)


def refused(name: str, *, found: str, needed: str, change: str) -> Check:
    """The host may not serve like this."""
    return Check(name, REFUSED, found, needed, change)


def from_refusal(name: str, refusal: Refusal) -> Check:
    """A refusal that some other part of the package raised."""
    return Check(name, REFUSED, refusal.found, refusal.needed, refusal.change)


def worst(verdicts: Iterable[str]) -> str:
    """The worst of several verdicts; `ok` of none."""
    return max(verdicts, key=SEVERITY.index, default=OK)


def require(checks: Iterable[Check]) -> None:
    """Raise the first refusal among the checks.

    Raises:
        Refusal: with the three parts of that check.
    """
    for check in checks:
        if check.verdict == REFUSED:
            raise Refusal(found=check.found, needed=check.needed, change=check.change)
