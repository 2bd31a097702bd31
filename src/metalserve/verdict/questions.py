"""What the facts of a host leave open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DOCKER, DRIVER = "docker", "driver"


def open_questions(facts: Mapping[str, Any] | None, *, driver_managed: bool) -> set[str]:
    """What a host has to be asked beyond its facts.

    Args:
        facts: the fact `gpu_host`; a host without facts is asked nothing.
        driver_managed: whether the driver is this project's matter.

    Returns:
        Of `docker` (one may have to be installed: which one do the package sources offer?) and `driver` (its module may
        have to be built or signed: do package sources and firmware allow it?).
    """
    if facts is None:
        return set()
    questions = set()
    if not (facts.get("docker") or {}).get("running"):
        questions.add(DOCKER)
    if driver_managed and facts.get("gpus") and (not facts.get("kernel_headers") or facts.get("secure_boot") is True):
        questions.add(DRIVER)
    return questions
