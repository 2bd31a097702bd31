"""Health of the GPUs themselves: how many, which, how much memory, which links, which faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from metalserve.catalogue import MIB, Gpu, gpu_by_pci_id
from metalserve.health.types import Expected, Row, data, fail, gpu_label, join, ok, warn
from metalserve.xid import ErrorMeaning, sxid_meaning, xid_meaning

Facts = Mapping[str, Any]
Gpus = Sequence[Mapping[str, Any]]


def check_gpus(facts: Facts, expected: Expected) -> list[Row]:
    """The rows of all GPUs, one for each check that applies to any of them."""
    gpus: Gpus = facts.get("gpus") or []
    known = [gpu for gpu in gpus if gpu.get("source") != "pci"]
    checks: list[Callable[[], Row | None]] = [
        lambda: _count(gpus, known, expected),
        lambda: _ids(gpus, expected),
        lambda: _memory(known),
        lambda: _capability(known),
        lambda: _ecc(known),
        lambda: _rows_remapped(known),
        lambda: _sram(known),
        lambda: _recovery(known),
        lambda: _errors(facts),
        lambda: _width(known),
        lambda: _generation(known),
        lambda: _nvlink(known),
        lambda: _mig(known, expected),
        lambda: _compute_mode(known),
        lambda: _persistence(known),
        lambda: _throttle(known),
        lambda: _processes(facts),
        lambda: _topology(facts, known, expected),
    ]
    return [row for row in (check() for check in checks) if row is not None]


def _count(gpus: Gpus, known: Gpus, expected: Expected) -> Row:
    """A GPU that the bus shows and the driver does not know has failed."""
    lost = [gpu for gpu in gpus if gpu.get("source") == "pci"]
    found = f"{len(known)} GPUs that the driver knows, {len(gpus)} on the PCI bus"
    if lost:
        foreign = [gpu for gpu in lost if gpu.get("pci_driver") not in (None, "nvidia")]
        bound = "".join(f"; {gpu_label(gpu)} is bound to {gpu['pci_driver']}" for gpu in foreign)
        return fail(
            "gpu_count",
            f"{found}: not known to the driver: {join(map(gpu_label, lost))}{bound}",
            "every GPU of the bus known to the driver",
            "look for Xid 79 and power (journalctl -k -b), reboot, reseat the card",
        )
    if expected.gpu_count is not None and len(gpus) != expected.gpu_count:
        return fail(
            "gpu_count",
            found,
            f"{expected.gpu_count} (gpu_health_expected.gpu_count)",
            "look at lspci and the slots for a GPU that is gone, or correct gpu_count",
        )
    return ok("gpu_count", found)


def _ids(gpus: Gpus, expected: Expected) -> Row | None:
    if expected.gpu_pci_ids is None:
        return None
    found = [str(gpu.get("pci_id")).lower() for gpu in gpus]
    wanted = list(expected.gpu_pci_ids)
    if found != wanted:
        return fail(
            "gpu_ids",
            f"PCI ids {', '.join(found) or 'none'}",
            f"{', '.join(wanted)} in this order (gpu_health_expected.gpu_pci_ids)",
            "the cards of this host, or gpu_pci_ids",
        )
    return ok("gpu_ids", f"PCI ids {', '.join(found)}")


def _entries(known: Gpus) -> list[tuple[Mapping[str, Any], Gpu]]:
    """The GPUs that the catalogue knows, with their entry."""
    pairs = [(gpu, gpu_by_pci_id(gpu.get("pci_id"))) for gpu in known]
    return [(gpu, entry) for gpu, entry in pairs if entry is not None]


def _memory(known: Gpus) -> Row | None:
    if not known:
        return None
    share = data("health.yaml")["memory_tolerance_percent"] / 100
    strangers = sorted({str(gpu.get("pci_id")) for gpu in known if gpu_by_pci_id(gpu.get("pci_id")) is None})
    wrong = [
        f"{gpu_label(gpu)} has {gpu['memory_total_bytes'] // MIB} MiB, a {entry.name} {entry.memory_total_bytes // MIB}"
        for gpu, entry in _entries(known)
        if gpu.get("memory_total_bytes") is not None
        and not gpu.get("mig_enabled")
        and abs(gpu["memory_total_bytes"] - entry.memory_total_bytes) > share * entry.memory_total_bytes
    ]
    if wrong:
        return fail(
            "gpu_memory",
            join(wrong),
            f"the memory of the product, within {share:.0%}",
            "ECC mode and inforom (nvidia-smi -q); a card that lost memory is replaced",
        )
    if strangers:
        return warn(
            "gpu_memory",
            f"GPUs that the catalogue does not know: {', '.join(strangers)}",
            "an entry to compare memory and links with",
            "add the product to src/metalserve/catalogue/gpus.yaml",
        )
    return ok("gpu_memory", f"{len(known)} GPUs with the memory of their product")


def _capability(known: Gpus) -> Row | None:
    wrong = [
        f"{gpu_label(gpu)} reports {gpu['compute_capability']}, a {entry.name} has {entry.compute_capability}"
        for gpu, entry in _entries(known)
        if gpu.get("compute_capability") not in (None, entry.compute_capability)
    ]
    if not wrong:
        return None
    return fail(
        "compute_capability", join(wrong), "that of the product", "look at the card: its PCI id and its chip disagree"
    )


def _ecc(known: Gpus) -> Row | None:
    return _switched_on(
        known,
        "ecc_enabled",
        "ecc",
        needed="on: without it a flipped bit changes answers",
        change="nvidia-smi --ecc-config=1, then reboot",
    )


def _switched_on(known: Gpus, field: str, name: str, *, needed: str, change: str) -> Row | None:
    """A switch that is off on a GPU that has it; null means that it has none (ECC on a GeForce)."""
    having = [gpu for gpu in known if gpu.get(field) is not None]
    if not having:
        return None
    off = [gpu_label(gpu) for gpu in having if not gpu[field]]
    if off:
        return fail(name, f"off on {join(off)}", needed, change)
    return ok(name, f"on on {len(having)} GPUs")


def _rows_remapped(known: Gpus) -> Row | None:
    having = [(gpu, gpu["remapped_rows"]) for gpu in known if gpu.get("remapped_rows")]
    if not having:
        return None
    failed = [gpu_label(gpu) for gpu, rows in having if rows.get("failure")]
    pending = [gpu_label(gpu) for gpu, rows in having if rows.get("pending")]
    if failed:
        return fail(
            "remapped_rows",
            f"a row could not be remapped on {join(failed)}",
            "no failure: the GPU has no spare rows left there",
            "the card qualifies for replacement; take it out of service",
        )
    if pending:
        return fail(
            "remapped_rows",
            f"a remapping waits for a reset on {join(pending)}",
            "none pending",
            "reset the GPU (nvidia-smi --gpu-reset, nothing may use it) or reboot",
        )
    return ok("remapped_rows", f"none pending or failed on {len(having)} GPUs")


def _sram(known: Gpus) -> Row | None:
    over = [
        f"{gpu_label(gpu)} ({gpu.get('sram_uncorrectable')} uncorrectable errors)"
        for gpu in known
        if gpu.get("sram_threshold_exceeded")
    ]
    if not over:
        return None
    return fail(
        "sram",
        f"over the threshold of on-chip memory errors: {join(over)}",
        "below it",
        "the card qualifies for replacement",
    )


def _recovery(known: Gpus) -> Row | None:
    asking = [gpu for gpu in known if gpu.get("recovery_action") is not None]
    if not asking:
        return None
    wanted = [
        f"{gpu_label(gpu)} asks for {gpu['recovery_action']}" for gpu in asking if gpu["recovery_action"] != "none"
    ]
    if wanted:
        return fail(
            "recovery_action", join(wanted), "none", "do what the driver asks for: reset the GPU or reboot the host"
        )
    return ok("recovery_action", f"none on {len(asking)} GPUs")


def _errors(facts: Facts) -> Row:
    """Xid and SXid of this boot; the worst one decides, and every one that matters is listed."""
    listed: list[tuple[ErrorMeaning, str]] = []
    for error in facts.get("xid_errors") or []:
        meaning = xid_meaning(error["code"])
        text = f"Xid {error['code']} ({meaning.name or error['message']}) {error['count']} x on {error['pci_address']}"
        listed.append((meaning, text))
    for error in facts.get("sxid_errors") or []:
        meaning = sxid_meaning(error["message"])
        listed.append((meaning, f"SXid {error['code']} ({error['message']}) on NVSwitch {error['pci_address']}"))
    unread = [error["error"] for error in facts.get("probe_errors") or [] if error.get("probe") == "kernel_log"]
    for severity, make in (("fail", fail), ("warn", warn)):
        matter = [(meaning, text) for meaning, text in listed if meaning.severity == severity]
        if matter:
            remedies = dict.fromkeys(meaning.remedy for meaning, _text in matter)
            return make("gpu_errors", join(text for _meaning, text in matter), "none since boot", join(remedies))
    if unread:
        return warn(
            "gpu_errors", f"the kernel's log could not be read: {unread[0]}", "the log of this boot", "run with become"
        )
    return ok(
        "gpu_errors", join(text for _meaning, text in listed) or "no Xid and no SXid since boot", "none that matters"
    )


def _width(known: Gpus) -> Row | None:
    having = [gpu for gpu in known if gpu.get("pcie_width") and gpu.get("pcie_max_width")]
    if not having:
        return None
    narrow = [
        f"{gpu_label(gpu)} runs x{gpu['pcie_width']} of x{gpu['pcie_max_width']}"
        for gpu in having
        if gpu["pcie_width"] < gpu["pcie_max_width"]
    ]
    if narrow:
        return fail(
            "pcie_width", join(narrow), "all lanes", "reseat the card, check riser and slot; a bent pin costs lanes"
        )
    return ok("pcie_width", f"all lanes on {len(having)} GPUs")


def _generation(known: Gpus) -> Row | None:
    """An idle GPU lowers its current generation, so the most that each link can do is compared among equal GPUs."""
    best: dict[str, int] = {}
    having = [gpu for gpu in known if gpu.get("pcie_max_generation")]
    for gpu in having:
        key = str(gpu.get("pci_id"))
        best[key] = max(best.get(key, 0), gpu["pcie_max_generation"])
    slow = [
        f"{gpu_label(gpu)} can do generation {gpu['pcie_max_generation']}, its equals {best[str(gpu.get('pci_id'))]}"
        for gpu in having
        if gpu["pcie_max_generation"] < best[str(gpu.get("pci_id"))]
    ]
    if not slow:
        return None
    return warn(
        "pcie_generation", join(slow), "the same on equal GPUs", "firmware settings of the slot, riser, retimer"
    )


def _nvlink(known: Gpus) -> Row | None:
    """Only boards with NVLink, and only where there is something to link."""
    having = [(gpu, entry) for gpu, entry in _entries(known) if entry.nvlink_links and not gpu.get("mig_enabled")]
    if len(known) < 2 or not having:
        return None
    silent = [gpu_label(gpu) for gpu, _entry in having if gpu.get("nvlink_active") is None]
    few = [
        f"{gpu_label(gpu)} has {gpu['nvlink_active']} of {entry.nvlink_links} links"
        for gpu, entry in having
        if gpu.get("nvlink_active") is not None and gpu["nvlink_active"] < entry.nvlink_links
    ]
    if few:
        return fail(
            "nvlink",
            join(few),
            "the links of the product up (src/metalserve/catalogue/gpus.yaml)",
            "look for Xid 74 and SXid, restart fabric manager on a drained host, reboot; then the baseboard",
        )
    if silent:
        return warn(
            "nvlink",
            f"links cannot be read on {join(silent)}",
            "the links of the product up",
            "in a virtual machine they may be hidden: measure with an all-reduce",
        )
    return ok("nvlink", f"{having[0][1].nvlink_links} links up on each of {len(having)} GPUs")


def _mig(known: Gpus, expected: Expected) -> Row | None:
    having = [gpu for gpu in known if gpu.get("mig_enabled") is not None]
    if not having:
        return None
    wrong = [gpu_label(gpu) for gpu in having if bool(gpu["mig_enabled"]) != expected.mig]
    word, other = ("on", "off") if expected.mig else ("off", "on")
    if wrong:
        return fail(
            "mig",
            f"{other} on {join(wrong)}",
            f"{word} (gpu_health_expected.mig)",
            f"nvidia-smi --multi-instance-gpu={int(expected.mig)}, reset the GPU, refresh the CDI specification",
        )
    return ok("mig", f"{word} on {len(having)} GPUs")


def _compute_mode(known: Gpus) -> Row | None:
    wrong = [
        f"{gpu_label(gpu)} is in mode {gpu['compute_mode']}"
        for gpu in known
        if gpu.get("compute_mode") not in (None, "default")
    ]
    if not wrong:
        return None
    return fail(
        "compute_mode",
        join(wrong),
        "default: an engine opens a GPU from several processes",
        "nvidia-smi --compute-mode=0",
    )


def _persistence(known: Gpus) -> Row | None:
    return _switched_on(
        known,
        "persistence",
        "persistence",
        needed="on: else the driver starts each GPU anew for each process",
        change="enable and start nvidia-persistenced.service",
    )


def _throttle(known: Gpus) -> Row | None:
    limits = data("health.yaml")
    for words, make in ((limits["throttle_fail"], fail), (limits["throttle_warn"], warn)):
        slowed = [
            f"{gpu_label(gpu)}: {', '.join(reasons)}"
            for gpu in known
            if (reasons := [reason for reason in gpu.get("throttle_reasons") or [] if reason in words])
        ]
        if slowed:
            return make(
                "throttle", join(slowed), "no GPU slowed down", "fans, air flow, power supplies and their cables"
            )
    return (
        ok("throttle", "no GPU slowed down") if any(gpu.get("throttle_reasons") is not None for gpu in known) else None
    )


def _processes(facts: Facts) -> Row:
    """Whoever holds a GPU and is neither an engine of ours nor a service of NVIDIA."""
    # The kernel keeps 15 characters of a process's name.
    own = {name[:15] for name in data("health.yaml")["own_processes"]}
    holders = (facts.get("driver") or {}).get("holders") or []
    foreign = [
        f"{holder['process']} (pid {holder['pid']})"
        for holder in holders
        if holder.get("deployment") is None and (holder.get("process") or "")[:15] not in own
    ]
    if foreign:
        return fail(
            "processes",
            f"GPUs are open in {join(foreign)}",
            "only engines of this inventory",
            "stop them; nothing is stopped for you",
        )
    engines = sorted({holder["deployment"] for holder in holders if holder.get("deployment")})
    return ok("processes", f"GPUs are open in {', '.join(engines)}" if engines else "no process has a GPU open")


def _topology(facts: Facts, known: Gpus, expected: Expected) -> Row | None:
    """GPUs that share a model must be near each other: by NVLink where the board has it."""
    links = facts.get("links")
    groups = [group for group in expected.gpu_groups if len(group) > 1]
    if not groups or not links:
        return None
    boards = {gpu["index"]: bool(entry.nvlink_links) for gpu, entry in _entries(known)}
    far: list[str] = []
    slow: list[str] = []
    for group in groups:
        for place, first in enumerate(group):
            for second in group[place + 1 :]:
                kind = links[first][second] if max(first, second) < len(links) else None
                if kind is None or kind.startswith("NV"):
                    continue
                if boards.get(first) and boards.get(second):
                    far.append(f"GPU {first} and GPU {second} by {kind}")
                elif kind == "SYS":
                    slow.append(f"GPU {first} and GPU {second} by {kind}")
    if far:
        return fail(
            "topology",
            join(far),
            "NVLink between all GPUs of a deployment",
            "fabric manager and the fabric's state, then reboot",
        )
    if slow:
        return warn(
            "topology",
            join(slow),
            "GPUs of a deployment on one NUMA node",
            "`gpus` of the deployment: take those of one node",
        )
    return ok("topology", f"{len(groups)} groups of GPUs are near each other")
