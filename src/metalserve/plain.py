"""Plain types at the border to Ansible, whose values are tagged subclasses of str, int, dict and list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from metalserve.errors import Refusal

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def plain(value: Any) -> Any:
    """The plain value under a tagged one, all the way down.

    Raises:
        TypeError: a value that is neither a mapping, a sequence, an iterator, a text, a number, a boolean nor None.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, bool) or value is None:
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    # An iterator is what Jinja's map and select hand to the next filter.
    if isinstance(value, Sequence | Iterator):
        return [plain(item) for item in value]
    raise TypeError(f"cannot use a {type(value).__name__} here")


def truths(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a dataclass's fields, where booleans may have come as texts: from `-e` or from a survey.

    Raises:
        Refusal: a text that is neither yes nor no.
    """
    booleans = {entry.name for entry in fields(kind) if entry.type in ("bool", "bool | None")}
    return {
        name: _truth(name, value) if name in booleans and isinstance(value, str) else value
        for name, value in values.items()
    }


def _truth(name: str, text: str) -> bool:
    if text.lower() not in _WORDS:
        raise Refusal(found=f"{name} is {text!r}", needed="true or false", change=f"the variable that sets {name}")
    return _WORDS[text.lower()]
