"""Facts of the software around the GPUs: Docker, the container toolkit, and the kernel's error reports."""

from __future__ import annotations

import json
import re
from typing import Any

from .host_pci import pci_address
from .host_probe import CommandMissingError, Host, Output, ProbeError, Reading

_XID = re.compile(r"\b(S?Xid) \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\): (\d+), ?(.*)$")
_PATTERN = r"S?Xid \("
_MESSAGE_CHARACTERS = 300


def docker(host: Host) -> Reading:
    """Version of the Docker engine, its API version, whether it answers, whether it resolves CDI devices, its images.

    The version is the daemon's. While the daemon does not answer it is the client's, which may differ.
    """
    absent: dict[str, Any] = {"version": None, "api": None, "cdi": None, "running": False, "images": []}
    try:
        answer = host.command("docker", "version", "--format", "{{json .}}")
    except CommandMissingError:
        return Reading(absent)
    try:
        versions = json.loads(answer.stdout)
        client, server = versions.get("Client") or {}, versions.get("Server") or {}
    except (ValueError, AttributeError):
        return Reading(absent, (f"docker version: {_first_line(answer)}",))
    if not server:
        return Reading(
            {**absent, "version": client.get("Version"), "api": client.get("ApiVersion")},
            (f"docker version: {answer.stderr.strip() or 'the daemon does not answer'}",),
        )
    facts = {**absent, "version": server["Version"], "api": server.get("ApiVersion"), "cdi": False, "running": True}
    # The daemon lists directories only while CDI is on. A client older than CDI does not know the field
    # and fails; an older daemon answers null: neither can do CDI.
    listed = host.command("docker", "info", "--format", "{{json .CDISpecDirs}}")
    if listed.code == 0:
        facts["cdi"] = listed.stdout.strip() not in ("", "null", "[]")
    try:
        kept = host.command("docker", "image", "ls", "--digests", "--format", "{{.Repository}}@{{.Digest}}")
    except ProbeError as error:
        return Reading(facts, (str(error),))
    # An image that was built or loaded here has no digest.
    facts["images"] = sorted({line for line in kept.stdout.split() if "@sha256:" in line})
    return Reading(facts)


def _first_line(answer: Output) -> str:
    text = answer.stderr.strip() or answer.stdout.strip()
    return text.splitlines()[0] if text else f"exit status {answer.code}"


def container_toolkit(host: Host) -> dict[str, Any]:
    """Version of the NVIDIA Container Toolkit, from its command line tool."""
    try:
        answer = host.command("nvidia-ctk", "--version")
    except CommandMissingError:
        return {"version": None}
    found = re.search(r"version (\d+\.\d+\.\d+\S*)", answer.stdout)
    if not found:
        raise ProbeError(f"nvidia-ctk --version: {_first_line(answer)}")
    return {"version": found.group(1)}


def kernel_gpu_errors(host: Host) -> dict[str, list[dict[str, Any]]]:
    """Xid (GPU) and SXid (NVSwitch) errors since boot."""
    return parse_kernel_gpu_errors(_kernel_log(host))


def _kernel_log(host: Host) -> str:
    """The kernel's messages of this boot, from the journal: the kernel's own buffer forgets.

    A journal that holds no kernel messages (no journald, no right to read it) looks like one without errors. So
    silence counts only if the journal has any message at all; else the kernel's buffer is read.
    """
    journal = ("journalctl", "-k", "-b", "-o", "cat", "--no-pager", "-q")
    try:
        answer = host.command(*journal, f"--grep={_PATTERN}", "--case-sensitive=yes")
        if answer.stdout.strip():
            return answer.stdout
        # A complaint comes from a journalctl that was built without patterns: then all messages are read.
        answer = host.command(*journal, *(() if answer.stderr.strip() else ("-n", "1")))
        if answer.stdout.strip():
            return answer.stdout
    except CommandMissingError:
        pass
    try:
        answer = host.command("dmesg")
    except CommandMissingError:
        raise ProbeError("the kernel's messages cannot be read: no journalctl, no dmesg") from None
    if answer.code != 0:
        raise ProbeError(_first_line(answer))
    return answer.stdout


def parse_kernel_gpu_errors(log: str) -> dict[str, list[dict[str, Any]]]:
    """Errors in the order of their first report, one entry per code and device, with the latest message.

    A broken application can cause thousands of equal Xids; they are counted, not listed.
    """
    found: dict[str, dict[tuple[int, str], dict[str, Any]]] = {"Xid": {}, "SXid": {}}
    for line in log.splitlines():
        match = _XID.search(line)
        if not match:
            continue
        kind, place, code, message = match.groups()
        address = pci_address(place) or place
        entry = found[kind].setdefault(
            (int(code), address), {"code": int(code), "pci_address": address, "message": "", "count": 0}
        )
        entry["message"] = message.strip()[:_MESSAGE_CHARACTERS]
        entry["count"] += 1
    return {"xid_errors": list(found["Xid"].values()), "sxid_errors": list(found["SXid"].values())}
