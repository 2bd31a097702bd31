"""From the journal of an engine that did not start to a cause, a remedy and the line that says so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .failure_classes import FAILURE_CLASSES

LINE_CHARACTERS = 400


@dataclass(frozen=True)
class Failure:
    """A failure that was recognised; `line` is the first line of the journal that shows it."""

    name: str
    cause: str
    remedy: str
    line: str

    def sentence(self) -> str:
        """The failure for a message."""
        return f"Cause: {self.cause} ({self.name}). Remedy: {self.remedy}. Seen in: {self.line}"


def find_failures(lines: Iterable[str]) -> list[Failure]:
    """The failures in a journal, in the order of importance: what explains the others comes first.

    A line counts once, for the first class that knows it; a class shows its first line.
    """
    first: dict[str, str] = {}
    for line in lines:
        known = next((failure_class.name for failure_class in FAILURE_CLASSES if failure_class.knows(line)), None)
        if known is not None:
            first.setdefault(known, _short(line))
    return [
        Failure(each.name, each.cause, each.remedy, first[each.name]) for each in FAILURE_CLASSES if each.name in first
    ]


def _short(line: str) -> str:
    text = " ".join(line.split())
    return text if len(text) <= LINE_CHARACTERS else text[:LINE_CHARACTERS] + " ..."
