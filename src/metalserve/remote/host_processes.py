"""Who listens on which TCP port, and who holds a GPU open."""

from __future__ import annotations

import ipaddress
import re
import sys
from typing import Any

from .host_probe import Host

_LISTEN = "0A"
_DEPLOYMENT = b"METALSERVE_DEPLOYMENT="
# nvidia0, nvidiactl, nvidia-uvm and the rest: any of them keeps the kernel module in use.
_GPU_DEVICE = re.compile(r"^/dev/nvidia")


def read_processes(host: Host) -> dict[str, Any]:
    """TCP listeners with their owners, and the processes that hold an NVIDIA device open.

    Owners of other users' sockets are visible to root only.
    """
    sockets: dict[str, list[int]] = {}
    holders = []
    for name in host.files.names("/proc"):
        if not name.isdigit():
            continue
        holds = False
        for number in host.files.names(f"/proc/{name}/fd"):
            target = host.files.link(f"/proc/{name}/fd/{number}") or ""
            if target.startswith("socket:["):
                sockets.setdefault(target[8:-1], []).append(int(name))
            elif _GPU_DEVICE.match(target):
                holds = True
        if holds:
            holders.append(_owner(host, int(name)))
    return {
        "listening": _listeners(host, sockets),
        "holders": sorted(holders, key=lambda owner: int(owner["pid"])),
    }


def _owner(host: Host, pid: int) -> dict[str, Any]:
    environment = host.files.read_bytes(f"/proc/{pid}/environ") or b""
    deployment = None
    for entry in environment.split(b"\0"):
        if entry.startswith(_DEPLOYMENT):
            deployment = entry[len(_DEPLOYMENT) :].decode("utf-8", "replace") or None
    return {"pid": pid, "process": host.files.read(f"/proc/{pid}/comm"), "deployment": deployment}


def _listeners(host: Host, sockets: dict[str, list[int]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (host.files.read(table) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10 or fields[3] != _LISTEN:
                continue
            address, _colon, port = fields[1].partition(":")
            # A socket that a parent handed to its children has several owners: the oldest is the parent.
            pids = sorted(sockets.get(fields[9], []))
            owner = _owner(host, pids[0]) if pids else {"pid": None, "process": None, "deployment": None}
            entry = {"address": decode_address(address), "port": int(port, 16), **owner}
            found[entry["address"], entry["port"], entry["pid"] or 0] = entry
    return [found[key] for key in sorted(found, key=lambda key: (key[1], key[0], key[2]))]


def decode_address(text: str) -> str:
    """An address of /proc/net/tcp or tcp6: words of 32 bits, each in the machine's byte order."""
    words = [bytes.fromhex(text[start : start + 8]) for start in range(0, len(text), 8)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    raw = b"".join(words)
    return str(ipaddress.IPv4Address(raw) if len(raw) == 4 else ipaddress.IPv6Address(raw))
