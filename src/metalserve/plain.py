"""Plain types at the border to Ansible, whose values are tagged subclasses of str, int, dict and list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


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
