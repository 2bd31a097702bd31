"""Manifests: what is refused, how they are hashed and made."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weights_server import MODEL, manifest, sha256, write_files

from metalserve.remote.weights import ensure_model
from metalserve.remote.weights_manifest import WeightsError, make_manifest, manifest_sha256, parse_manifest

GOOD = {"path": "config.json", "size_bytes": 1, "sha256": "a" * 64}


@pytest.mark.parametrize(
    "path",
    [
        "../config.json",
        "a/../../config.json",
        "a/..",
        "/etc/passwd",
        "",
        ".",
        "./config.json",
        "a//config.json",
        "a/",
        "a\nb",
        "a\0b",
        ".metalserve.json",
        None,
    ],
)
def test_a_path_that_is_not_plain_or_leaves_the_directory(path):
    item = {key: value for key, value in {**GOOD, "path": path}.items() if value is not None}
    with pytest.raises(WeightsError) as refusal:
        parse_manifest([item])
    assert str(refusal.value) == (
        f"The manifest names the file {path or ''!r}. Needed: a path inside the model's directory."
    )


@pytest.mark.parametrize("size", [None, -1, 1.0, "1", True])
def test_a_size_that_is_no_number_of_bytes(size):
    with pytest.raises(WeightsError) as refusal:
        parse_manifest([{**GOOD, "size_bytes": size}])
    assert str(refusal.value) == (
        f"The manifest's entry for config.json has size {size!r} and hash {'a' * 64!r}. "
        "Needed: a whole number of bytes and 64 hex digits of SHA-256."
    )


@pytest.mark.parametrize("digest", ["", "a" * 63, "a" * 65, "A" * 64, "g" * 64, "sha256:" + "a" * 64, "a" * 64 + "\n"])
def test_a_hash_that_is_no_sha256(digest):
    with pytest.raises(WeightsError, match=r"The manifest's entry for config\.json has size 1 and hash"):
        parse_manifest([{**GOOD, "sha256": digest}])


def test_no_files():
    with pytest.raises(WeightsError) as refusal:
        parse_manifest([])
    assert str(refusal.value) == (
        "The manifest lists no files. Needed: path, size_bytes and sha256 of every file. "
        "Change: run playbooks/ops/lock.yml for this model."
    )


def test_a_path_twice():
    with pytest.raises(WeightsError, match=r"^The manifest lists a path twice\. Needed: each file once\.$"):
        parse_manifest([GOOD, {**GOOD, "size_bytes": 2}])


@pytest.mark.parametrize("files", [["config.json"], {"config.json": GOOD}, [["config.json", 1]]])
def test_an_entry_that_is_no_mapping(files):
    with pytest.raises(WeightsError, match=r"The manifest has the entry .*\. Needed: path, size_bytes and sha256"):
        parse_manifest(files)


@pytest.mark.parametrize("name", ["", ".hidden", "../x", "a/b", "a b", "a\n"])
@pytest.mark.parametrize("what", ["model", "revision"])
def test_a_name_that_is_no_directory_level(tmp_path, what, name):
    names = {"model": "tiny", "revision": "0123", what: name}
    with pytest.raises(WeightsError) as refusal:
        ensure_model(tmp_path, names["model"], names["revision"], [GOOD], ["/nowhere"])
    assert str(refusal.value) == (
        f"The {what} is called {name!r}. Needed: letters, digits, dot, dash and underscore only."
    )
    assert list(tmp_path.iterdir()) == []


def test_the_hash_of_a_manifest_is_that_of_its_lines():
    lines = [f"{sha256(MODEL[path])}  {len(MODEL[path])}  {path}\n" for path in sorted(MODEL)]
    assert manifest_sha256(manifest()) == hashlib.sha256("".join(lines).encode()).hexdigest()


@given(st.permutations(manifest()))
def test_the_hash_does_not_depend_on_the_order(files):
    assert manifest_sha256(files) == manifest_sha256(manifest())


@pytest.mark.parametrize("change", [{"path": "other.json"}, {"size_bytes": 5}, {"sha256": "b" * 64}])
def test_the_hash_depends_on_everything_else(change):
    first, *rest = manifest()
    assert manifest_sha256([{**first, **change}, *rest]) != manifest_sha256(manifest())


def test_making_a_manifest_leaves_out_hidden_files_and_a_manifest(tmp_path):
    write_files(tmp_path)
    write_files(
        tmp_path,
        {".gitattributes": b"x", ".cache/huggingface/x.lock": b"x", "metalserve-manifest.json": b"{}"},
    )
    assert make_manifest(tmp_path) == sorted(manifest(), key=lambda entry: entry["path"])


def test_a_manifest_of_that_name_deeper_down_belongs_to_the_model(tmp_path):
    write_files(tmp_path, {"sub/metalserve-manifest.json": b"{}"})
    assert make_manifest(tmp_path) == [
        {"path": "sub/metalserve-manifest.json", "size_bytes": 2, "sha256": sha256(b"{}")}
    ]


def test_a_directory_without_files(tmp_path):
    write_files(tmp_path, {".hidden": b"x"})
    with pytest.raises(WeightsError) as refusal:
        make_manifest(tmp_path)
    assert str(refusal.value) == f"{tmp_path} holds no files. Needed: the directory of a model."


def test_a_made_manifest_is_accepted(tmp_path):
    assert len(parse_manifest(make_manifest(write_files(tmp_path)))) == len(MODEL)
