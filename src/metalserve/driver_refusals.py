"""What keeps a driver from working on a host, each with its remedy: known before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metalserve import catalogue
from metalserve.driver_state import FLAVOURS, State, driver_data
from metalserve.errors import Refusal

# Kernel drivers that a GPU may be bound to, none included.
_OURS = (None, "nvidia", "nouveau")


def branch_refusals(branch: int, state: State, end_of_life_allowed: bool) -> list[Refusal]:
    """A branch without fixes, and modules of a flavour that the branch or a GPU does not have."""
    refusals = []
    branches: Mapping[int, Mapping[str, Any]] = driver_data()["branches"]
    alive = ", ".join(f"{number}" for number, entry in branches.items() if not entry["ended"])
    entry = branches.get(branch)
    if not end_of_life_allowed and (entry is None or entry["ended"]):
        life = "is not known here" if entry is None else "gets no more fixes"
        refusals.append(
            Refusal(
                found=f"driver branch {branch} (nvidia_driver_version {state.wanted}) {life}",
                needed=f"one of {alive}",
                change="nvidia_driver_version, or nvidia_driver_end_of_life_allowed: true to take it all the same",
            )
        )
    limits = driver_data()["flavours"][state.flavour]
    last, first = limits.get("last_branch"), limits.get("first_branch")
    if last is not None and branch > last:
        refusals.append(
            Refusal(
                found=f"{state.flavour} modules of branch {branch}",
                needed=f"branch {last} or older for them",
                change="nvidia_driver_flavour: open",
            )
        )
    if first is not None and branch < first:
        refusals.append(
            Refusal(
                found=f"{state.flavour} modules of branch {branch}",
                needed=f"branch {first} or newer for them",
                change="nvidia_driver_version",
            )
        )
    lowest, below = limits.get("minimum_compute_capability"), limits.get("below_compute_capability")
    for gpu in state.gpus:
        capability = _capability(gpu)
        if capability is None:
            continue
        if (lowest and capability < _numbers(lowest)) or (below and capability >= _numbers(below)):
            other = next(name for name in FLAVOURS if name != state.flavour)
            refusals.append(
                Refusal(
                    found=f"{gpu.get('name') or gpu.get('pci_id')} at {gpu.get('pci_address')} has compute capability "
                    f"{'.'.join(map(str, capability))}, for which there are no {state.flavour} modules",
                    needed=f"{lowest} or newer" if lowest else f"older than {below}",
                    change=f"nvidia_driver_flavour: {other}",
                )
            )
    return refusals


def _capability(gpu: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Compute capability from the driver, or else from the PCI id; None where neither tells."""
    told = gpu.get("compute_capability")
    if told is None:
        entry = catalogue.gpu_by_pci_id(gpu.get("pci_id"))
        told = entry.compute_capability if entry else None
    return None if told is None else _numbers(told)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def binding_refusals(state: State) -> list[Refusal]:
    """GPUs that are handed to something else, such as virtual machines."""
    taken = {str(gpu.get("pci_address")): gpu["pci_driver"] for gpu in state.gpus if gpu.get("pci_driver") not in _OURS}
    if not taken:
        return []
    return [
        Refusal(
            found="GPUs bound to another driver: " + ", ".join(f"{place} to {name}" for place, name in taken.items()),
            needed="all GPUs free for the driver nvidia",
            change="remove that binding (for vfio-pci: its ids in /etc/modprobe.d or on the kernel command line)",
        )
    ]


def build_refusals(state: State, available: bool | None) -> list[Refusal]:
    """Without headers of the running kernel no module can be built for it; `available`: in its package sources."""
    if state.headers or available is not False or not state.module_must_be_built:
        return []
    return [
        Refusal(
            found=f"there are no headers of the running kernel {state.kernel} on this host or in its package sources",
            needed="headers of exactly that kernel, to build the driver's module",
            change="install them (again, where their package is installed and its files are gone), or start the host "
            "with a kernel whose headers can be had. This project never changes the kernel",
        )
    ]


def key_refusals(state: State, packages: list[str], enrolled: bool | None) -> list[Refusal]:
    """Under Secure Boot the kernel takes no module that is signed with an unknown key."""
    unchanged = not packages and state.loaded == state.wanted
    if not state.secure_boot or enrolled or unchanged:
        return []
    told = "is not enrolled" if enrolled is False else "cannot be shown to be enrolled"
    return [
        Refusal(
            found=f"Secure Boot is on, and the key that signs modules built on this host {told}",
            needed="a key that the firmware knows, or the kernel refuses the module",
            change="run `mokutil --import /var/lib/dkms/mok.pub` and confirm it on the console at the next boot, "
            "or name an enrolled key in nvidia_driver_signing_key, or turn Secure Boot off",
        )
    ]


def next_boot_refusals(state: State, packages: list[str]) -> list[Refusal]:
    """A restart must not lead into a kernel without the driver. Before the packages are changed nobody can tell."""
    if packages or state.next_kernel is None or state.next_version == state.wanted:
        return []
    return [
        Refusal(
            found=f"the next boot takes kernel {state.next_kernel}, whose driver module is "
            f"{state.next_version or 'missing'}",
            needed=f"a module of {state.wanted} for it",
            change=f"install the headers of {state.next_kernel} so that its module is built, or remove that kernel",
        )
    ]
