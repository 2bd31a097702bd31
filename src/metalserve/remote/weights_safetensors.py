"""Headers of safetensors files: every tensor's type, shape and place, and whether the file is as long as they say.

Format: 8 bytes length of the header (little endian), the header as JSON, then the tensors without a gap
(github.com/huggingface/safetensors, README).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .weights_manifest import WeightsError

INDEX_NAME = "model.safetensors.index.json"
# A header is a few MiB even for thousands of tensors; the format's own reader refuses more than 100 MB.
_LARGEST_HEADER_BYTES = 100_000_000
_BITS = {
    **dict.fromkeys(["F4"], 4),
    **dict.fromkeys(["F6_E2M3", "F6_E3M2"], 6),
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["U16", "I16", "F16", "BF16"], 16),
    **dict.fromkeys(["U32", "I32", "F32"], 32),
    **dict.fromkeys(["U64", "I64", "F64", "C64"], 64),
}
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class Tensor:
    """Type and shape of one tensor, as the header says."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, by name.

    Raises:
        WeightsError: the header cannot be read, a tensor has another size than its shape, or the file another length.
    """
    file_bytes = path.stat().st_size
    try:
        with path.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if not 2 <= header_bytes <= min(_LARGEST_HEADER_BYTES, file_bytes - 8):
                raise ValueError(f"it says that its header has {header_bytes} bytes, the file has {file_bytes}")
            header = json.loads(stream.read(header_bytes))
        places = [
            (int(item["data_offsets"][0]), int(item["data_offsets"][1]), name, _tensor(item))
            for name, item in header.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _damaged(path, f"its header cannot be read: {error}") from error
    position = 0
    for begin, end, name, tensor in sorted(places, key=lambda place: place[:2]):
        if begin != position or end < begin:
            raise _damaged(path, f"the tensor {name} lies at {begin} to {end}, the one before it ends at {position}")
        bits = _BITS.get(tensor.dtype)
        needed = None if bits is None else (math.prod(tensor.shape) * bits + 7) // 8
        if needed is not None and end - begin != needed:
            raise _damaged(
                path, f"the tensor {name} has {end - begin} bytes, {tensor.dtype} {list(tensor.shape)} needs {needed}"
            )
        position = end
    if 8 + header_bytes + position != file_bytes:
        raise _damaged(path, f"its tensors end at {8 + header_bytes + position}, the file has {file_bytes} bytes")
    return {name: tensor for _, _, name, tensor in places}


def _tensor(item: Mapping[str, Any]) -> Tensor:
    return Tensor(str(item["dtype"]), tuple(int(size) for size in item["shape"]))


def _damaged(path: Path, found: str) -> WeightsError:
    return WeightsError(
        f"{path.name} is no whole safetensors file: {found}. Needed: the file as its maker wrote it. Change: the "
        "source, or another revision (serving_model_revisions); the hash fits, so this is how the repository has it."
    )


def missing_shards(names: Iterable[str]) -> list[str]:
    """The files of numbered sets (`model-00001-of-00026.safetensors`) that are not there, sorted."""
    have = set(names)
    wanted = set()
    for name in have:
        found = _NUMBERED.fullmatch(name)
        if found:
            wanted |= {f"{found[1]}-{i:05d}-of-{found[3]}.safetensors" for i in range(1, int(found[3]) + 1)}
    return sorted(wanted - have)


def read_tensors(directory: Path, names: Collection[str]) -> dict[str, Tensor]:
    """All tensors that an engine would load: those of the index's files, or of every top-level file without an index.

    Raises:
        WeightsError: a file is damaged, missing, or the index and the files do not agree.
    """
    files = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    missing = missing_shards(files)
    if missing:
        raise _incomplete(f"{len(missing)} of its numbered files are not there: {', '.join(missing[:5])}")
    place_of: dict[str, str] = {}
    if INDEX_NAME in names:
        place_of = _read_index(directory / INDEX_NAME)
        missing = sorted(set(place_of.values()) - set(names))
        if missing:
            raise _incomplete(f"{INDEX_NAME} names files that are not there: {', '.join(missing[:5])}")
        files = sorted(set(place_of.values()))
    if not files:
        raise _incomplete("there is no *.safetensors")
    tensors: dict[str, Tensor] = {}
    for file in files:
        header = read_header(directory / file)
        lost = sorted(name for name, place in place_of.items() if place == file and name not in header)
        if lost:
            raise _incomplete(f"{file} lacks {len(lost)} tensors that {INDEX_NAME} promises: {', '.join(lost[:3])}")
        tensors.update(header)
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): str(file) for name, file in content["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _incomplete(f"{INDEX_NAME} cannot be read: {error!r}") from error


def _incomplete(found: str) -> WeightsError:
    return WeightsError(
        f"The checkpoint is not whole: {found}. Needed: every tensor of the model: an engine may load the rest without "
        "a word. Change: another revision (serving_model_revisions), or a manifest of all files."
    )
