"""CDI specifications of NVIDIA devices, as `nvidia-ctk cdi generate` writes them."""

from __future__ import annotations

import json
import re

from .host_probe import Host, Reading

# The directories that container engines read, https://github.com/cncf-tags/container-device-interface (pkg/cdi).
# /var/run is a link to /run on every supported system.
_DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
# Every specification mounts these libraries, and their file names end in the driver's version.
_DRIVER = re.compile(r"lib(?:cuda|nvidia-ml)\.so\.(\d+\.\d+(?:\.\d+)*)")


def cdi(host: Host) -> Reading:
    """The specifications of NVIDIA devices: path, driver_version (None where it names none), devices."""
    specs = []
    errors = []
    for directory in _DIRECTORIES:
        for name in host.files.names(host.files.resolve(directory)):
            if not name.endswith((".yaml", ".yml", ".json")):
                continue
            path = f"{directory}/{name}"
            text = host.files.read(host.files.resolve(path))
            if text is None:
                errors.append(f"{path}: not readable")
                continue
            kind, devices = _from_json(text) if text.startswith("{") else _from_yaml(text)
            if not kind.startswith("nvidia.com/"):
                continue
            version = _DRIVER.search(text)
            specs.append(
                {
                    "path": path,
                    "driver_version": version.group(1) if version else None,
                    "devices": [f"{kind}={device}" for device in devices],
                }
            )
    return Reading({"specs": specs}, tuple(errors))


def _from_json(text: str) -> tuple[str, list[str]]:
    try:
        spec = json.loads(text)
        return str(spec["kind"]), [str(device["name"]) for device in spec["devices"]]
    except (ValueError, KeyError, TypeError):
        return "", []


def _from_yaml(text: str) -> tuple[str, list[str]]:
    """Kind and device names out of block-style YAML, which is what every writer of these files writes.

    Python has no YAML reader of its own, and nothing is installed on the hosts for this.
    """
    kind = ""
    devices: list[str] = []
    inside = False
    item = ""
    for line in text.splitlines():
        stripped = line.strip()
        if line[:1] not in ("", " ", "-", "#"):
            inside = stripped == "devices:"
            item = ""
            if line.startswith("kind:"):
                kind = _scalar(line.partition(":")[2])
            continue
        if not inside:
            continue
        dashed = re.match(r"^( *)- ", line)
        if dashed and (not item or len(dashed.group(1)) < len(item)):
            # The first dash tells how deep an entry of the list stands; its keys stand two further.
            item = dashed.group(1) + "  "
        found = re.match(r"^( *(?:- )?)name:(.*)$", line)
        if found and len(found.group(1)) == len(item):
            devices.append(_scalar(found.group(2)))
    return kind, devices


def _scalar(text: str) -> str:
    return text.strip().strip("\"'")
