"""Which flags and variables belong to the deployment's own fields (``data/owned.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml


@cache
def _content() -> Mapping[str, Any]:
    path = resources.files("metalserve.engines") / "data" / "owned.yaml"
    content: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


@cache
def owned_flags() -> Mapping[str, str]:
    """Flag (main or short spelling, no dashes in front) -> the field to set instead."""
    return {flag: field for field, flags in _content()["fields"].items() for flag in flags}


@cache
def secret_flags() -> frozenset[str]:
    """Flags that carry a key or a password."""
    return frozenset(_content()["secrets"])


@cache
def text_flags() -> frozenset[str]:
    """Flags that write the text of requests into a log or a file."""
    return frozenset(_content()["texts"])


@cache
def owned_variables() -> Mapping[str, str]:
    """Environment variable -> the field to set instead."""
    variables: Mapping[str, str] = _content()["variables"]
    return variables
