"""What metalserve knows on a host, as text for node exporter's textfile collector.

Releases, gates, plan against report, driver, GPUs, certificates: what no exporter of the field tells. Every metric of
`METRICS` is written by `render`, and what could not be read is left out rather than guessed.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Union

from .capacity import RECORD_NAME
from .files import read_json_object, write_text
from .readiness import Runner, run_command
from .release_list import list_releases
from .releases import link_target, release_directory

SETTINGS = Path("/etc/metalserve/metrics.json")
# Name -> what it says. All are gauges: they tell what is, not what has been counted.
METRICS = {
    "metalserve_release_info": "The current release of a deployment.",
    "metalserve_release_good": "Whether the current release is the last one whose gate has passed.",
    "metalserve_release_wanted_info": "The release that the inventory wanted when the monitoring was last set up.",
    "metalserve_release_refused_timestamp_seconds": "When a release was refused on this host.",
    "metalserve_gate_passed": "Whether the last gate of the current release has passed.",
    "metalserve_gate_timestamp_seconds": "When that gate ran.",
    "metalserve_capacity_planned": "KV capacity of the current release by its plan (measure: tokens, or blocks).",
    "metalserve_capacity_reported": "KV capacity as the running engine reported it at its start.",
    "metalserve_capacity_difference_percent": "Difference of the reported capacity, in per cent of the plan.",
    "metalserve_plan_gpu_memory_bytes": "Memory that the plan expects on each GPU of the deployment.",
    "metalserve_driver_info": "Versions of the NVIDIA driver by level.",
    "metalserve_driver_mismatch": "Whether the loaded module, the module on disk and the userland differ.",
    "metalserve_driver_drift": "Whether the last comparison with the wanted driver found a difference.",
    "metalserve_driver_end_of_life_timestamp_seconds": "When the loaded driver's branch gets its last fixes.",
    "metalserve_container_toolkit_info": "Version of the NVIDIA Container Toolkit.",
    "metalserve_container_toolkit_below_floor": "Whether the toolkit is older than the oldest safe one.",
    "metalserve_gpus": "Number of GPUs (source: pci, or driver).",
    "metalserve_gpus_expected": "Number of GPUs that the inventory expects.",
    "metalserve_gpu_info": "A GPU.",
    "metalserve_gpu_memory_total_bytes": "Memory of a GPU.",
    "metalserve_gpu_memory_used_bytes": "Memory of a GPU that is in use.",
    "metalserve_gpu_row_remap_pending": "Whether remapped rows wait for a reset of the GPU.",
    "metalserve_gpu_row_remap_failed": "Whether a row could not be remapped.",
    "metalserve_gpu_remapped_rows": "Rows that were remapped (kind: correctable, uncorrectable).",
    "metalserve_gpu_sram_threshold_exceeded": "Whether SRAM has more errors than NVIDIA's limit.",
    "metalserve_gpu_fabric_completed": "Whether the GPU has joined the NVLink fabric.",
    "metalserve_gpu_throttled": "A reason for which the GPU is slowed down now.",
    "metalserve_gpu_recovery_action": "What the driver asks for to bring the GPU back.",
    "metalserve_gpu_pcie_width": "PCIe lanes in use.",
    "metalserve_gpu_pcie_width_max": "PCIe lanes that GPU and slot could use.",
    "metalserve_gpu_nvlinks_active": "Active NVLinks.",
    "metalserve_xid_errors": "GPU errors (Xid) in the kernel's log since the boot.",
    "metalserve_sxid_errors": "NVSwitch errors (SXid) in the kernel's log since the boot.",
    "metalserve_models_disk_available_bytes": "Room left on the disk of the models.",
    "metalserve_models_disk_size_bytes": "Size of that disk.",
    "metalserve_certificate_expiry_timestamp_seconds": "Until when a certificate is valid.",
    "metalserve_probe_errors": "Questions about the host that got no answer.",
    "metalserve_collected_timestamp_seconds": "When this was collected.",
}
# A GPU's slowdown for these reasons is its ordinary life.
_QUIET_REASONS = ("gpu_idle", "applications_clocks_setting", "display_clocks_setting", "sync_boost")
# Of the fields of a capacity record, the one that is compared.
_MEASURES = {"kv_cache_tokens": "tokens", "num_blocks": "blocks"}
# name, labels, value
Sample = tuple[str, dict[str, str], Union[int, float]]


def samples(
    root: Path,
    facts: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    now: Optional[float] = None,
    run: Runner = run_command,
) -> list[Sample]:
    """All that is known of a host, one sample a row.

    Args:
        root: where deployments keep their releases.
        facts: the facts of `host_facts.collect`.
        settings: what only the controller knows, all optional: wanted (deployment -> release id), gpu_count,
            certificates (paths), toolkit_floor (a version), driver_branches (branch -> day of its end, or null when it
            has ended on an unknown day), drift (whether the unit of the driver's drift is there).
        now: seconds of the epoch; default: the clock.
        run: runs a command and returns its output.
    """
    rows = [*_releases(root, settings), *_driver(facts, settings, run), *_gpus(facts, settings), *_errors(facts)]
    disks = {disk["path"]: disk for disk in facts.get("disks") or []}
    disk = disks.get(str(settings.get("models_dir")))
    if disk:
        rows.append(("metalserve_models_disk_available_bytes", {"path": disk["path"]}, disk["free_bytes"]))
        rows.append(("metalserve_models_disk_size_bytes", {"path": disk["path"]}, disk["total_bytes"]))
    for path in settings.get("certificates") or []:
        end = _certificate_end(run(["openssl", "x509", "-noout", "-enddate", "-in", path]))
        if end is not None:
            rows.append(("metalserve_certificate_expiry_timestamp_seconds", {"path": path}, end))
    rows.append(("metalserve_probe_errors", {}, len(facts.get("probe_errors") or [])))
    rows.append(("metalserve_collected_timestamp_seconds", {}, round(time.time() if now is None else now)))
    return rows


def render(rows: Sequence[Sample]) -> str:
    """Samples in Prometheus' text format, grouped by name in the order of `METRICS`."""
    lines = []
    for name, meaning in METRICS.items():
        mine = [(labels, value) for each, labels, value in rows if each == name]
        if mine:
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} gauge"]
            lines += [f"{name}{_labels(labels)} {value}" for labels, value in mine]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    def quoted(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{quoted(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _releases(root: Path, settings: Mapping[str, Any]) -> list[Sample]:
    rows: list[Sample] = []
    for row in list_releases(root):
        where = {"deployment": row["deployment"], "release": row["release"]}
        if row["refused"]:
            labels = {**where, "stage": row["refused"]["stage"]}
            rows += _moment("metalserve_release_refused_timestamp_seconds", labels, row["refused"]["when"])
        if "current" not in row["links"]:
            continue
        about = {field: str(row[field]) for field in ("engine", "engine_version", "model", "port")}
        rows.append(("metalserve_release_info", {**where, **about}, 1))
        good = link_target(root, row["deployment"], "good") == row["release"]
        rows.append(("metalserve_release_good", where, int(good)))
        if row["gate"]:
            rows.append(("metalserve_gate_passed", where, int(row["gate"] == "passed")))
            rows += _moment("metalserve_gate_timestamp_seconds", where, row["judged_at"])
        rows += _capacity(release_directory(root, row["deployment"], row["release"]), where)
    for deployment, release in sorted((settings.get("wanted") or {}).items()):
        rows.append(("metalserve_release_wanted_info", {"deployment": deployment, "release": release}, 1))
    return rows


def _capacity(directory: Path, where: Mapping[str, str]) -> list[Sample]:
    record = read_json_object(directory / RECORD_NAME)
    plan = read_json_object(directory / "release.json").get("plan") or {}
    rows: list[Sample] = []
    values = (record.get("values") or {}).get(record.get("measure"))
    if values:
        labels = {**where, "measure": _MEASURES.get(record["measure"], str(record["measure"]))}
        rows.append(("metalserve_capacity_planned", labels, values["planned"]))
        rows.append(("metalserve_capacity_reported", labels, values["reported"]))
    if record.get("difference_percent") is not None:
        rows.append(("metalserve_capacity_difference_percent", dict(where), record["difference_percent"]))
    predicted = sum((plan.get("predicted_bytes") or {}).values())
    for gpu in plan.get("gpus_used") or []:
        rows.append(("metalserve_plan_gpu_memory_bytes", {**where, "gpu": str(gpu)}, predicted))
    return rows


def _driver(facts: Mapping[str, Any], settings: Mapping[str, Any], run: Runner) -> list[Sample]:
    rows: list[Sample] = []
    driver = facts.get("driver") or {}
    if driver.get("loaded") or driver.get("on_disk"):
        fields = ("loaded", "on_disk", "userland", "fabric_manager", "flavour", "state")
        rows.append(("metalserve_driver_info", {field: str(driver.get(field) or "") for field in fields}, 1))
        levels = {driver.get(level) for level in ("loaded", "on_disk", "userland")} - {None}
        rows.append(("metalserve_driver_mismatch", {}, int(len(levels) > 1 or driver.get("state") == "mismatch")))
    branches = settings.get("driver_branches") or {}
    branch = str(driver.get("loaded") or "").partition(".")[0]
    if branch in branches:
        name = "metalserve_driver_end_of_life_timestamp_seconds"
        # Ended on a day that nobody wrote down: long ago.
        rows += _moment(name, {"branch": branch}, branches[branch]) or [(name, {"branch": branch}, 0)]
    shown = run(
        ["systemctl", "show", "metalserve-driver-drift.service", "--property=LoadState,Result,ExecMainExitTimestamp"]
    )
    state = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    if state.get("LoadState") == "loaded" and state.get("ExecMainExitTimestamp"):
        rows.append(("metalserve_driver_drift", {}, int(state.get("Result") != "success")))
    toolkit = (facts.get("container_toolkit") or {}).get("version")
    if toolkit:
        rows.append(("metalserve_container_toolkit_info", {"version": toolkit}, 1))
        if settings.get("toolkit_floor"):
            below = _numbers(toolkit) < _numbers(settings["toolkit_floor"])
            rows.append(("metalserve_container_toolkit_below_floor", {}, int(below)))
    return rows


def _gpus(facts: Mapping[str, Any], settings: Mapping[str, Any]) -> list[Sample]:
    rows: list[Sample] = []
    gpus = facts.get("gpus") or []
    if gpus or settings.get("gpu_count"):
        rows.append(("metalserve_gpus", {"source": "pci"}, len(gpus)))
        rows.append(("metalserve_gpus", {"source": "driver"}, sum(gpu["source"] != "pci" for gpu in gpus)))
    if settings.get("gpu_count"):
        rows.append(("metalserve_gpus_expected", {}, settings["gpu_count"]))
    for gpu in gpus:
        where = {"gpu": str(gpu["pci_address"] if gpu["index"] is None else gpu["index"])}
        about = {field: str(gpu[field] or "") for field in ("uuid", "pci_address", "name")}
        rows.append(("metalserve_gpu_info", {**where, **about}, 1))
        remapped = gpu.get("remapped_rows") or {}
        values: dict[str, Any] = {
            "metalserve_gpu_memory_total_bytes": gpu.get("memory_total_bytes"),
            "metalserve_gpu_memory_used_bytes": gpu.get("memory_used_bytes"),
            "metalserve_gpu_row_remap_pending": remapped.get("pending"),
            "metalserve_gpu_row_remap_failed": remapped.get("failure"),
            "metalserve_gpu_sram_threshold_exceeded": gpu.get("sram_threshold_exceeded"),
            "metalserve_gpu_pcie_width": gpu.get("pcie_width"),
            "metalserve_gpu_pcie_width_max": gpu.get("pcie_max_width"),
            "metalserve_gpu_nvlinks_active": gpu.get("nvlink_active"),
        }
        if gpu.get("fabric_state") is not None:
            values["metalserve_gpu_fabric_completed"] = gpu["fabric_state"] == "completed"
        rows += [(name, where, int(value)) for name, value in values.items() if value is not None]
        for kind in ("correctable", "uncorrectable"):
            if remapped.get(kind) is not None:
                rows.append(("metalserve_gpu_remapped_rows", {**where, "kind": kind}, remapped[kind]))
        for reason in gpu.get("throttle_reasons") or []:
            if reason not in _QUIET_REASONS:
                rows.append(("metalserve_gpu_throttled", {**where, "reason": reason}, 1))
        if gpu.get("recovery_action"):
            action = {**where, "action": gpu["recovery_action"]}
            rows.append(("metalserve_gpu_recovery_action", action, int(gpu["recovery_action"] != "none")))
    return rows


def _errors(facts: Mapping[str, Any]) -> list[Sample]:
    return [
        (name, {"pci_address": str(error.get("pci_address") or ""), code: str(error["code"])}, error["count"])
        for name, key, code in (
            ("metalserve_xid_errors", "xid_errors", "xid"),
            ("metalserve_sxid_errors", "sxid_errors", "sxid"),
        )
        for error in facts.get(key) or []
    ]


def _moment(name: str, labels: Mapping[str, str], when: Optional[str]) -> list[Sample]:
    """A sample of a time such as 2027-01-02T01:04:05Z or 2027-01-02; none where it is not known."""
    try:
        moment = datetime.datetime.fromisoformat(str(when).replace("Z", "+00:00"))
    except ValueError:
        return []
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.timezone.utc)  # noqa: UP017 - datetime.UTC is newer than Python 3.9
    return [(name, dict(labels), round(moment.timestamp()))]


def _certificate_end(text: str) -> Optional[int]:
    """Seconds of the epoch in openssl's `notAfter=Nov 30 22:10:05 2027 GMT`."""
    try:
        moment = datetime.datetime.strptime(text.strip(), "notAfter=%b %d %H:%M:%S %Y GMT")
    except ValueError:
        return None
    return round(moment.replace(tzinfo=datetime.timezone.utc).timestamp())  # noqa: UP017


def _numbers(version: str) -> list[int]:
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return numbers


def write_metrics(root: Path, output: Path, settings_path: Path, collect: Callable[..., Mapping[str, Any]]) -> None:
    """Look at the host with `host_facts.collect` and put the text where node exporter reads it.

    Raises:
        OSError: the text cannot be written.
    """
    settings = read_json_object(settings_path)
    models_dir = settings.get("models_dir")
    facts = collect("/", [models_dir] if models_dir else [])
    write_text(output, render(samples(root, facts, settings)))
