"""Small files on a host: read without fuss, replaced in one step."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Optional


def read_text(path: Path) -> Optional[str]:
    """The text of a file; None when there is none or it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty when there is none or it cannot be read as one."""
    try:
        value = json.loads(read_text(path) or "")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Put a text at `path` in one step: a reader sees the old file or the new one, also after a power cut.

    Raises:
        OSError: the folder is missing, full, or cannot be written.
    """
    write_bytes(path, text.encode("utf-8"), mode)


def write_bytes(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Put a content at `path`; as `write_text`.

    Raises:
        OSError: as for `write_text`.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def write_json(path: Path, value: object) -> None:
    """Put a value at `path` as indented JSON; as `write_text`.

    Raises:
        OSError: as for `write_text`.
        TypeError: the value is no JSON.
    """
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")
