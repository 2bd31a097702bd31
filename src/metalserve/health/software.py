"""Health of what runs beside the GPUs: driver versions, fabric manager, CDI specification, container toolkit, DCGM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metalserve.engines.versions import plain_version, version_key
from metalserve.health.types import Expected, Row, data, fail, gpu_label, join, ok, warn

Facts = Mapping[str, Any]


def check_software(facts: Facts, expected: Expected) -> list[Row]:
    """The rows of driver, fabric, toolkit and CDI."""
    rows = (_driver(facts, expected), _services(facts), _fabric(facts), _toolkit(facts), _cdi(facts))
    return [row for row in rows if row is not None]


def _driver(facts: Facts, expected: Expected) -> Row:
    driver = facts.get("driver") or {}
    loaded = driver.get("loaded")
    levels = {
        "loaded": loaded,
        "on disk": driver.get("on_disk"),
        "userland": driver.get("userland"),
        "wanted": expected.driver_version,
    }
    if facts.get("nvswitch_count"):
        levels["fabric manager"] = driver.get("fabric_manager")
    found = ", ".join(
        f"{level} {version or 'none'}" for level, version in levels.items() if level != "wanted" or version
    )
    if loaded is None:
        return fail(
            "driver",
            f"no NVIDIA driver is loaded (state {driver.get('state')}; {found})",
            f"version {expected.driver_version or 'of the userland'} loaded",
            "install the driver (role nvidia_driver), reload it or reboot",
        )
    other = [level for level, version in levels.items() if version not in (None, loaded)]
    missing = [level for level in ("userland", "fabric manager") if level in levels and levels[level] is None]
    if other or missing:
        return fail(
            "driver",
            found,
            "one version on all levels, to the last digit",
            "run playbooks/prepare.yml: reload or reboot follows",
        )
    if driver.get("state") not in (None, "ok"):
        return fail("driver", f"state {driver['state']} ({found})", "state ok", "reload the driver or reboot")
    if driver.get("on_disk") is None:
        return warn(
            "driver",
            f"{found}: the module of the running kernel is not on the disk",
            "the loaded version on the disk too, so that the next boot finds it",
            "install the module for the running kernel",
        )
    return ok("driver", found)


def _services(facts: Facts) -> Row | None:
    """Fabric manager where there are NVSwitches; persistenced is judged by what it does (persistence)."""
    services = facts.get("services") or {}
    state = services.get("nvidia-fabricmanager")
    if not facts.get("nvswitch_count") or state is None:
        return None
    found = f"nvidia-fabricmanager is {state}, {facts['nvswitch_count']} NVSwitches"
    if state != "active":
        return fail(
            "fabric_manager",
            found,
            "active: without it CUDA fails with 802",
            "systemctl status nvidia-fabricmanager; its version must be the driver's to the last digit",
        )
    return ok("fabric_manager", found)


def _fabric(facts: Facts) -> Row | None:
    """Hopper and newer tell the state of the fabric; the A100 does not, and is judged by the probe."""
    telling = [gpu for gpu in facts.get("gpus") or [] if gpu.get("fabric_state")]
    if not telling:
        return None
    waiting = [f"{gpu_label(gpu)} is {gpu['fabric_state']}" for gpu in telling if gpu["fabric_state"] != "completed"]
    if waiting:
        return fail(
            "fabric_state",
            join(waiting),
            "completed on every GPU",
            "wait some minutes after a start of fabric manager; if it stays, its journal says why",
        )
    return ok("fabric_state", f"completed on {len(telling)} GPUs")


def _toolkit(facts: Facts) -> Row:
    version = (facts.get("container_toolkit") or {}).get("version")
    floor = data("health.yaml")["toolkit_floor"]
    if version is None:
        return fail(
            "container_toolkit",
            "no NVIDIA container toolkit",
            f"{floor} or newer",
            "run playbooks/prepare.yml (role container_toolkit)",
        )
    if version_key(plain_version(version)) < version_key(floor):
        return fail(
            "container_toolkit",
            f"NVIDIA container toolkit {version}",
            f"{floor} or newer: older ones let a container take over its host (CVE-2025-23266)",
            "container_toolkit_version, then playbooks/prepare.yml",
        )
    return ok("container_toolkit", f"version {version}", f"{floor} or newer")


def _cdi(facts: Facts) -> Row | None:
    """One specification of the GPUs, and it names the driver that is loaded."""
    specs = [
        spec
        for spec in (facts.get("cdi") or {}).get("specs") or []
        if any(device.startswith("nvidia.com/gpu=") for device in spec["devices"])
    ]
    loaded = (facts.get("driver") or {}).get("loaded")
    refresh = "systemctl restart metalserve-cdi.service, or run playbooks/prepare.yml"
    if not specs:
        return fail("cdi", "no CDI specification of the GPUs", "one in /var/run/cdi or /etc/cdi", refresh)
    paths = ", ".join(spec["path"] for spec in specs)
    if len(specs) > 1:
        return fail(
            "cdi",
            f"{len(specs)} CDI specifications of the same GPUs: {paths}",
            "one: container engines refuse a device that two files describe",
            "remove the left-over one (container_toolkit_remove_other_specs)",
        )
    spec = specs[0]
    if spec["driver_version"] != loaded:
        return fail(
            "cdi",
            f"{spec['path']} is of driver {spec['driver_version']}",
            f"{loaded}, the loaded one: containers would get libraries that are gone",
            refresh,
        )
    if (facts.get("docker") or {}).get("cdi") is False:
        return fail(
            "cdi",
            "Docker does not resolve CDI devices",
            "features.cdi in /etc/docker/daemon.json, read by the daemon",
            "restart Docker",
        )
    return ok("cdi", f"{spec['path']} of driver {spec['driver_version']}, {len(spec['devices'])} devices")


def check_diag(result: Mapping[str, Any] | None) -> list[Row]:
    """The quick test of DCGM, where DCGM is installed: {status, output} of `dcgmi diag -r 1`."""
    if result is None:
        return []
    lines = [line.strip(" |") for line in str(result.get("output") or "").splitlines()]
    bad = [" ".join(line.split()) for line in lines if "Fail" in line]
    if result.get("status") or bad:
        said = join(bad) or f"exit status {result.get('status')}"
        return [
            fail(
                "dcgm",
                f"dcgmi diag -r 1: {said}",
                "Pass",
                "run `dcgmi diag -r 1 -v` on the host",
            )
        ]
    return [ok("dcgm", "dcgmi diag -r 1 passed")]
