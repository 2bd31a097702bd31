"""The manifest of a model's revision: path, size and SHA-256 of every file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .weights_hash import hash_files

RECORD_NAME = ".metalserve.json"
MANIFEST_NAME = "metalserve-manifest.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class WeightsError(Exception):
    """A sentence: what was found, what is needed, what to change."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a manifest: path relative to the model directory, size in bytes, SHA-256 in lower-case hex."""

    path: str
    size_bytes: int
    sha256: str


def parse_manifest(files: Sequence[Mapping[str, Any]]) -> tuple[FileEntry, ...]:
    """Check a manifest's file list and return it as entries.

    Raises:
        WeightsError: for an empty list, a path that leaves the directory, or a malformed size or hash.
    """
    if not files:
        raise WeightsError(
            "The manifest lists no files. Needed: path, size_bytes and sha256 of every file. "
            "Change: run playbooks/ops/lock.yml for this model."
        )
    entries = []
    for item in files:
        if not isinstance(item, Mapping):
            raise WeightsError(f"The manifest has the entry {item!r}. Needed: path, size_bytes and sha256 of a file.")
        path, size, digest = str(item.get("path", "")), item.get("size_bytes"), str(item.get("sha256", ""))
        parts = Path(path).parts
        plain = path == Path(path).as_posix() and path.isprintable()
        if not parts or not plain or path.startswith("/") or ".." in parts or parts[0] == RECORD_NAME:
            raise WeightsError(f"The manifest names the file {path!r}. Needed: a path inside the model's directory.")
        if isinstance(size, bool) or not isinstance(size, int) or size < 0 or not _SHA256.fullmatch(digest):
            raise WeightsError(
                f"The manifest's entry for {path} has size {size!r} and hash {digest!r}. "
                "Needed: a whole number of bytes and 64 hex digits of SHA-256."
            )
        entries.append(FileEntry(path, int(size), digest))
    if len({entry.path for entry in entries}) != len(entries):
        raise WeightsError("The manifest lists a path twice. Needed: each file once.")
    return tuple(entries)


def manifest_sha256(files: Sequence[Mapping[str, Any]]) -> str:
    """The SHA-256 of a manifest's canonical form: one line `<sha256>  <size>  <path>` a file, sorted by path."""
    lines = sorted((e.path, f"{e.sha256}  {e.size_bytes}  {e.path}\n") for e in parse_manifest(files))
    return hashlib.sha256("".join(line for _, line in lines).encode()).hexdigest()


def make_manifest(directory: Path) -> list[dict[str, Any]]:
    """Hash every file below a directory, except hidden ones and a manifest already there.

    Raises:
        WeightsError: when the directory holds no file.
    """
    found = []
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        name = path.relative_to(directory).as_posix()
        if name != MANIFEST_NAME and not any(part.startswith(".") for part in Path(name).parts):
            found.append(path)
    if not found:
        raise WeightsError(f"{directory} holds no files. Needed: the directory of a model.")
    digests = hash_files(found)
    return [
        {"path": path.relative_to(directory).as_posix(), "size_bytes": path.stat().st_size, "sha256": digests[path]}
        for path in found
    ]
