"""Small text files of a host, all in one visit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from .files import read_text, write_text

_DIRECTORY_MODE = 0o755


@dataclass(frozen=True)
class Change:
    """A file that was not as it should be; `before` is None where there was none that could be read."""

    path: str
    before: Optional[str]
    after: str


def put_files(files: Mapping[str, str], *, mode: int = 0o644, check_mode: bool = False) -> list[Change]:
    """Write the files that differ, with the directories above them; each in one step.

    Args:
        files: path -> text.
        mode: of each file.
        check_mode: tell what would be written, and write nothing.

    Raises:
        OSError: a directory or file cannot be written; those before it in `files` are.

    """
    changes = []
    for name, text in files.items():
        path = Path(name)
        before = read_text(path)
        if before == text and path.stat().st_mode & 0o7777 == mode:
            continue
        changes.append(Change(name, before, text))
        if not check_mode:
            _make_directory(path.parent)
            write_text(path, text, mode)
    return changes


def _make_directory(path: Path) -> None:
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir()
    # Whatever the umask says.
    path.chmod(_DIRECTORY_MODE)
