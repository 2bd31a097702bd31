"""What the host runs on and which of NVIDIA's services it runs."""

from __future__ import annotations

import re
from typing import Any

from .host_probe import CommandMissingError, Host, ProbeError, Reading

SERVICES = ("nvidia-persistenced", "nvidia-fabricmanager", "nvidia-cdi-refresh", "nvidia-imex")
# https://www.freedesktop.org/software/systemd/man/latest/os-release.html: the first that exists counts.
_OS_RELEASE = ("/etc/os-release", "/usr/lib/os-release")


def operating_system(host: Host) -> dict[str, Any]:
    """The distribution: id, version_id, and like: the id itself before what it says it is like."""
    text = next(filter(None, map(host.files.read, _OS_RELEASE)), None)
    if text is None:
        raise ProbeError(f"{' and '.join(_OS_RELEASE)}: not readable")
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#"))
    fields = {name.strip(): value.strip().strip("\"'") for name, _sign, value in pairs}
    # The specification's own default.
    own = fields.get("ID", "linux")
    return {
        "id": own,
        "version_id": fields.get("VERSION_ID"),
        "like": [own, *(word for word in fields.get("ID_LIKE", "").split() if word != own)],
    }


def virtualization(host: Host) -> str | None:
    """What the host runs in, in the words of systemd-detect-virt: none on bare metal."""
    try:
        answer = host.command("systemd-detect-virt")
    except CommandMissingError:
        return None
    # It answers "none" with exit status 1.
    word = answer.stdout.strip()
    if not re.match(r"^[a-z0-9-]+$", word):
        raise ProbeError(f"systemd-detect-virt: {answer.stderr.strip() or 'no answer'}")
    return word


def systemd_version(host: Host) -> int | None:
    """The number of systemd's release, such as 257; None where there is none."""
    try:
        answer = host.command("systemctl", "--version")
    except CommandMissingError:
        return None
    found = re.match(r"^systemd (\d+)", answer.stdout)
    if not found:
        raise ProbeError(f"systemctl --version: {answer.stderr.strip() or 'no version'}")
    return int(found.group(1))


def services(host: Host) -> Reading:
    """State of NVIDIA's services: active, inactive, failed or missing; None where systemd does not answer."""
    unknown = dict.fromkeys(SERVICES)
    units = [f"{name}.service" for name in SERVICES]
    try:
        answer = host.command("systemctl", "show", "--property=Id,LoadState,ActiveState", *units)
    except CommandMissingError:
        return Reading(dict.fromkeys(SERVICES, "missing"))
    except ProbeError as error:
        return Reading(unknown, (str(error),))
    states: dict[str, str | None] = dict(unknown)
    for block in answer.stdout.strip().split("\n\n"):
        fields = dict(line.partition("=")[::2] for line in block.splitlines())
        name = fields.get("Id", "").removesuffix(".service")
        if name in states:
            states[name] = _state(fields)
    if None in states.values():
        return Reading(states, (f"systemctl show: {answer.stderr.strip() or 'a unit is missing in the answer'}",))
    return Reading(states)


def _state(fields: dict[str, str]) -> str:
    if fields.get("LoadState") == "not-found":
        return "missing"
    active = fields.get("ActiveState")
    if active in ("active", "reloading"):
        return "active"
    return "failed" if active == "failed" else "inactive"
