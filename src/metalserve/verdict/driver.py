"""The driver of a host: what is there, what the playbooks will make of it, and what then is loaded."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metalserve.driver import GO, NOTHING, REFUSE, REPORT, driver_action
from metalserve.driver_state import driver_data
from metalserve.errors import Refusal
from metalserve.health.types import Expected
from metalserve.verdict.check import Check, after, from_refusal, ok, refused, warn
from metalserve.verdict.options import DriverOptions
from metalserve.verdict.rows import driver_row, split_refusals

# The time in which a driver change can be planned.
_WARNING_DAYS = 183
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class DriverOutlook:
    """What will be with the driver.

    Attributes:
        checks: the rows.
        version: the version that is loaded once the playbooks have run; None: none.
        action: `nothing`, `load`, `reload` or `reboot`, as far as the playbooks do it.
        phrase: that action in words, empty for nothing.
    """

    checks: tuple[Check, ...]
    version: str | None
    action: str = NOTHING
    phrase: str = ""


def driver_outlook(facts: Mapping[str, Any], options: DriverOptions, today: dt.date) -> DriverOutlook:
    """The rows of the driver of a host with GPUs."""
    loaded = (facts.get("driver") or {}).get("loaded")
    if not options.manage:
        return DriverOutlook((*_unmanaged(facts, options), *_life(loaded, options, today, managed=False)), loaded)
    try:
        answer = driver_action(
            facts,
            options.version,
            flavour=options.flavour,
            reboot_allowed=options.reboot_allowed,
            reload_allowed=options.reload_allowed,
            key_enrolled=options.key_enrolled,
            prebuilt=options.prebuilt,
            end_of_life_allowed=options.end_of_life_allowed,
        )
    except Refusal as refusal:
        return DriverOutlook((from_refusal("driver", refusal),), loaded)
    refusals = split_refusals(answer["message"]) if answer["action"] == REFUSE else []
    if options.refusal:
        # The role has asked package sources and firmware, too; what it found for itself is said once.
        known = {refusal.found for refusal in refusals}
        refusals += [refusal for refusal in split_refusals(options.refusal) if refusal.found not in known]
    if refusals:
        return DriverOutlook(tuple(from_refusal("driver", refusal) for refusal in refusals), options.version)
    if answer["decision"] == REPORT:
        # The operator keeps the driver as it is, so it is judged as it is.
        left = split_refusals(answer["message"])[0]
        note = warn("driver_change", found=left.found, needed=left.needed, change=left.change)
        return DriverOutlook((note, *_unmanaged(facts, options), *_life(loaded, options, today, managed=False)), loaded)
    phrase = _phrase(facts, options.version, answer)
    life = _life(options.version, options, today, managed=True)
    if not phrase:
        row = ok("driver", f"driver {options.version} is loaded, on disk and in the userland")
        return DriverOutlook((row, *life, *_next_boot(facts, options.version)), options.version)
    found = "; ".join([*answer["reasons"], *answer["packages"]])
    if answer["decision"] == GO:
        change = "nothing: playbooks/prepare.yml does it"
    else:
        change = f"before playbooks/prepare.yml: {split_refusals(answer['message'])[0].change}"
    row = after("driver", action=phrase, found=found, needed=f"driver {options.version} loaded", change=change)
    return DriverOutlook(
        (row, *_headers(facts, options, answer), *life), options.version, str(answer["action"]), phrase
    )


def driver_now(facts: Mapping[str, Any]) -> Check:
    """Whether the driver works as it is now; a newer one on disk may wait for a reload.

    Facts without a driver are those of a simulated host, whose driver works.
    """
    driver = facts.get("driver") or {}
    if driver.get("state", "ok") == "ok":
        return ok("driver", f"driver {driver.get('loaded')} works")
    versions = ", ".join(f"{part} {driver[part]}" for part in ("loaded", "on_disk", "userland") if driver.get(part))
    return refused(
        "driver",
        found=f"GPUs on the PCI bus and a driver in state '{driver['state']}' ({versions or 'no version found'})",
        needed="a loaded NVIDIA driver that fits its userland",
        change="playbooks/prepare.yml with nvidia_driver_manage: true, or install or reload the driver",
    )


def _unmanaged(facts: Mapping[str, Any], options: DriverOptions) -> list[Check]:
    """What is there must do."""
    now = driver_now(facts)
    if now.verdict != "ok":
        return [now]
    loaded = str((facts.get("driver") or {}).get("loaded"))
    return [driver_row(facts, Expected()), *_next_boot(facts, loaded)]


def _phrase(facts: Mapping[str, Any], wanted: str, answer: Mapping[str, Any]) -> str:
    """`driver upgrade and reboot`, and the like; empty where there is nothing to do."""
    driver = facts.get("driver") or {}
    present = next((driver[level] for level in ("loaded", "on_disk", "userland") if driver.get(level)), None)
    if not answer["packages"]:
        verb = ""
    elif present is None:
        verb = "install"
    elif _order(present) == _order(wanted):
        verb = "repair"
    else:
        verb = "upgrade" if _order(present) < _order(wanted) else "downgrade"
    step = "" if answer["action"] == NOTHING else str(answer["action"])
    words = " and ".join(word for word in (verb, step) if word)
    return f"driver {words}" if words else ""


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in _NUMBER.findall(version))


def _headers(facts: Mapping[str, Any], options: DriverOptions, answer: Mapping[str, Any]) -> list[Check]:
    """The module is built on the host, and the headers for it are not there yet."""
    if options.prebuilt or facts.get("kernel_headers") is not False or not answer["packages"]:
        return []
    if (facts.get("driver") or {}).get("on_disk") == options.version:
        return []
    return [
        warn(
            "kernel_headers",
            found=f"no headers of the running kernel {facts.get('kernel')} on the host",
            needed="headers of exactly that kernel in the package sources; the driver's module is built with them",
            change="nothing where they are offered; else playbooks/prepare.yml refuses this host before any change",
        )
    ]


def _next_boot(facts: Mapping[str, Any], version: str) -> list[Check]:
    """A kernel is installed that the next boot takes, and it has no such driver."""
    following = (facts.get("driver") or {}).get("on_disk_newest_kernel")
    if not following or following.get("version") == version:
        return []
    return [
        warn(
            "next_boot",
            found=f"the next boot takes kernel {following['kernel']}, whose driver module is "
            f"{following.get('version') or 'missing'}",
            needed=f"a module of {version} for it, or the host comes back without its GPUs",
            change=f"install the headers of {following['kernel']} so that DKMS builds it, or remove that kernel",
        )
    ]


def _life(version: str | None, options: DriverOptions, today: dt.date, *, managed: bool) -> list[Check]:
    """Whether the branch still gets fixes."""
    if version is None:
        return []
    branch = int(version.split(".", 1)[0])
    branches: Mapping[int, Mapping[str, Any]] = driver_data()["branches"]
    alive = ", ".join(str(number) for number, entry in branches.items() if not entry["ended"])
    entry = branches.get(branch)
    if entry is None:
        return [
            warn(
                "driver_branch",
                found=f"driver branch {branch}, whose life is not known here",
                needed=f"one of {alive}",
                change="nvidia_driver_version, or the branch's entry in catalogue/drivers.yaml",
            )
        ]
    end = _end(entry["end"])
    if entry["ended"] or (end is not None and end < today):
        found = f"driver branch {branch} ended" + (f" in {entry['end']}" if entry["end"] else "")
        needed = f"a branch that gets security fixes: {alive}"
        change = "nvidia_driver_version with nvidia_driver_manage: true, or nvidia_driver_end_of_life_allowed: true"
        if options.end_of_life_allowed:
            return [warn("driver_branch", found=found, needed=needed, change=change)]
        return [refused("driver_branch", found=found, needed=needed, change=change)]
    if end is not None and end - today < dt.timedelta(days=_WARNING_DAYS):
        return [
            warn(
                "driver_branch",
                found=f"driver branch {branch} ends in {entry['end']}",
                needed="a branch with half a year of fixes to come",
                change="plan the change of nvidia_driver_version",
            )
        ]
    life = f"to {entry['end']}" if entry["end"] else "for now"
    return [ok("driver_branch", f"branch {branch} gets fixes {life}")]


def _end(month: str | None) -> dt.date | None:
    """The last day of a month written as 2028-06."""
    if month is None:
        return None
    year, number = (int(part) for part in month.split("-"))
    return dt.date(year + number // 12, number % 12 + 1, 1) - dt.timedelta(days=1)
