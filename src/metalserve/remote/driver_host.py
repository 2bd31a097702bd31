"""What the role nvidia_driver has to know of a host beside the facts: packages, units, modules in use, initramfs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .host_probe import CommandMissingError, Host, Probe, ProbeError, Run, Tree, run_command, run_probes

DEFAULT_LIMIT_SECONDS = 60.0

_PACKAGE = re.compile(r"nvidia|nvlsm|^libcuda|^cuda-drivers|^libnv|^linux-|^kernel")
_ENGINE_UNITS = ("vllm@*.service", "sglang@*.service")
# NVIDIA's .run file leaves its remover beside the tools; no package has one.
_RUNFILE = "/usr/bin/nvidia-uninstall"
_INITRAMFS = ("/boot/initrd.img-{}", "/boot/initramfs-{}.img")
_LOCK = re.compile(r"([^#!\s]\S*?)-\d+:")
_MODULE_FILE = re.compile(r"(?:^|/)nvidia(?:-current)?(?:-open)?\.ko")


def read_driver_host(
    root: str = "/",
    *,
    manager: str = "apt",
    newer_than: Sequence[str] = (),
    services: Sequence[str] = (),
    device_root: str | None = None,
    run: Run = run_command,
    limit_seconds: float = DEFAULT_LIMIT_SECONDS,
) -> dict[str, Any]:
    """Look at what belongs to the driver on a host. Changes nothing.

    Args:
        root: where the host's file system begins.
        manager: `apt` or `dnf`.
        newer_than: configuration files that an initramfs must not be older than.
        services: units that hold the driver.
        device_root: where /sys begins, on a host whose GPUs are simulated.
        run: how commands are run.
        limit_seconds: for each question; all are asked at the same time.

    Returns:
        `packages` (name, version, held), `interrupted` (the package manager was cut off), `runfile`, `engines` and
        `services` (active units), `modules` (name, users: modules on top of it, references: processes that use it),
        `initramfs_stale` (kernels), `next_kernel` (that the next boot takes, with its module's version and signer),
        `nvlink5`, and `errors`.

    """
    host = Host(Tree(root), Tree(device_root or root), run, limit_seconds)
    questions: dict[str, Callable[[], Any]] = {
        "packages": partial(installed_packages, host, manager),
        "interrupted": partial(_interrupted, host) if manager == "apt" else lambda: False,
        "runfile": lambda: host.files.exists(_RUNFILE),
        "engines": partial(_active, host, _ENGINE_UNITS),
        "services": partial(_active, host, [f"{name}.service" for name in services]),
        "modules": partial(_modules, host),
        "initramfs_stale": partial(_stale_initramfs, host, newer_than),
        "next_kernel": partial(_next_kernel, host),
        "nvlink5": partial(_nvlink5, host),
    }
    values, errors = run_probes([Probe(name, ask, limit_seconds) for name, ask in questions.items()])
    return {**values, "errors": errors}


def installed_packages(host: Host, manager: str) -> list[dict[str, Any]]:
    """The installed packages that have to do with the driver or the kernel: name, version, held."""
    return _debian_packages(host) if manager == "apt" else _rpm_packages(host)


def _debian_packages(host: Host) -> list[dict[str, Any]]:
    form = "${Package}\t${Version}\t${db:Status-Want}\t${db:Status-Status}\n"
    found = {}
    for line in host.command("dpkg-query", "--show", f"--showformat={form}").stdout.splitlines():
        name, version, want, status = line.split("\t")
        # Removed packages that left their configuration are listed, too.
        if _PACKAGE.search(name) and status == "installed":
            found[name] = {"name": name, "version": version, "held": want == "hold"}
    return [found[name] for name in sorted(found)]


def _rpm_packages(host: Host) -> list[dict[str, Any]]:
    locks = host.files.read("/etc/dnf/plugins/versionlock.list") or ""
    # Lines such as "nvidia-driver-cuda-3:580.178.04-1.el9.*".
    locked = {match[1] for match in map(_LOCK.match, locks.splitlines()) if match}
    found = {}
    form = "%{NAME}\t%{EPOCHNUM}:%{VERSION}-%{RELEASE}\n"
    for line in host.command("rpm", "--query", "--all", "--queryformat", form).stdout.splitlines():
        name, version = line.split("\t")
        if _PACKAGE.search(name):
            entry = {"name": name, "version": version, "held": name in locked}
            found[name] = entry
    return [found[name] for name in sorted(found)]


def _interrupted(host: Host) -> bool:
    """Whether dpkg was cut off in the middle of its work."""
    return bool(host.command("dpkg", "--audit").stdout.strip())


def _active(host: Host, units: Sequence[str]) -> list[str]:
    """Units of these names or patterns that run or are about to."""
    if not units:
        return []
    states = "--state=active,activating,reloading,deactivating"
    answer = host.command("systemctl", "list-units", "--plain", "--no-legend", "--full", states, *units)
    return sorted(line.split()[0] for line in answer.stdout.splitlines() if line.strip())


def _modules(host: Host) -> list[dict[str, Any]]:
    """Loaded modules of the driver and those on top of it."""
    found: dict[str, dict[str, Any]] = {}
    waiting = ["nvidia"]
    while waiting:
        name = waiting.pop()
        if name in found or not host.devices.exists(f"/sys/module/{name}"):
            continue
        users = host.devices.names(f"/sys/module/{name}/holders")
        count = host.devices.read(f"/sys/module/{name}/refcnt") or "0"
        # The count has the modules on top in it.
        references = max(0, int(count) - len(users)) if count.isdigit() else 0
        found[name] = {"name": name, "users": users, "references": references}
        waiting += users
    return [found[name] for name in sorted(found)]


def _kernels(host: Host) -> list[str]:
    return [name for name in host.files.names("/lib/modules") if host.files.exists(f"/lib/modules/{name}/modules.dep")]


def _module_of(host: Host, kernel: str) -> str | None:
    """The path of the driver's module under a kernel."""
    for line in (host.files.read(f"/lib/modules/{kernel}/modules.dep") or "").splitlines():
        path = line.partition(":")[0]
        if _MODULE_FILE.search(path):
            return f"/lib/modules/{kernel}/{path}"
    return None


def _age(host: Host, path: str) -> float | None:
    try:
        return os.stat(host.files.path(host.files.resolve(path))).st_mtime  # noqa: PTH116
    except OSError:
        return None


def _stale_initramfs(host: Host, newer_than: Sequence[str]) -> list[str]:
    """Kernels whose initramfs is older than the configuration, or carries an older module than the disk has.

    Level, not edge: a run that died between the file and the rebuild goes on from here.
    """
    stale = []
    for kernel in _kernels(host):
        image = next((path for path in (form.format(kernel) for form in _INITRAMFS) if host.files.exists(path)), None)
        built = _age(host, image) if image else None
        if image is None or built is None:
            continue
        written = max((age for age in (_age(host, path) for path in newer_than) if age is not None), default=None)
        module = _module_of(host, kernel)
        module_age = _age(host, module) if module else None
        if (written is not None and written > built) or (
            module_age is not None and module_age > built and _carries_module(host, image)
        ):
            stale.append(kernel)
    return stale


def _carries_module(host: Host, image: str) -> bool:
    for lister in ("lsinitramfs", "lsinitrd"):
        try:
            return bool(re.search(r"/nvidia(-current)?(-open)?\.ko", host.command(lister, image).stdout))
        except CommandMissingError:
            continue
    raise ProbeError("the initramfs cannot be listed: no lsinitramfs, no lsinitrd")


def _next_kernel(host: Host) -> dict[str, Any] | None:
    """The newest kernel, which the next boot takes, with the driver's module that it would load."""
    kernels = sorted(_kernels(host), key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    if not kernels:
        return None
    kernel = kernels[-1]
    found: dict[str, Any] = {"kernel": kernel, "version": None, "signer": None}
    module = _module_of(host, kernel)
    if module:
        text = host.command("modinfo", host.files.path(module)).stdout
        fields = dict(re.findall(r"^(version|signer):\s+(.+)$", text, re.MULTILINE))
        found.update(version=fields.get("version"), signer=fields.get("signer"))
    return found


def _nvlink5(host: Host) -> bool:
    """Whether ConnectX functions on this host manage NVLink switches, which say so in their vital product data."""
    return any(
        b"SW_MNG" in (host.devices.read_bytes(f"/sys/class/infiniband/{name}/device/vpd") or b"")
        for name in host.devices.names("/sys/class/infiniband")
    )
