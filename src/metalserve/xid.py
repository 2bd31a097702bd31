"""What the GPU errors in the kernel's log mean for serving (catalogue/xid.yaml)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import yaml


@dataclass(frozen=True)
class ErrorMeaning:
    """One Xid or SXid.

    Attributes:
        kind: the class of catalogue/xid.yaml, such as `reset`.
        severity: `fail`, `warn` or `ok`.
        name: what NVIDIA calls the error; empty where the catalogue does not know it.
        remedy: what to do about it.
    """

    kind: str
    severity: str
    name: str
    remedy: str


def xid_meaning(code: int) -> ErrorMeaning:
    """The meaning of a GPU's Xid; a code that no source lists is a warning."""
    data = _catalogue()
    kind, name = data["codes"].get(code, (data["default"], ""))
    return _meaning(kind, name)


def sxid_meaning(message: str) -> ErrorMeaning:
    """The meaning of an NVSwitch's SXid, from the severity that the driver writes before its text."""
    rules = _catalogue()["sxid"]
    text = message.strip().lower()
    kind = next((kind for start, kind in rules["messages"] if text.startswith(start)), rules["default"])
    return _meaning(kind, message.strip())


def _meaning(kind: str, name: str) -> ErrorMeaning:
    entry = _catalogue()["classes"][kind]
    return ErrorMeaning(kind, entry["severity"], name, entry["remedy"])


@lru_cache(maxsize=1)
def _catalogue() -> Mapping[str, Any]:
    text = files("metalserve.catalogue").joinpath("xid.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded
