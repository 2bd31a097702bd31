"""The state of a host's NVIDIA driver, and what is known of drivers in general."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from metalserve import catalogue
from metalserve.errors import Refusal

FLAVOURS = ("open", "proprietary")

_VERSION = re.compile(r"^(\d{3})(\.\d+){1,2}$")
# NVIDIA's Xid catalogue: the GPU has fallen off the bus.
_OFF_THE_BUS = 79


@lru_cache(maxsize=1)
def driver_data() -> Mapping[str, Any]:
    """The content of catalogue/drivers.yaml."""
    path = Path(catalogue.__file__).with_name("drivers.yaml")
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def driver_branch(version: str) -> int:
    """The branch of a driver version: 580 of 580.178.04.

    Raises:
        Refusal: the version is not complete.
    """
    match = _VERSION.match(version)
    if not match:
        raise Refusal(
            found=f"driver version {version!r}",
            needed="a complete version, such as 580.178.04, so that every host and every package gets the same",
            change="nvidia_driver_version",
        )
    return int(match[1])


@dataclass(frozen=True)
class Holder:
    """A process that has a GPU open. `unit` is the service that it belongs to, where it is one of the driver's own."""

    pid: int
    process: str | None
    deployment: str | None
    unit: str | None

    def __str__(self) -> str:
        owner = f"deployment {self.deployment}, " if self.deployment else ""
        return f"{self.process or 'unknown process'} ({owner}pid {self.pid})"


@dataclass(frozen=True)
class State:
    """What decides, of all the facts of a host. Versions are texts, None where there is none."""

    wanted: str
    flavour: str
    kernel: str
    headers: bool
    loaded: str | None
    loaded_flavour: str | None
    on_disk: str | None
    flavour_on_disk: str | None
    userland: str | None
    fabric_manager: str | None
    next_kernel: str | None
    next_version: str | None
    nouveau_bound: bool
    secure_boot: bool
    nvswitch_count: int
    gpus: tuple[Mapping[str, Any], ...]
    holders: tuple[Holder, ...]
    off_the_bus: tuple[str, ...]

    @classmethod
    def of(cls, facts: Mapping[str, Any], wanted: str, flavour: str) -> State:
        """The state in the facts of a host (`gpu_host`); what a fact leaves open counts as not there."""
        driver = facts.get("driver") or {}
        following = driver.get("on_disk_newest_kernel") or {}
        loaded = driver.get("loaded")
        return cls(
            wanted=wanted,
            flavour=flavour,
            kernel=str(facts.get("kernel")),
            headers=bool(facts.get("kernel_headers")),
            loaded=loaded,
            loaded_flavour=driver.get("flavour") if loaded else None,
            on_disk=driver.get("on_disk"),
            flavour_on_disk=driver.get("flavour_on_disk"),
            userland=driver.get("userland"),
            fabric_manager=driver.get("fabric_manager"),
            next_kernel=following.get("kernel"),
            next_version=following.get("version"),
            nouveau_bound=bool(facts.get("nouveau_bound")),
            secure_boot=bool(facts.get("secure_boot")),
            nvswitch_count=int(facts.get("nvswitch_count") or 0),
            gpus=tuple(facts.get("gpus") or ()),
            holders=tuple(_holder(entry) for entry in driver.get("holders") or ()),
            off_the_bus=tuple(
                str(entry.get("pci_address"))
                for entry in facts.get("xid_errors") or ()
                if entry.get("code") == _OFF_THE_BUS
            ),
        )

    @property
    def waits_for_restart(self) -> bool:
        """Only a newer kernel has the module, and this one has no headers: no package can help it, a restart does."""
        return self.on_disk is None and self.next_version == self.wanted and not self.headers

    @property
    def module_must_be_built(self) -> bool:
        """The module on disk for the running kernel is not the wanted one, and packages can help it."""
        if self.waits_for_restart:
            return False
        return self.on_disk != self.wanted or self.flavour_on_disk not in (None, self.flavour)

    @property
    def engines(self) -> tuple[Holder, ...]:
        """Engines of this project that hold a GPU."""
        return tuple(holder for holder in self.holders if holder.deployment)

    @property
    def foreign(self) -> tuple[Holder, ...]:
        """Processes of somebody else that hold a GPU."""
        return tuple(holder for holder in self.holders if not holder.deployment and not holder.unit)

    @property
    def deployments(self) -> list[str]:
        """The deployments whose engines hold a GPU, each once."""
        return sorted({str(holder.deployment) for holder in self.engines})


def _holder(entry: Mapping[str, Any]) -> Holder:
    units = {service["process"]: service["unit"] for service in driver_data()["services"]}
    process = entry.get("process")
    return Holder(int(entry["pid"]), process, entry.get("deployment"), units.get(process))
