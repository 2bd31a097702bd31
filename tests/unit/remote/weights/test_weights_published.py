"""What lies in the published directory is believed, proven again or healed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from weights_server import BIG, MODEL, SECOND, flipped, read_files

from metalserve.remote import weights_hash, weights_manifest


@pytest.fixture
def published(ensure, source, final):
    ensure()
    source.requests.clear()
    return final


@pytest.fixture
def hashed(monkeypatch):
    """The names of the files that are hashed."""
    names, hash_file = [], weights_hash.hash_file
    monkeypatch.setattr(weights_hash, "hash_file", lambda path: names.append(path.name) or hash_file(path))
    return names


def test_a_file_with_the_known_size_and_time_is_not_hashed(ensure, published, hashed):
    assert ensure().changed is False
    assert hashed == []


def test_a_damaged_file_is_healed_and_named(ensure, source, published, incoming):
    (published / BIG).write_bytes(flipped(MODEL[BIG]))
    outcome = ensure()
    assert outcome.changed is True
    assert outcome.healed_files == (BIG,)
    assert outcome.fetched_files == (BIG,)
    assert outcome.fetched_bytes == len(MODEL[BIG])
    assert outcome.message == f"fetched 1 damaged or missing files of {published}: {BIG}"
    assert read_files(published) == MODEL
    assert source.requests == [(BIG, None)]
    assert not incoming.exists()
    assert ensure().changed is False


def test_an_engine_that_reads_the_damaged_file_keeps_it(ensure, published):
    (published / BIG).write_bytes(flipped(MODEL[BIG]))
    with (published / BIG).open("rb") as opened:
        ensure()
        assert opened.read() == flipped(MODEL[BIG])
    assert (published / BIG).read_bytes() == MODEL[BIG]


def test_a_file_of_another_size_is_healed(ensure, published):
    (published / SECOND).write_bytes(MODEL[SECOND][:100])
    assert ensure().healed_files == (SECOND,)
    assert read_files(published) == MODEL


def test_missing_files_are_put_back(ensure, published):
    (published / BIG).unlink()
    (published / "tokenizer/merges.txt").unlink()
    (published / "tokenizer").rmdir()
    outcome = ensure()
    assert outcome.healed_files == (BIG, "tokenizer/merges.txt")
    assert read_files(published) == MODEL


def test_an_empty_published_directory_is_filled(ensure, final):
    final.mkdir(parents=True)
    assert ensure().healed_files == tuple(MODEL)
    assert read_files(final) == MODEL


def test_a_touched_file_is_hashed_once_and_not_fetched(ensure, source, published, hashed):
    os.utime(published / BIG, ns=(1, 1))
    assert ensure().changed is False
    assert hashed == [BIG]
    assert source.requests == []
    # The look is written down: the run after it believes again.
    ensure()
    assert hashed == [BIG]


def test_a_corruption_that_keeps_size_and_time_is_found_by_the_full_hash(ensure, published):
    before = (published / BIG).stat()
    (published / BIG).write_bytes(flipped(MODEL[BIG]))
    os.utime(published / BIG, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert ensure().changed is False
    assert ensure(full_hash=True, dry_run=True).fetched_files == (BIG,)
    assert ensure(full_hash=True).healed_files == (BIG,)
    assert read_files(published) == MODEL


def test_a_full_hash_of_a_sound_model_changes_nothing(ensure, source, published, hashed):
    assert ensure(full_hash=True).changed is False
    assert sorted(hashed) == sorted(Path(path).name for path in MODEL)
    assert source.requests == []


def test_a_new_manifest_is_not_believed_from_the_old_record(ensure, source, published):
    source.files[SECOND] = flipped(MODEL[SECOND])
    files = weights_manifest.make_manifest(published)
    for entry in files:
        if entry["path"] == SECOND:
            entry["sha256"] = hashlib.sha256(source.files[SECOND]).hexdigest()
    assert ensure(files=files).healed_files == (SECOND,)
    assert (published / SECOND).read_bytes() == source.files[SECOND]


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", '{"files": null}', '{"files": []}', json.dumps({"files": dict.fromkeys(MODEL, 1)})]
)
def test_without_a_record_that_can_be_read_everything_is_hashed(ensure, source, published, hashed, text):
    record = published / ".metalserve.json"
    record.unlink()
    if text is not None:
        record.write_text(text)
    assert ensure().changed is False
    assert sorted(hashed) == sorted(Path(path).name for path in MODEL)
    assert source.requests == []
    assert sorted(json.loads(record.read_text())["files"]) == sorted(MODEL)


def test_a_source_that_fails_leaves_the_damaged_model_as_it_was(ensure, source, published):
    (published / BIG).write_bytes(flipped(MODEL[BIG]))
    source.faults.status[BIG] = 404
    with pytest.raises(weights_manifest.WeightsError, match=f"{BIG} could not be had"):
        ensure()
    assert read_files(published) == {**MODEL, BIG: flipped(MODEL[BIG])}
