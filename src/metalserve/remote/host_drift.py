"""What a host has that differs from what it is to have. Reads only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, Protocol

from .driver_drift import drift
from .driver_host import installed_packages
from .files import read_json_object
from .host_probe import Host, ProbeError, Run, Tree, run_command
from .releases import active_release, deployment_names
from .rollout_host import HostError
from .weights import read_record

DRIVER_FILE = "etc/metalserve/driver.json"
_LIMIT_SECONDS = 60.0
_FILES_NAMED = 3


class Engines(Protocol):
    """The part of a host that tells of its engines."""

    def running_release(self, deployment: str) -> Any:
        """The release of the deployment's container, None without one."""

    def unit_state(self, unit: str) -> str:
        """`running`, `stopped` or `failing`."""

    def other_units(self, deployment: str, engine: str) -> list[str]:
        """Units of the deployment for engines other than `engine` that run or start at boot."""


def release_drift(root: Path, wanted: Mapping[str, Mapping[str, str]], engines: Engines) -> list[str]:
    """Deployments that are not at the release that they are to have.

    Args:
        root: where deployments keep their releases.
        wanted: `release_id` and `engine` of each deployment.
        engines: the host.
    """
    found = []
    for name, each in wanted.items():
        current = active_release(root, name)
        if current != each["release_id"]:
            found.append(f"{name} is at the release {current or 'none'}, planned is {each['release_id']}")
            continue
        try:
            running = engines.running_release(name)
        except HostError as error:
            found.append(str(error))
            continue
        if running != current:
            found.append(f"{name} runs the release {running or 'none'}, current is {current}")
    return found


def unit_drift(
    wanted: Mapping[str, Mapping[str, str]], engines: Engines, starts_at_boot: Callable[[str], bool]
) -> list[str]:
    """Units of the deployments that do not run, do not start at boot, or are left from another engine."""
    found = []
    for name, each in wanted.items():
        unit = f"{each['engine']}@{name}.service"
        state = engines.unit_state(unit)
        if state != "running":
            found.append(f"{unit} is {state}")
        if not starts_at_boot(unit):
            found.append(f"{unit} does not start at boot")
        others = engines.other_units(name, each["engine"])
        found += [f"{other} runs or starts at boot beside {unit}" for other in others]
    return found


def strays(root: Path, wanted: Mapping[str, Any], engines: Engines) -> list[str]:
    """Deployments that run or start at boot and that nobody wants."""
    found = []
    for name in deployment_names(root):
        units = engines.other_units(name, "") if name not in wanted else []
        if units:
            found.append(f"{name} is not in the inventory, and {', '.join(units)} runs or starts at boot")
    return found


def driver_drift(version: str, *, root: str = "/", run: Run = run_command) -> list[str]:
    """The driver, its packages and their holds against the wanted version and what the last run has left.

    Args:
        version: the driver's version.
        root: where the host's file system begins.
        run: how commands are run.
    """
    noted = read_json_object(Path(root, DRIVER_FILE))
    if not noted:
        return [f"/{DRIVER_FILE} is missing: no run of playbooks/prepare.yml has brought the driver here"]
    found = drift({**noted, "version": version}, root=root, run=run)
    host = Host(Tree(root), Tree(root), run, _LIMIT_SECONDS)
    try:
        held = {entry["name"]: entry["held"] for entry in installed_packages(host, noted["manager"])}
    except ProbeError as error:
        return [*found, str(error)]
    return found + [f"the package {name} is not held" for name in sorted(noted["packages"]) if held.get(name) is False]


def weights_drift(models_dir: Path, models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Revisions that are not published here, have no record of their hashes, or whose files differ from their manifest.

    What has the size and time of its last full hash is believed, as in a run of playbooks/stage.yml.

    Args:
        models_dir: where models live.
        models: `key`, `revision` and `files` (path, size_bytes, sha256) of each.
    """
    found = []
    for model in models:
        name = f"{model['key']} {model['revision']}"
        directory = models_dir / str(model["key"]) / str(model["revision"])
        if not directory.is_dir():
            found.append(f"{name} is not on the disk")
            continue
        known = read_record(directory).get("files") or {}
        if not known:
            found.append(f"{name} has no record of its hashes")
            continue
        files = {each["path"]: each for each in model["files"]}
        bad = [path for path, each in files.items() if not _as_recorded(directory, each, known.get(path, {}))]
        if bad:
            more = f" and {len(bad) - _FILES_NAMED} more" if len(bad) > _FILES_NAMED else ""
            found.append(f"{name} differs from its manifest in {', '.join(bad[:_FILES_NAMED])}{more}")
    return found


def _as_recorded(directory: Path, wanted: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    try:
        status = (directory / wanted["path"]).stat()
    except OSError:
        return False
    return bool(
        status.st_size == wanted["size_bytes"]
        and row.get("sha256") == wanted["sha256"]
        and row.get("mtime_ns") == status.st_mtime_ns
    )
