"""The container toolkit on a host: its packages, its CDI specification, the key that signs its repository."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from metalserve.errors import Refusal
from metalserve.openpgp import fingerprints

# Those of the role, all in one version.
PACKAGES = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
_GPU = "nvidia.com/gpu="
# A line of `dnf versionlock list`: NAME-EPOCH:VERSION-RELEASE.ARCH, where an asterisk may stand for the last part.
_LOCK = re.compile(r"^(?:\d+:)?(?P<name>.+?)-(?:\d+:)?[^-]+-[^-]+$")


def packages(lines: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Installed packages by name: {version, held}.

    Args:
        lines: `NAME VERSION STATUS WANT` each, as dpkg-query writes them with the role's format. Other lines (a
            package that is not there) are left out, and so is one that was removed but for its configuration.
    """
    found = {}
    for line in lines:
        words = line.split()
        if len(words) == 4 and words[2] == "installed":
            found[words[0]] = {"version": words[1], "held": words[3] == "hold"}
    return found


def locked(lines: Iterable[str]) -> list[str]:
    """Names of the packages that `dnf versionlock list` names."""
    found = []
    for line in lines:
        match = _LOCK.match(line.strip())
        if match:
            found.append(match["name"])
    return found


def gpu_specs(specs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The CDI specifications (host facts, `cdi.specs`) that describe whole GPUs."""
    return [dict(spec) for spec in specs if any(device.startswith(_GPU) for device in spec["devices"])]


def stale(specs: Sequence[Mapping[str, Any]], path: str, facts: Mapping[str, Any]) -> str:
    """What is wrong with the toolkit's own specification, as a sentence; empty where it fits.

    Args:
        specs: the specifications of the GPUs.
        path: where the toolkit's own is.
        facts: the host facts: the loaded driver, and the GPUs that it knows.
    """
    own = next((spec for spec in specs if spec["path"] == path), None)
    loaded = (facts.get("driver") or {}).get("loaded")
    if own is None:
        return f"there is no CDI specification {path}."
    if own["driver_version"] != loaded:
        return f"{path} is of driver {own['driver_version']}, loaded is {loaded}."
    known = [gpu for gpu in facts.get("gpus") or [] if gpu.get("source") != "pci" and not gpu.get("mig_enabled")]
    missing = [str(gpu["index"]) for gpu in known if f"{_GPU}{gpu['index']}" not in own["devices"]]
    if missing:
        return f"{path} does not describe GPU {', '.join(missing)}."
    return ""


def trusts(text: str, allowed: Sequence[str]) -> bool:
    """Whether the text is a file of keys, and each of them has one of the fingerprints.

    A further key beside the right one would be trusted by the package manager as well, so it is not accepted.
    """
    wanted = {"".join(one.split()).upper() for one in allowed}
    try:
        found = fingerprints(text)
    except Refusal:
        return False
    return bool(found) and set(found) <= wanted


def key_fingerprints(text: str) -> str:
    """The fingerprints in a file of keys for a message, or what is wrong with the file."""
    try:
        return "the fingerprints " + ", ".join(fingerprints(text))
    except Refusal as refusal:
        return f"no readable key ({refusal.found})"
