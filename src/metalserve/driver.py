"""What has to happen to a host's NVIDIA driver, decided from what is seen on the host and from nothing else.

The same question is asked twice: before the packages are changed, where the answer is a prediction, and after
that on fresh facts. So a run that was cut off anywhere goes on where the host stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from metalserve.driver_refusals import (
    binding_refusals,
    branch_refusals,
    build_refusals,
    key_refusals,
    next_boot_refusals,
)
from metalserve.driver_state import FLAVOURS, State, driver_branch, driver_data
from metalserve.errors import Refusal

NOTHING, LOAD, RELOAD, REBOOT, REFUSE = "nothing", "load", "reload", "reboot", "refuse"
GO, STOP, REPORT = "go", "stop", "report"

_REBOOTS = ("reboot", "system_reboot")


@dataclass(frozen=True)
class Permissions:
    """What the operator allows: None asks, True does it, False leaves it and reports."""

    reboot: bool | None
    reload: bool | None


@dataclass
class _Answer:
    """The result while it grows."""

    action: str = NOTHING
    decision: str = GO
    packages: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    message: str = ""


def driver_action(
    facts: Mapping[str, Any],
    wanted_version: str,
    *,
    flavour: str = "open",
    reboot_allowed: bool | None = None,
    reload_allowed: bool | None = None,
    key_enrolled: bool | None = None,
    headers_available: bool | None = None,
    prebuilt: bool = False,
    package_changes: Sequence[str] = (),
    unload_failed: str | None = None,
    end_of_life_allowed: bool = False,
) -> dict[str, Any]:
    """Decide from the state of a host what leads to the wanted driver.

    Args:
        facts: the fact `gpu_host` of the host.
        wanted_version: complete driver version.
        flavour: `open` or `proprietary` kernel modules.
        reboot_allowed: may the host be restarted, and engines with it? None asks, True does it, False reports.
        reload_allowed: may engines be stopped and started for a reload? As above. An idle host asks nobody.
        key_enrolled: whether the firmware knows the key that signs modules built here; the fact where None.
        headers_available: whether the package sources offer the headers of the running kernel; None: not asked yet.
        prebuilt: the packages bring signed modules, and nothing is built on the host.
        package_changes: further differences that the package manager sees, each a phrase.
        unload_failed: why an attempt to unload the driver did not work; a reboot is what remains then.
        end_of_life_allowed: take a branch that gets no more fixes.

    Returns:
        Of plain types: `action` (nothing, load, reload, reboot, refuse: what the state needs once the packages are
        right); `decision` (go, stop: ask the operator with `message`, report: leave it and say `message`); `packages`
        (what is wrong with them; empty: nothing to install) and `change_packages` (whether they may be changed now);
        `reasons`; `holders`, of which `foreign` belong to nobody known here and `deployments` are engines;
        `services` and `modules` in the order in which they stop and unload; `fabric_manager` (needed on this host);
        `message`, empty where there is nothing to say.
        `change_packages` is false with a driver in use that may not be exchanged: new libraries over an old
        module would break whatever starts next.

    Raises:
        Refusal: version or flavour are not names of anything.
    """
    branch = driver_branch(wanted_version)
    if flavour not in FLAVOURS:
        raise Refusal(found=f"flavour {flavour!r}", needed=" or ".join(FLAVOURS), change="nvidia_driver_flavour")
    state = State.of(facts, wanted_version, flavour)
    answer = _Answer()
    if not state.gpus:
        answer.reasons.append("no NVIDIA GPU on the PCI bus")
        return _plain(answer, state)
    answer.packages = [*_package_differences(state), *package_changes]
    answer.action, answer.reasons = _action(state, unload_failed)
    answer.refusals = [*branch_refusals(branch, state, end_of_life_allowed), *binding_refusals(state)]
    if not prebuilt:
        known = facts.get("mok_enrolled") if key_enrolled is None else key_enrolled
        answer.refusals += [*build_refusals(state, headers_available), *key_refusals(state, answer.packages, known)]
    if answer.action == REBOOT:
        answer.refusals += next_boot_refusals(state, answer.packages)
    if answer.refusals:
        answer.action, answer.decision = REFUSE, STOP
        answer.message = " ".join(str(refusal) for refusal in answer.refusals)
    else:
        _ask(answer, state, Permissions(reboot_allowed, reload_allowed))
    return _plain(answer, state)


def _package_differences(state: State) -> list[str]:
    found = []
    if state.module_must_be_built:
        if state.on_disk == state.wanted:
            found.append(f"the module on disk is the {state.flavour_on_disk} one, not the {state.flavour} one")
        else:
            found.append(f"the module on disk for kernel {state.kernel} is {state.on_disk or 'missing'}")
    if state.userland != state.wanted:
        found.append(f"the userland is {state.userland or 'missing'}")
    if state.nvswitch_count and state.fabric_manager != state.wanted:
        found.append(f"the fabric manager is {state.fabric_manager or 'missing'}")
    return found


def _action(state: State, unload_failed: str | None) -> tuple[str, list[str]]:
    """The action once the packages are right, and why."""
    causes = []
    if state.nouveau_bound:
        causes.append("nouveau drives the GPUs")
    if state.waits_for_restart:
        causes.append(f"kernel {state.kernel} runs without a module of {state.wanted}, {state.next_kernel} has one")
    if state.off_the_bus:
        causes.append(f"a GPU has fallen off the bus (Xid 79): {', '.join(state.off_the_bus)}")
    lost = [str(gpu.get("pci_address")) for gpu in state.gpus if gpu.get("recovery_action") in _REBOOTS]
    if lost:
        causes.append(f"the driver asks for a reboot to recover {', '.join(lost)}")
    if unload_failed:
        causes.append(f"the loaded driver {state.loaded} could not be unloaded: {unload_failed}")
    if causes:
        return REBOOT, causes
    if state.loaded is None:
        return LOAD, ["no driver is loaded"]
    if state.loaded != state.wanted:
        return RELOAD, [f"driver {state.loaded} is loaded, {state.wanted} is wanted"]
    if state.loaded_flavour not in (None, state.flavour):
        return RELOAD, [f"the {state.loaded_flavour} module is loaded, the {state.flavour} one is wanted"]
    return NOTHING, [f"driver {state.wanted} is loaded"]


def _ask(answer: _Answer, state: State, allowed: Permissions) -> None:
    """Hold the action against the operator's permissions and against what runs."""
    if answer.action not in (RELOAD, REBOOT):
        return
    found = "; ".join(answer.reasons)
    if state.engines:
        found += "; engines hold the GPUs: " + ", ".join(map(str, state.engines))
    if state.foreign:
        found += "; processes that are not ours hold the GPUs: " + ", ".join(map(str, state.foreign))
    reboot = answer.action == REBOOT
    permission = allowed.reboot if reboot else allowed.reload
    name = "nvidia_driver_reboot_allowed" if reboot else "nvidia_driver_reload_allowed"
    step = "one restart of the host" if reboot else "a reload of the driver"
    consequence = f", which stops {', '.join(state.deployments)} and starts them again" if state.deployments else ""
    if permission is False:
        answer.decision = REPORT
        answer.message = str(
            Refusal(found=found, needed=step + consequence, change=f"{name}: true, or do it yourself and run again")
        )
    elif state.foreign:
        answer.decision = STOP
        answer.message = str(
            Refusal(
                found=found,
                needed=f"{step}, with the GPUs free; no process is ever killed for it",
                change=f"end {', '.join(map(str, state.foreign))}, or {name}: false to leave the driver as it is",
            )
        )
    elif permission is None and (reboot or state.engines):
        answer.decision = STOP
        answer.message = str(
            Refusal(
                found=found,
                needed=step + consequence,
                change=f"{name}: true (do it) or false (leave it to you and report it)",
            )
        )


def _plain(answer: _Answer, state: State) -> dict[str, Any]:
    in_use = state.loaded is not None and answer.action in (RELOAD, REBOOT)
    may_change = answer.decision == GO or (answer.decision == REPORT and not in_use)
    return {
        "action": answer.action,
        "decision": answer.decision,
        "packages": answer.packages,
        "change_packages": bool(answer.packages) and may_change,
        "reasons": answer.reasons,
        "holders": [
            {"pid": holder.pid, "process": holder.process, "deployment": holder.deployment, "unit": holder.unit}
            for holder in state.holders
        ],
        "foreign": [str(holder) for holder in state.foreign],
        "deployments": state.deployments,
        "services": [service["unit"] for service in driver_data()["services"]],
        "modules": list(driver_data()["modules"]),
        "fabric_manager": state.nvswitch_count > 0,
        "message": answer.message,
    }
