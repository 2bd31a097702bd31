"""Keeps the last result of the gate on the host, beside the release it speaks of."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path

from .files import read_json_object, write_json
from .gate import GateResult

SCHEMA = 1


def outcome(record: object) -> dict[str, object]:
    """The part of a stored record that decides whether a new one differs: release, and each check's ok.

    Times and details change from run to run without meaning; they are left out.
    """
    rows = record.get("rows") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(rows, list):
        return {}
    return {
        "release": record.get("release"),
        "checks": {str(row.get("name")): row.get("ok") for row in rows if isinstance(row, dict)},
    }


def new_record(result: GateResult, release_id: str, when: datetime.datetime) -> dict[str, object]:
    """The record of a result. `when` is written in UTC."""
    utc = when.astimezone(datetime.timezone.utc)  # noqa: UP017 - datetime.UTC is newer than Python 3.9
    return {
        "schema": SCHEMA,
        "release": release_id,
        "when": utc.strftime("%Y-%m-%dT%H:%M:%SZ"),
        **result.as_dict(),
    }


def keep_record(
    path: Path, record: Mapping[str, object], *, dry_run: bool
) -> tuple[dict[str, object], dict[str, object]]:
    """Keep a record when its outcome is not the stored one; returns the outcome that was stored and the new one.

    Raises:
        OSError: the folder is missing or cannot be written.

    """
    before, after = outcome(read_json_object(path)), outcome(record)
    if before != after and not dry_run:
        write_json(path, record)
    return before, after
