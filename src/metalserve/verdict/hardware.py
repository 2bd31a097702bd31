"""GPUs, links and the software beside them: the health rows, seen from before the playbooks have run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from metalserve.catalogue import gpu_by_pci_id
from metalserve.driver import NOTHING, REBOOT
from metalserve.health.gpus import check_gpus
from metalserve.health.software import check_software
from metalserve.health.types import Expected, Row, fail
from metalserve.health.types import ok as fine
from metalserve.verdict.check import AFTER, REFUSED, Check, warn
from metalserve.verdict.driver import DriverOutlook
from metalserve.verdict.options import DriverOptions, ToolkitOptions
from metalserve.verdict.rows import from_row
from metalserve.xid import xid_meaning

# NVIDIA's Xid catalogue: the GPU has fallen off the bus.
_OFF_THE_BUS = 79


def gpu_checks(facts: Mapping[str, Any], expected: Expected, outlook: DriverOutlook) -> list[Check]:
    """The GPUs against the inventory and their catalogue entries, and their faults.

    While the driver does not answer, only what the PCI bus tells can be judged.
    """
    gpus: Sequence[Mapping[str, Any]] = facts.get("gpus") or []
    if gpus and not any(gpu.get("source") != "pci" for gpu in gpus):
        rows = _bus_rows(gpus, expected)
    else:
        rows = check_gpus(facts, expected)
    checks = [from_row(row) for row in rows]
    return [_cured(check, facts, outlook) for check in checks]


def _bus_rows(gpus: Sequence[Mapping[str, Any]], expected: Expected) -> list[Row]:
    found = f"{len(gpus)} GPUs on the PCI bus"
    rows = [fine("gpu_count", found)]
    if expected.gpu_count not in (None, len(gpus)):
        rows = [
            fail(
                "gpu_count",
                found,
                f"{expected.gpu_count} (gpu_health_expected.gpu_count)",
                "look at lspci and the slots for a GPU that is gone, or correct gpu_count",
            )
        ]
    ids = [str(gpu.get("pci_id")).lower() for gpu in gpus]
    if expected.gpu_pci_ids is not None and ids != list(expected.gpu_pci_ids):
        rows.append(
            fail(
                "gpu_ids",
                f"PCI ids {', '.join(ids)}",
                f"{', '.join(expected.gpu_pci_ids)} in this order (gpu_health_expected.gpu_pci_ids)",
                "the cards of this host, or gpu_pci_ids",
            )
        )
    return rows


def _cured(check: Check, facts: Mapping[str, Any], outlook: DriverOutlook) -> Check:
    """A refusal that goes away by what will be done to the driver anyway."""
    if check.verdict != REFUSED or outlook.action == NOTHING:
        return check
    cured = check.name == "persistence"
    if outlook.action == REBOOT:
        fatal = {
            entry["code"] for entry in facts.get("xid_errors") or [] if xid_meaning(entry["code"]).severity == "fail"
        }
        off_the_bus = fatal == {_OFF_THE_BUS} and not facts.get("sxid_errors")
        cured = (
            cured
            or check.name in ("recovery_action", "fabric_state")
            or (check.name == "gpu_errors" and off_the_bus)
            or (check.name == "gpu_count" and _OFF_THE_BUS in fatal and "not known to the driver" in check.found)
        )
    return replace(check, verdict=AFTER, action=outlook.phrase) if cured else check


def software_checks(
    facts: Mapping[str, Any], outlook: DriverOutlook, driver: DriverOptions, toolkit: ToolkitOptions
) -> list[Check]:
    """Fabric, container toolkit and CDI specification, and what the playbooks will do about them."""
    checks = []
    for row in check_software(facts, Expected()):
        if row.name == "driver":
            continue
        check = from_row(row)
        if check.verdict == REFUSED:
            check = replace(check, **_remedy(check, facts, outlook, driver, toolkit))
        checks.append(check)
    return checks


def _remedy(
    check: Check,
    facts: Mapping[str, Any],
    outlook: DriverOutlook,
    driver: DriverOptions,
    toolkit: ToolkitOptions,
) -> dict[str, str]:
    """The changes to a refused row that the playbooks put right; none where they do not."""
    if check.name in ("fabric_manager", "fabric_state"):
        if driver.manage and outlook.action != NOTHING:
            return {"verdict": AFTER, "action": outlook.phrase}
        if driver.manage and check.name == "fabric_manager":
            return {"verdict": AFTER, "action": "start of the fabric manager"}
    if check.name in ("container_toolkit", "cdi") and toolkit.manage:
        if check.name == "cdi":
            return {"verdict": AFTER, "action": "CDI specification"}
        present = (facts.get("container_toolkit") or {}).get("version")
        return {"verdict": AFTER, "action": f"container toolkit {'upgrade' if present else 'install'}"}
    return {}


def bridge_checks(facts: Mapping[str, Any]) -> list[Check]:
    """What slows traffic between GPUs over PCIe on bare metal. Boards with NVLink do not need that way."""
    gpus = facts.get("gpus") or []
    entries = [gpu_by_pci_id(gpu.get("pci_id")) for gpu in gpus]
    by_pcie = len(gpus) > 1 and not all(entry and entry.nvlink_links for entry in entries)
    if not by_pcie or facts.get("virtualization") not in ("none", None):
        return []
    found = []
    bridges = facts.get("acs_redirect") or []
    if bridges:
        found.append(
            warn(
                "acs",
                found=f"ACS sends traffic between GPUs up to the processor on {', '.join(bridges)}",
                needed="no request or completion redirect on the bridges above the GPUs of a bare-metal host",
                change="switch ACS off in the firmware, or with setpci in a unit before Docker "
                "(docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html)",
            )
        )
    if facts.get("iommu") == "on":
        found.append(
            warn(
                "iommu",
                found="the IOMMU translates every access of the GPUs",
                needed="pass-through, or traffic between GPUs over PCIe is slow or fails",
                change="iommu=pt on the kernel's command line, then a restart",
            )
        )
    return found
