"""What only the controller knows and a host tells Prometheus: wanted releases, floors, the life of driver branches."""

from __future__ import annotations

import calendar
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

import yaml


def metrics_settings(
    releases: Sequence[Mapping[str, Any]],
    *,
    models_dir: str = "",
    gpu_count: int | None = None,
    certificates: Sequence[str] = (),
) -> dict[str, Any]:
    """The settings that `metalserve-host metrics` reads on a host (remote/host_metrics.py).

    Args:
        releases: what the inventory wants, as `serving_releases` returns them.
        models_dir: where the models live; empty on a host without any.
        gpu_count: GPUs that the host should have, where the inventory says so.
        certificates: files whose end is told.
    """
    return {
        "wanted": {release["deployment"]: release["release_id"] for release in releases},
        "models_dir": models_dir,
        "gpu_count": gpu_count,
        "certificates": list(certificates),
        "toolkit_floor": catalogue("health.yaml")["toolkit_floor"],
        # A branch that goes on without a known end is left out.
        "driver_branches": {
            str(branch): _last_day(entry["end"])
            for branch, entry in catalogue("drivers.yaml")["branches"].items()
            if entry["end"] or entry["ended"]
        },
    }


@lru_cache(maxsize=4)
def catalogue(name: str) -> Mapping[str, Any]:
    """A data file of the catalogue."""
    loaded: dict[str, Any] = yaml.safe_load(files("metalserve.catalogue").joinpath(name).read_text(encoding="utf-8"))
    return loaded


def _last_day(month: str | None) -> str | None:
    """2028-06 becomes 2028-06-30."""
    if month is None:
        return None
    year, number = map(int, month.split("-"))
    return f"{month}-{calendar.monthrange(year, number)[1]}"
