"""Facts of the machine itself: kernel, processor, memory, disks, Secure Boot."""

from __future__ import annotations

import os
import platform
import re
from typing import Any

from .host_probe import Host, ProbeError

# What CPU engines and their operators ask for; the rest of the flags line is noise.
_INSTRUCTION_SET = re.compile(r"^(sse4_[12]|f16c|fma|bmi[12]|avx.*|amx_.*|asimd.*|sve.*|sme2?|bf16|i8mm|fphp)$")
# https://uefi.org/specs/UEFI/2.10/03_Boot_Manager.html: SecureBoot in the global variables' namespace.
_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


def kernel(host: Host) -> dict[str, Any]:
    """The running kernel's release, whether modules can be built for it, this boot's id and the architecture."""
    release = host.files.read("/proc/sys/kernel/osrelease") or os.uname().release
    return {
        "kernel": release,
        # The link is there on every host; it leads somewhere once the headers are installed.
        "kernel_headers": host.files.exists(f"/lib/modules/{release}/build/Makefile"),
        "boot_id": host.files.read("/proc/sys/kernel/random/boot_id"),
        "architecture": host.files.read("/proc/sys/kernel/arch") or platform.machine(),
    }


def cpu(host: Host) -> dict[str, Any]:
    """Model, sockets, cores, threads and the instruction sets that matter to inference."""
    text = host.files.read("/proc/cpuinfo")
    if not text:
        raise ProbeError("/proc/cpuinfo: not readable")
    processors = [_fields(block) for block in text.split("\n\n")]
    processors = [fields for fields in processors if "processor" in fields]
    first = processors[0] if processors else {}
    places = [_place(host, fields) for fields in processors]
    known = [place for place in places if None not in place]
    flags = first.get("flags", first.get("Features", "")).split()
    return {
        "model": first.get("model name") or _arm_model(first),
        # Arm kernels say nothing of sockets and cores in cpuinfo, and small guests may have no topology.
        "sockets": len({socket for socket, _core in known}) or 1,
        "cores": len(set(known)) or len(processors),
        "threads": len(processors),
        "instruction_sets": sorted(flag for flag in set(flags) if _INSTRUCTION_SET.match(flag)),
    }


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, _colon, value in pairs}


def _place(host: Host, fields: dict[str, str]) -> tuple[str | None, str | None]:
    """The socket and core a processor belongs to."""
    if "physical id" in fields and "core id" in fields:
        return fields["physical id"], fields["core id"]
    topology = f"/sys/devices/system/cpu/cpu{fields['processor']}/topology"
    return host.files.read(f"{topology}/physical_package_id"), host.files.read(f"{topology}/core_id")


def _arm_model(fields: dict[str, str]) -> str | None:
    if "CPU implementer" not in fields:
        return None
    return f"Arm implementer {fields['CPU implementer']} part {fields.get('CPU part', 'unknown')}"


def memory(host: Host) -> dict[str, Any]:
    """Memory of the machine and of each NUMA node, in bytes."""
    text = host.files.read("/proc/meminfo")
    if not text:
        raise ProbeError("/proc/meminfo: not readable")
    total_bytes = _kib_as_bytes(text, "MemTotal")
    nodes = []
    for name in host.files.names("/sys/devices/system/node"):
        if re.match(r"^node\d+$", name):
            of_node = host.files.read(f"/sys/devices/system/node/{name}/meminfo") or ""
            nodes.append({"node": int(name[4:]), "total_bytes": _kib_as_bytes(of_node, "MemTotal")})
    return {
        "total_bytes": total_bytes,
        "available_bytes": _kib_as_bytes(text, "MemAvailable"),
        "numa_nodes": sorted(nodes, key=lambda node: node["node"] or 0) or [{"node": 0, "total_bytes": total_bytes}],
    }


def _kib_as_bytes(meminfo: str, name: str) -> int | None:
    # A node's meminfo has "Node 0 " before the same lines.
    found = re.search(rf"(?:^|\s){name}:\s+(\d+) kB", meminfo)
    return int(found.group(1)) * 1024 if found else None


def disk(host: Host, path: str) -> dict[str, Any]:
    """The file system a path is or would be on: mount point, size and free space in bytes.

    The nearest parent that exists stands for a path that does not exist yet. Free is what programs may
    still write (f_bavail: without the blocks reserved for root).
    """
    existing = path
    while not host.files.exists(existing) and existing != "/":
        existing = os.path.dirname(existing)  # noqa: PTH120
    existing = host.files.resolve(existing)
    real = host.files.path(existing)
    state = os.statvfs(real)
    mount = existing
    device = os.stat(real).st_dev  # noqa: PTH116
    while mount != "/":
        parent = os.path.dirname(mount)  # noqa: PTH120
        if os.stat(host.files.path(parent)).st_dev != device:  # noqa: PTH116
            break
        mount = parent
    return {
        "path": path,
        "mount": mount,
        "total_bytes": state.f_blocks * state.f_frsize,
        "free_bytes": state.f_bavail * state.f_frsize,
    }


def secure_boot(host: Host) -> bool | None:
    """Whether Secure Boot is on; None where this cannot be seen (a container hides /sys/firmware)."""
    variable = host.files.read_bytes(_SECURE_BOOT)
    if variable:
        # efivarfs puts four bytes of attributes before the value.
        return variable[-1] == 1
    firmware = host.files.names("/sys/firmware")
    return None if not firmware or "efi" in firmware else False
