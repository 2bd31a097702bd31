"""What must be right on a host at the moment a release goes onto it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metalserve.engines.info import EngineInfo
from metalserve.health.software import check_software
from metalserve.health.types import Expected
from metalserve.verdict.check import require
from metalserve.verdict.cuda import image_check
from metalserve.verdict.driver import driver_now
from metalserve.verdict.rows import from_row


def require_software(facts: Mapping[str, Any]) -> None:
    """A driver that works and a container toolkit that hands GPUs to containers; simulated hosts have both.

    Raises:
        Refusal: one of them is missing, broken or too old.
    """
    require([driver_now(facts)])
    if "container_toolkit" in facts:
        require(from_row(row) for row in check_software(facts, Expected()) if row.name == "container_toolkit")


def require_image(
    facts: Mapping[str, Any],
    engine: EngineInfo,
    locked: Mapping[str, Any] | None,
    environment: Mapping[str, Any] | None,
) -> None:
    """An image that the loaded driver runs on these GPUs.

    Raises:
        Refusal: naming both.
    """
    loaded = (facts.get("driver") or {}).get("loaded")
    if loaded:
        require([image_check(facts["gpus"], loaded, engine, locked, environment)])
