"""Which run of Ansible this is, so that others can tell whether it still lives."""

from __future__ import annotations

import getpass
import os
import socket
from pathlib import Path

_PROC = Path("/proc")


def this_run() -> dict[str, str]:
    """The run that this process belongs to.

    Returns:
        who (user and machine), process (number of the run's first process, or "unknown"), machine (what two processes
        have in common that see each other: the boot and the name space of process numbers; empty where neither can be
        read), and token, which no two runs share.
    """
    process = _first_process(os.getpid())
    machine = _machine()
    started = _started(process)
    return {
        "who": f"{_user()} on {socket.gethostname()}",
        "process": str(process),
        "machine": machine,
        "started": started,
        "token": f"{socket.gethostname()}-{machine}-{process}-{started}",
    }


def has_ended(holder: dict[str, str]) -> bool:
    """Whether a run that `this_run` described is known to be over: it was on this machine and its process is gone."""
    machine = _machine()
    if not machine or holder.get("machine") != machine or not str(holder.get("process", "")).isdigit():
        return False
    return _started(int(holder["process"])) != holder.get("started")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def _first_process(process: int) -> int:
    """Ansible's workers are forks: they have the command line of the run's first process."""
    command = _command(process)
    while command:
        parent = _parent(process)
        if parent <= 1 or _command(parent) != command:
            break
        process = parent
    return process


def _command(process: int) -> bytes:
    try:
        return (_PROC / str(process) / "cmdline").read_bytes()
    except OSError:
        return b""


def _fields(process: int) -> list[str]:
    """What stands behind the name in /proc/PID/stat: state, parent, ..."""
    try:
        return (_PROC / str(process) / "stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    except (OSError, UnicodeDecodeError):
        return []


def _parent(process: int) -> int:
    fields = _fields(process)
    return int(fields[1]) if len(fields) > 1 else 0


def _started(process: int) -> str:
    """When the process began, in clock ticks after the boot; empty when it is gone, or a zombie."""
    fields = _fields(process)
    return fields[19] if len(fields) > 19 and fields[0] != "Z" else ""


def _machine() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""
