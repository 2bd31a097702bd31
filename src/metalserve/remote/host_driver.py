"""The NVIDIA driver on every level: loaded, on disk, userland, fabric manager, and who holds the GPUs."""

from __future__ import annotations

import re
from typing import Any

from .host_probe import CommandMissingError, Host, ProbeError, Reading

_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)*")
# Debian names its builds of the module nvidia-current, nvidia-current-open or nvidia-tesla-535.
_MODULE_FILE = re.compile(r"/nvidia(-current|-tesla(-\d+)?)?(-open)?\.ko(\.\w+)?:")
_LIBRARY = "libnvidia-ml.so.1"
_LIBRARY_DIRECTORIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
)
_FABRIC_MANAGER = ("/usr/bin/nv-fabricmanager", "/usr/sbin/nv-fabricmanager")


def loaded_version(host: Host) -> str | None:
    """The version of the kernel module that is loaded now."""
    version = host.devices.read("/sys/module/nvidia/version")
    if version:
        return version
    found = _VERSION.search((host.devices.read("/proc/driver/nvidia/version") or "").partition("\n")[0])
    return found.group() if found else None


def _loaded_flavour(host: Host) -> str | None:
    text = host.devices.read("/proc/driver/nvidia/version")
    if not text:
        return None
    return "open" if "Open Kernel Module" in text else "proprietary"


def read_driver(host: Host) -> Reading:
    """Versions of the driver wherever one can be read."""
    errors: list[str] = []
    running = host.files.read("/proc/sys/kernel/osrelease") or ""
    kernels = [name for name in host.files.names("/lib/modules") if _modules_of(host, name)]
    newest = max(kernels, key=_order, default=None)
    on_disk = _on_disk(host, running, errors)
    other = None
    if newest and newest != running and _order(newest) > _order(running):
        other = {"kernel": newest, "version": _on_disk(host, newest, errors).get("version")}
    library = _library(host, errors)
    version = _VERSION.search(library.rsplit(".so.", 1)[-1]) if library else None
    return Reading(
        {
            "loaded": loaded_version(host),
            "flavour": _loaded_flavour(host) or _licence_flavour(on_disk.get("license")),
            "flavour_on_disk": _licence_flavour(on_disk.get("license")),
            "on_disk": on_disk.get("version"),
            "on_disk_newest_kernel": other,
            "signer": on_disk.get("signer"),
            # A driver older than the library's own naming would say just "1".
            "userland": version.group() if version else None,
            "fabric_manager": _fabric_manager(host, errors),
        },
        tuple(errors),
    )


def _order(kernel: str) -> tuple[tuple[int, ...], str]:
    return tuple(int(number) for number in re.findall(r"\d+", kernel)), kernel


def _modules_of(host: Host, kernel: str) -> bool:
    # A removed kernel can leave a directory with nothing but DKMS modules in it.
    return host.files.read_bytes(f"/lib/modules/{kernel}/modules.dep") is not None


def _on_disk(host: Host, kernel: str, errors: list[str]) -> dict[str, str]:
    """version, license and signer of the module that modprobe would load under a kernel; empty without one."""
    index = host.files.read(f"/lib/modules/{kernel}/modules.dep")
    if index is None:
        return {}
    for line in index.splitlines():
        if not _MODULE_FILE.search("/" + line):
            continue
        name = re.split(r"/|\.ko", line.partition(":")[0])[-2]
        try:
            answer = host.command("modinfo", "-k", kernel, name)
        except ProbeError as error:
            errors.append(str(error))
            return {}
        fields = dict(re.findall(r"^(version|license|signer):\s+(.+)$", answer.stdout, re.MULTILINE))
        if "version" not in fields:
            errors.append(f"modinfo -k {kernel} {name}: {answer.stderr.strip() or 'no version'}")
            return {}
        return fields
    return {}


def _licence_flavour(licence: str | None) -> str | None:
    if licence is None:
        return None
    return "open" if "GPL" in licence else "proprietary"


def _library(host: Host, errors: list[str]) -> str | None:
    """The real name of the NVML library that a program on this host would load."""
    places = []
    try:
        # Lines such as "libnvidia-ml.so.1 (libc6,x86-64) => /usr/lib/...", the first match is the one used.
        for line in host.command("ldconfig", "-p").stdout.splitlines():
            name, _arrow, path = line.strip().partition(" => ")
            if name.startswith(f"{_LIBRARY} (") and "64" in name:
                places.append(path)
    except CommandMissingError:
        pass
    except ProbeError as error:
        errors.append(str(error))
    places += [f"{directory}/{_LIBRARY}" for directory in _LIBRARY_DIRECTORIES]
    for place in places:
        if host.files.exists(place):
            return host.files.resolve(place)
    return None


def _fabric_manager(host: Host, errors: list[str]) -> str | None:
    for path in _FABRIC_MANAGER:
        if not host.files.exists(path):
            continue
        try:
            answer = host.command(path, "--version")
        except ProbeError as error:
            errors.append(str(error))
            return None
        found = _VERSION.search(answer.stdout + answer.stderr)
        if not found:
            errors.append(f"{path} --version: no version in the answer")
        return found.group() if found else None
    return None


def driver_state(driver: dict[str, Any], *, nouveau_bound: bool, nvml_mismatch: bool) -> str:
    """One word for the whole driver.

    none: no part of it is there. nouveau: nothing loaded, and nouveau holds a GPU. not_loaded: installed,
    not loaded. mismatch: the loaded module and the userland are of different versions (or there is no
    userland). ok: both are of one version; the module on disk may still be another one, waiting for a reload.
    """
    if driver["loaded"] is None:
        if nouveau_bound:
            return "nouveau"
        return "not_loaded" if driver["on_disk"] or driver["userland"] else "none"
    return "mismatch" if nvml_mismatch or driver["userland"] != driver["loaded"] else "ok"
