"""`metalserve manifest`: from a directory to the manifest that pins it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from metalserve.cli import main
from metalserve.remote.weights import ensure_model
from metalserve.remote.weights_manifest import parse_manifest

FILES = {"config.json": b"{}\n", "sub/model.safetensors": bytes(range(256)) * 40}


@pytest.fixture
def model(tmp_path):
    for path, data in {**FILES, ".gitattributes": b"x"}.items():
        (tmp_path / "model" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / path).write_bytes(data)
    return tmp_path / "model"


def test_the_manifest_of_a_directory(model, capsys):
    assert main(["manifest", str(model)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "schema": 1,
        "files": [
            {"path": path, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for path, data in FILES.items()
        ],
    }
    assert printed.err == ""


def test_it_proves_the_files_that_it_was_made_from(model, tmp_path, capsys):
    main(["manifest", str(model)])
    files = json.loads(capsys.readouterr().out)["files"]
    assert len(parse_manifest(files)) == 2
    outcome = ensure_model(tmp_path / "models", "tiny", "0123", files, [str(model)], reserve_bytes=0)
    assert (Path(outcome.path) / "sub/model.safetensors").read_bytes() == FILES["sub/model.safetensors"]


def test_a_manifest_written_into_the_directory_changes_nothing(model, capsys):
    main(["manifest", str(model)])
    first = capsys.readouterr().out
    (model / "metalserve-manifest.json").write_text(first)
    main(["manifest", str(model)])
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("name", ["nowhere", "config.json"])
def test_what_is_no_directory(model, capsys, name):
    assert main(["manifest", str(model / name)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (f"metalserve: {model / name} is not a directory. Needed: the directory of a model.\n")


def test_a_directory_without_files(tmp_path, capsys):
    assert main(["manifest", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"metalserve: {tmp_path} holds no files. Needed: the directory of a model.\n"


def test_without_a_directory(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["manifest"])
    assert caught.value.code == 2
    assert "directory" in capsys.readouterr().err


def test_the_installed_command(model):
    command = [Path(sys.executable).with_name("metalserve"), "manifest", model]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [entry["path"] for entry in json.loads(run.stdout)["files"]] == list(FILES)
