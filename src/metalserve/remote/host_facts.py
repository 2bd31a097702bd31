"""Everything metalserve needs to know of a host, as plain data (`gpu_host`, schema 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from . import (
    host_cdi,
    host_driver,
    host_modules,
    host_pci,
    host_platform,
    host_processes,
    host_smi,
    host_software,
    host_store,
    host_system,
)
from .host_nvml import NvmlMismatchError, NvmlMissingError, read_nvml
from .host_probe import Host, Probe, ProbeError, Reading, Run, Tree, run_command, run_in_tree, run_probes

SCHEMA = 1
DEFAULT_LIMIT_SECONDS = 10.0
# Without a persistence daemon the first NVML session initialises every GPU, which takes seconds for each.
DEFAULT_NVML_LIMIT_SECONDS = 30.0

_NO_GPU_VALUES: dict[str, Any] = {
    "index": None,
    "uuid": None,
    "pci_address": None,
    "pci_id": None,
    "name": None,
    "memory_total_bytes": None,
    "memory_reserved_bytes": None,
    "memory_usable_bytes": None,
    "memory_used_bytes": None,
    "compute_capability": None,
    "mig_enabled": None,
    "ecc_enabled": None,
    "remapped_rows": None,
    "nvlink_active": None,
    "numa_node": None,
    "pcie_width": None,
    "pcie_max_width": None,
    "pcie_generation": None,
    "pcie_max_generation": None,
    "persistence": None,
    "compute_mode": None,
    "throttle_reasons": [],
    "sram_uncorrectable": None,
    "sram_threshold_exceeded": None,
    "fabric_state": None,
    "recovery_action": None,
    "pci_driver": None,
    "source": "pci",
}


def collect(
    root: str = "/",
    disk_paths: Sequence[str] = ("/",),
    *,
    models_dir: str | None = None,
    releases_dir: str | None = None,
    device_root: str | None = None,
    nvml: Callable[[], Any] | None = None,
    run: Run | None = None,
    limit_seconds: float = DEFAULT_LIMIT_SECONDS,
    nvml_limit_seconds: float = DEFAULT_NVML_LIMIT_SECONDS,
) -> dict[str, Any]:
    """Look at the host and describe it. Changes nothing, needs no driver, never raises for what it finds.

    Args:
        root: where the host's file system begins.
        disk_paths: absolute paths whose file system is described; they need not exist yet.
        models_dir: where models live; what is there of them is told.
        releases_dir: where deployments keep their releases; which have some is told.
        device_root: where sysfs PCI, /sys/module and /proc/driver begin; default: the root. For a host whose
            GPUs are simulated.
        nvml: returns the module `pynvml`; without it, or without the NVML library, nvidia-smi is asked.
        run: runs a command within a number of seconds; default: the commands below the root.
        limit_seconds: limit of each probe; all run at the same time, so it also bounds the whole.
        nvml_limit_seconds: the limit of the probe that talks to the driver.

    Returns:
        The facts; sizes in bytes. What could not be read is None, and why is in `probe_errors`.

    """
    files, devices = Tree(root), Tree(device_root or root)
    if run is None:
        run = run_command if root == "/" else partial(run_in_tree, root)
    host = Host(files, devices, run, limit_seconds)
    patient = Host(files, devices, run, nvml_limit_seconds)
    questions: dict[str, Callable[[], Any]] = {
        "kernel": partial(host_system.kernel, host),
        "cpu": partial(host_system.cpu, host),
        "memory": partial(host_system.memory, host),
        "secure_boot": partial(host_system.secure_boot, host),
        "pci": partial(host_pci.read_pci, host),
        "driver": partial(host_driver.read_driver, host),
        "os": partial(host_platform.operating_system, host),
        "virtualization": partial(host_platform.virtualization, host),
        "systemd": partial(host_platform.systemd_version, host),
        "services": partial(host_platform.services, host),
        "dkms": partial(host_modules.dkms, host),
        "mok_enrolled": partial(host_modules.mok_enrolled, host),
        "cdi": partial(host_cdi.cdi, host),
        "kernel_log": partial(host_software.kernel_gpu_errors, host),
        "docker": partial(host_software.docker, host),
        "container_toolkit": partial(host_software.container_toolkit, host),
        "processes": partial(host_processes.read_processes, host),
        # One probe for each path: a network file system that hangs costs only its own answer.
        **{f"disk {path}": partial(host_system.disk, host, path) for path in disk_paths},
    }
    if models_dir is not None:
        questions["models"] = partial(host_store.models, host, models_dir)
    if releases_dir is not None:
        questions["deployments"] = partial(host_store.deployments, host, releases_dir)
    probes = [Probe(name, ask, limit_seconds) for name, ask in questions.items()]
    probes.append(Probe("nvml", partial(_ask_driver, patient, nvml), nvml_limit_seconds))
    values, errors = run_probes(probes)
    return _assemble(values, errors, disk_paths)


def _ask_driver(host: Host, nvml: Callable[[], Any] | None) -> Reading:
    """What the loaded driver says about its GPUs; nothing is asked while none is loaded."""
    if host_driver.loaded_version(host) is None:
        return Reading(None)
    errors: list[str] = []
    try:
        if nvml is None:
            raise NvmlMissingError("no NVML binding was given")
        facts = read_nvml(nvml())
    except NvmlMismatchError as error:
        return Reading({"mismatch": True}, (str(error),))
    except NvmlMissingError as missing:
        errors.append(f"{missing}; nvidia-smi was asked instead")
        try:
            facts = host_smi.read_smi(host)
        except ProbeError as error:
            return Reading({"mismatch": "mismatch" in str(error)}, (*errors, str(error)))
    return Reading({**facts, "mismatch": False}, (*errors, *facts["errors"]))


def _assemble(values: dict[str, Any], errors: list[dict[str, str]], disk_paths: Sequence[str]) -> dict[str, Any]:
    driver = values["driver"] or dict.fromkeys(
        (
            "loaded",
            "flavour",
            "flavour_on_disk",
            "on_disk",
            "on_disk_newest_kernel",
            "signer",
            "userland",
            "fabric_manager",
        )
    )
    nvml = values["nvml"] or {}
    pci = values["pci"] or {"gpus": [], "nvswitch_count": 0, "acs_redirect": [], "iommu": None}
    log = values["kernel_log"] or {"xid_errors": [], "sxid_errors": []}
    processes = values["processes"] or {"listening": [], "holders": []}
    nouveau_bound = any(gpu["pci_driver"] == "nouveau" for gpu in pci["gpus"])
    gpus, gpu_errors = _merge_gpus(nvml, pci["gpus"])
    if driver["userland"] is None and nvml.get("nvml_version"):
        # NVML's own version is that of its interface (13.) before that of the driver it belongs to.
        driver["userland"] = nvml["nvml_version"].partition(".")[2]
    if driver["userland"] is None and nvml.get("driver_version"):
        # nvidia-smi answered, so a library of the loaded version is there, under a name that tells nothing.
        driver["userland"] = nvml["driver_version"]
    state = host_driver.driver_state(driver, nouveau_bound=nouveau_bound, nvml_mismatch=bool(nvml.get("mismatch")))
    return {
        "schema": SCHEMA,
        **(values["kernel"] or dict.fromkeys(("kernel", "kernel_headers", "boot_id", "architecture"))),
        "os": values["os"] or {"id": None, "version_id": None, "like": []},
        "virtualization": values["virtualization"],
        "systemd": values["systemd"],
        "services": values["services"] or dict.fromkeys(host_platform.SERVICES),
        "cpu": values["cpu"],
        "memory": values["memory"],
        "disks": [disk for disk in (values[f"disk {path}"] for path in disk_paths) if disk],
        "secure_boot": values["secure_boot"],
        "mok_enrolled": values["mok_enrolled"],
        "nouveau_bound": nouveau_bound,
        "driver": {
            "state": state,
            **driver,
            "dkms": values["dkms"] or [],
            "cuda": nvml.get("cuda"),
            "holders": processes["holders"],
        },
        "nvswitch_count": pci["nvswitch_count"],
        "gpus": gpus,
        "links": nvml.get("links"),
        "acs_redirect": pci["acs_redirect"],
        "iommu": pci["iommu"],
        **log,
        "models": values.get("models") or [],
        "deployments": values.get("deployments") or [],
        "docker": values["docker"] or {"version": None, "api": None, "cdi": None, "running": False, "images": []},
        "container_toolkit": values["container_toolkit"] or {"version": None},
        "cdi": values["cdi"] or {"specs": []},
        "listening": processes["listening"],
        "probe_errors": errors + gpu_errors,
    }


def _merge_gpus(
    nvml: dict[str, Any], on_bus: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Join what the driver and the PCI bus say of each GPU, in the driver's order.

    A GPU that only the bus knows has no index of the driver. Where the driver said nothing at all, GPUs
    are numbered in the order of their PCI addresses, as the driver will number them.
    """
    by_address = {gpu["pci_address"]: gpu for gpu in on_bus}
    gpus = []
    errors = []
    for known in nvml.get("gpus") or []:
        bus = by_address.pop(known["pci_address"], {})
        filled = {key: value for key, value in known.items() if value is not None}
        gpus.append({**_NO_GPU_VALUES, **bus, **filled})
    answered = bool(nvml.get("gpus"))
    for place, bus in enumerate(by_address.values()):
        gpus.append({**_NO_GPU_VALUES, **bus, "index": None if answered else place})
        if answered or "cuda" in nvml:
            text = f"{bus['pci_address']} ({bus['pci_id']}) is on the PCI bus, but not known to the driver"
            if bus["pci_driver"] not in (None, "nvidia"):
                text += f": it is bound to {bus['pci_driver']}"
            errors.append({"probe": "gpus", "error": text})
    return gpus, errors
