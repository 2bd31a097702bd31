"""What an engine's configuration reads from a model's catalogue entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def parsers_of(model: Mapping[str, Any], engine: str) -> tuple[str | None, str | None]:
    """Names of a model's tool-call parser and reasoning parser; None where the catalogue names none."""
    parsers = (model.get("parsers") or {}).get(engine) or {}
    return parsers.get("tool_call") or parsers.get("tool"), parsers.get("reasoning")


def text_only_supported(model: Mapping[str, Any]) -> bool:
    """True when the model has a vision part that can be left out.

    The entry may say so itself (``text_only_supported``); else the model's shape has a ``vision_config``.
    """
    said = model.get("text_only_supported")
    return bool(said) if said is not None else "vision_config" in (model.get("shape") or {})
