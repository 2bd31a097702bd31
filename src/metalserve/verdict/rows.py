"""From the health rows and the sentences of other parts to the checks of a verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from metalserve.errors import Refusal
from metalserve.health.software import check_software
from metalserve.health.types import FAIL, OK, Expected, Row
from metalserve.verdict.check import Check, ok, refused, warn

# A refusal ends where the next one begins with a capital letter, or at the end of the text.
_REFUSAL = re.compile(r"(.+?)\.\s+Needed:\s+(.+?)\.\s+Change:\s+(.+?)\.(?=\s+[A-Z0-9]|\s*$)", re.DOTALL)


def split_refusals(message: str) -> list[Refusal]:
    """The refusals in a text of one or several `X. Needed: Y. Change: Z.`; at least one."""
    parts = [
        Refusal(found=found.strip(), needed=needed, change=change)
        for found, needed, change in _REFUSAL.findall(message)
    ]
    return parts or [Refusal(found=message.strip() or "no reason given", needed="no refusal", change="see the message")]


def from_row(row: Row) -> Check:
    """A health row as a check: a failure is a refusal."""
    if row.state == OK:
        return ok(row.name, row.found)
    make = refused if row.state == FAIL else warn
    return make(row.name, found=row.found, needed=row.needed, change=row.change)


def driver_row(facts: Mapping[str, Any], expected: Expected) -> Check:
    """The health of the driver as a check."""
    return from_row(next(row for row in check_software(facts, expected) if row.name == "driver"))
