"""Kernel modules that DKMS builds, and whether Secure Boot would accept them."""

from __future__ import annotations

import re
from typing import Any

from .host_probe import CommandMissingError, Host, ProbeError

# "nvidia/580.178.04, 6.1.0-32-amd64, x86_64: installed (remark)" of DKMS 3, with a comma for the slash of DKMS 2.
# A module that has not been built for any kernel has no kernel: "nvidia/580.178.04: added".
_STATUS = re.compile(
    r"^(nvidia[\w.-]*)(?:/|, )([^,:\s]+)(?:, ([^,:]+), [^,:]+)?: (installed|built|added)\b", re.MULTILINE
)
_FRAMEWORK = "/etc/dkms/framework.conf"
# Ubuntu signs with the key that its shim package made, Debian and EL with one that DKMS makes itself.
_CERTIFICATES = ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub")


def dkms(host: Host) -> list[dict[str, Any]]:
    """NVIDIA modules under DKMS: module with version, kernel (None before the first build), state."""
    try:
        answer = host.command("dkms", "status")
    except CommandMissingError:
        return []
    if answer.code != 0:
        raise ProbeError(f"dkms status: {answer.stderr.strip() or f'exit status {answer.code}'}")
    return [
        {"kernel": kernel or None, "module": f"{name}/{version}", "state": state}
        for name, version, kernel, state in _STATUS.findall(answer.stdout)
    ]


def mok_enrolled(host: Host) -> bool | None:
    """Whether the firmware trusts the key with which DKMS signs; None where this cannot be told.

    Without any key there is none that could be enrolled.
    """
    certificate = next(filter(host.files.exists, _certificates(host)), None)
    if certificate is None:
        return False
    try:
        answer = host.command("mokutil", "--test-key", host.files.path(certificate))
    except CommandMissingError:
        return None
    # The exit status has meant different things in different versions; the words have not.
    text = answer.stdout + answer.stderr
    if "already enrolled" in text:
        return True
    if "not enrolled" in text:
        return False
    # "EFI variables are not supported on this system" and the like
    return None


def _certificates(host: Host) -> list[str]:
    """Where DKMS keeps its certificate: its configuration comes first."""
    files = [_FRAMEWORK, *(f"{_FRAMEWORK}.d/{name}" for name in host.files.names(f"{_FRAMEWORK}.d"))]
    named = []
    for file in files:
        named += re.findall(r"^\s*mok_certificate=[\"']?([^\"'\s#]+)", host.files.read(file) or "", re.MULTILINE)
    return [*(path for path in reversed(named) if path.startswith("/")), *_CERTIFICATES]
