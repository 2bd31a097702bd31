"""Keeps the last result of the gate on the host, beside the release it speaks of."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import tempfile
from pathlib import Path

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


def read_record(path: str) -> dict[str, object]:
    """The stored record; empty when there is none or it cannot be read as one."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write_record(path: str, record: dict[str, object]) -> None:
    """Put a record at `path` in one step, mode 0644: a reader sees the old one or the new one.

    Raises:
        OSError: the folder is missing or cannot be written.

    """
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(record, stream, ensure_ascii=False, indent=2)
            stream.write("\n")
            stream.flush()
            os.fchmod(stream.fileno(), 0o644)
            os.fsync(stream.fileno())
        Path(temporary).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
