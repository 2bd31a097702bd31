"""Compare the driver of this host with what the last run left, and say what differs. Run by a systemd timer."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .driver_host import installed_packages
from .host_driver import loaded_version, read_driver
from .host_probe import Host, Run, Tree, run_command

_LIMIT_SECONDS = 60.0


def drift(expected: Mapping[str, Any], *, root: str = "/", run: Run = run_command) -> list[str]:
    """What differs from what is expected, each a phrase.

    Args:
        expected: `version`, `fabric_manager` (whether one is needed), `manager`, `packages` (name -> version).
        root: where the host's file system begins.
        run: how commands are run.

    """
    host = Host(Tree(root), Tree(root), run, _LIMIT_SECONDS)
    reading = read_driver(host).value
    levels = {
        "the loaded module": loaded_version(host),
        "the module on disk": reading["on_disk"],
        "the userland": reading["userland"],
    }
    following = reading["on_disk_newest_kernel"]
    if following:
        levels[f"the module of {following['kernel']}, which the next boot takes,"] = following["version"]
    if expected["fabric_manager"]:
        levels["the fabric manager"] = reading["fabric_manager"]
    wanted = expected["version"]
    found = [
        f"{level} is {version or 'missing'}, not {wanted}" for level, version in levels.items() if version != wanted
    ]
    installed = {entry["name"]: entry["version"] for entry in installed_packages(host, expected["manager"])}
    for name, version in sorted(expected["packages"].items()):
        if installed.get(name) != version:
            found.append(f"the package {name} is {installed.get(name, 'missing')}, not {version}")
    return found


def main() -> int:
    """Print the differences; the exit status is 1 where there are any."""
    expected = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = drift(expected)
    for line in found:
        print(f"driver drift: {line}", file=sys.stderr)  # noqa: T201 - the journal reads it
    if found:
        print("Run playbooks/prepare.yml to bring it back.", file=sys.stderr)  # noqa: T201
    return 1 if found else 0
