"""What the catalogue says about an engine: image, start command, routes, CUDA of the image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from metalserve.engines.versions import plain_version, version_key
from metalserve.errors import Refusal


@dataclass(frozen=True)
class EngineInfo:
    """One engine at one version.

    ``drain_seconds`` is the time given to running requests after SIGTERM (None: no limit of the engine's own).
    ``image_cuda`` is the CUDA of the image at that version. ``arguments`` holds the placeholders ``{config}`` and
    ``{model}``: paths in the container.
    """

    engine: str
    version: str
    repository: str
    image: str
    oldest_version: str
    entrypoint: tuple[str, ...]
    arguments: tuple[str, ...]
    default_port: int
    health_route: str
    ready_route: str
    metrics_route: str
    drain_seconds: int | None
    image_cuda: str
    sources: tuple[str, ...]


@cache
def _catalogue() -> Mapping[str, Any]:
    text = (resources.files("metalserve") / "catalogue" / "engines.yaml").read_text(encoding="utf-8")
    engines: Mapping[str, Any] = yaml.safe_load(text)["engines"]
    return engines


def engine_names() -> tuple[str, ...]:
    """The engines of the catalogue."""
    return tuple(_catalogue())


def engine_info(engine: str, version: str | None = None, image: str | None = None) -> EngineInfo:
    """Facts of an engine at a version; version and image default to the catalogue's pinned ones.

    Raises:
        Refusal: the engine is not in the catalogue, or the version is older than the oldest known one.

    """
    catalogue = _catalogue()
    if engine not in catalogue:
        raise Refusal(
            found=f"engine '{engine}'",
            needed=f"one of {', '.join(catalogue)}",
            change="set engine of the deployment",
        )
    entry = catalogue[engine]
    chosen = plain_version(version or entry["version"])
    if version_key(chosen) < version_key(entry["oldest_version"]):
        raise Refusal(
            found=f"{engine} {chosen}",
            needed=f"{engine} {entry['oldest_version']} or newer, the oldest release whose flags are known here",
            change="raise engine_version of the deployment, or leave it out for the catalogue's version",
        )
    built = [row for row in entry["images"] if version_key(row["first_version"]) <= version_key(chosen)][-1]
    return EngineInfo(
        engine=engine,
        version=chosen,
        repository=entry["repository"],
        image=image or f"{entry['repository']}:v{chosen}",
        oldest_version=entry["oldest_version"],
        entrypoint=tuple(entry["entrypoint"]),
        arguments=tuple(entry["arguments"]),
        default_port=entry["default_port"],
        health_route=entry["health_route"],
        ready_route=_ready_route(entry, chosen),
        metrics_route=entry["metrics_route"],
        drain_seconds=entry["drain_seconds"],
        image_cuda=built["cuda"],
        sources=tuple(entry["sources"]),
    )


def _ready_route(entry: Mapping[str, Any], version: str) -> str:
    """The readiness route; versions before the one that brought it are asked for their health."""
    before = entry.get("ready_route_before")
    old = before is not None and version_key(version) < version_key(before["version"])
    return str(before["route"] if before is not None and old else entry["ready_route"])


def engine_of(deployment: Mapping[str, Any]) -> EngineInfo:
    """Facts of the engine a deployment asks for, with its own version and image where it names them."""
    return engine_info(deployment["engine"], deployment.get("engine_version"), deployment.get("image"))
