"""Small files: replaced whole, read without fuss."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from metalserve.remote.files import read_json_object, read_text, write_json, write_text


def test_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    write_json(path, {"detail": "回答 42"})
    assert read_json_object(path) == {"detail": "回答 42"}
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["gate.json"]  # noqa: PTH208 (hidden ones too)


def test_what_cannot_be_written_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    path.write_text('{"release": "old"}')
    with pytest.raises(TypeError):
        write_json(path, {"release": object()})
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\udcff")
    assert read_json_object(path) == {"release": "old"}
    assert os.listdir(tmp_path) == ["gate.json"]  # noqa: PTH208


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "none" / "file", "")


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff", "[" * 100_000])
def test_what_is_no_object_is_an_empty_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gate.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert read_json_object(path) == {}


def test_no_file_is_no_text(tmp_path: Path) -> None:
    assert read_text(tmp_path / "none") is None
    assert read_json_object(tmp_path / "none") == {}
