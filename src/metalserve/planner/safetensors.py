"""Bytes of a checkpoint from the headers of its safetensors files, without reading a weight."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from metalserve.errors import Refusal

# A header is a few MiB even for thousands of tensors; more is a damaged file.
_LARGEST_HEADER_BYTES = 200 * 1024 * 1024


@dataclass(frozen=True)
class StoredBytes:
    """Stored bytes by part of the model."""

    text: int
    vision: int
    draft: int


def stored_bytes(directory: Path) -> StoredBytes | None:
    """Sum the tensors of all safetensors files of a directory; None when there are none.

    Format: 8 bytes length (little endian), then JSON with the offsets of every tensor
    (github.com/huggingface/safetensors, README).

    Raises:
        Refusal: a header cannot be read.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return None
    parts = {"text": 0, "vision": 0, "draft": 0}
    for file in files:
        for name, begin, end in _tensors(file):
            parts[_part(name)] += end - begin
    return StoredBytes(**parts)


@dataclass(frozen=True)
class Index:
    """What `model.safetensors.index.json` says: bytes of all tensors, which parts there are, and the files."""

    total_bytes: int
    parts: frozenset[str]
    files: frozenset[str]


def read_index(directory: Path) -> Index | None:
    """The index of a checkpoint in several files; None without one, or without a total size.

    Raises:
        Refusal: the index cannot be read.
    """
    file = directory / "model.safetensors.index.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        names = {str(name): str(place) for name, place in content["weight_map"].items()}
        total = int((content.get("metadata") or {}).get("total_size") or 0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(
            found=f"{file} cannot be read ({error!r})",
            needed="the index of the checkpoint: weight_map and metadata",
            change="fetch the checkpoint again",
        ) from error
    if not total:
        return None
    return Index(total, frozenset(map(_part, names)), frozenset(names.values()))


def _part(name: str) -> str:
    if name.startswith("mtp.") or ".mtp." in name:
        return "draft"
    return "vision" if "visual." in name or "vision_tower." in name else "text"


def _tensors(file: Path) -> list[tuple[str, int, int]]:
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if not 2 <= size <= _LARGEST_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(stream.read(size))
        return [
            (name, int(entry["data_offsets"][0]), int(entry["data_offsets"][1]))
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise Refusal(
            found=f"{file} has no readable header ({error})",
            needed="complete safetensors files",
            change="fetch the checkpoint again",
        ) from error
