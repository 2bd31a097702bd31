"""Transfers that are cut, runs that are killed, and two runs at once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest
from weights_server import BIG, MODEL, REVISION, SECOND, flipped, manifest, read_files, sha256

from metalserve.remote.weights import ensure_model
from metalserve.remote.weights_manifest import WeightsError

# A run as a process of its own; in small chunks, so that a part is on the disk early.
RUN = """
import json, sys
from pathlib import Path
from metalserve.remote import weights, weights_download
weights_download._CHUNK_BYTES = 10_000
models, revision, files, source = sys.argv[1:]
outcome = weights.ensure_model(Path(models), "tiny", revision, json.loads(files), [source], reserve_bytes=0)
print(json.dumps([outcome.changed, list(outcome.fetched_files)]))
"""


def start(models, source):
    command = [sys.executable, "-c", RUN, str(models), REVISION, json.dumps(manifest()), source.url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_a_cut_transfer_is_continued(ensure, source, final, pauses):
    source.faults.cut_after_bytes[BIG] = [12_345]
    ensure()
    assert read_files(final) == MODEL
    assert source.requested(BIG) == [None, "bytes=12345-"]
    assert pauses == [1.0]


def test_a_transfer_that_is_cut_twice(ensure, source, final):
    source.faults.cut_after_bytes[BIG] = [12_345, 10_000]
    ensure()
    assert read_files(final) == MODEL
    assert source.requested(BIG) == [None, "bytes=12345-", "bytes=22345-"]


def test_a_server_that_ignores_range_starts_again(ensure, source, final):
    source.faults.ignore_range = True
    source.faults.cut_after_bytes[BIG] = [12_345]
    ensure()
    assert read_files(final) == MODEL
    assert source.requested(BIG) == [None, "bytes=12345-"]


def test_a_transfer_in_chunks_that_is_cut(ensure, source, final):
    source.faults.chunked.add(BIG)
    source.faults.cut_after_bytes[BIG] = [12_345]
    ensure()
    assert read_files(final) == MODEL


def test_a_redirect_keeps_the_range(ensure, source, final):
    source.faults.redirect[BIG] = source.url.removesuffix("/tiny") + f"/elsewhere/{BIG}"
    source.faults.cut_after_bytes[BIG] = [12_345]
    ensure()
    assert read_files(final) == MODEL
    assert source.requested(BIG) == [None, None, "bytes=12345-", "bytes=12345-"]


def test_the_next_run_continues_what_the_last_one_left(ensure, source, final):
    source.faults.cut_after_bytes[BIG] = [12_345]
    with pytest.raises(WeightsError, match=f"{source.url}: ended after 12345 of 40000 bytes"):
        ensure(attempts=1)
    assert not final.exists()
    outcome = ensure()
    assert read_files(final) == MODEL
    assert source.requested(BIG)[1:] == ["bytes=12345-"]
    # The first file had come as well.
    assert outcome.fetched_bytes == sum(map(len, MODEL.values())) - 12_345 - len(MODEL["config.json"])


def test_a_good_source_is_not_blamed_for_a_part_that_came_from_a_wrong_one(ensure, source, other, final):
    source.files[BIG] = flipped(MODEL[BIG])
    source.faults.cut_after_bytes[BIG] = [12_345]
    ensure(sources=[source.url, other.url], attempts=1)
    assert read_files(final) == MODEL
    assert other.requested(BIG) == ["bytes=12345-", None]


def test_a_wrong_source_is_still_found_wrong_after_a_continued_part(ensure, source, final):
    source.files[BIG] = flipped(MODEL[BIG])
    source.faults.cut_after_bytes[BIG] = [12_345]
    with pytest.raises(WeightsError, match=f"sha256 {sha256(source.files[BIG])}, the manifest says"):
        ensure()
    assert source.requested(BIG) == [None, "bytes=12345-", None]
    assert not final.exists()


def test_a_source_whose_file_ends_before_the_part_that_is_here(ensure, source, other, final):
    source.faults.cut_after_bytes[BIG] = [12_345]
    with pytest.raises(WeightsError):
        ensure(attempts=1)
    source.files[BIG] = MODEL[BIG][:5000]
    ensure(sources=[source.url, other.url])
    assert source.requested(BIG) == [None, "bytes=12345-"]
    assert other.requested(BIG) == ["bytes=12345-"]
    assert read_files(final) == MODEL


def test_a_killed_run_is_continued_without_fetching_again_what_was_complete(ensure, source, models, final, incoming):
    source.faults.silent_after_bytes[SECOND] = 20_000
    process = start(models, source)
    part = incoming / f"{SECOND}.part"
    wait_for(lambda: part.exists() and part.stat().st_size == 20_000)
    process.kill()
    process.wait(10)
    assert process.stdout.read() == ""
    process.stdout.close()
    assert not final.exists()
    source.faults.silent_after_bytes.clear()
    source.requests.clear()
    ensure(lock_timeout_seconds=0)
    assert read_files(final) == MODEL
    # Complete when the run was killed: the first two; begun: the third; the others are small and came after it.
    assert source.requests == [(SECOND, "bytes=20000-"), ("tokenizer/merges.txt", None), ("empty.txt", None)]


def test_a_run_that_was_killed_before_its_last_rename_fetches_nothing(ensure, source, incoming, final):
    incoming.mkdir(parents=True)
    (incoming / f"{BIG}.part").write_bytes(MODEL[BIG])
    ensure()
    assert read_files(final) == MODEL
    assert source.requested(BIG) == []


def test_a_whole_part_with_wrong_bytes_is_begun_again(ensure, source, incoming, final):
    incoming.mkdir(parents=True)
    (incoming / f"{BIG}.part").write_bytes(flipped(MODEL[BIG]))
    ensure()
    assert read_files(final) == MODEL
    assert source.requested(BIG) == [None]


def test_two_runs_at_once_fetch_once(source, models, final):
    together = threading.Event()
    source.faults.before = lambda path: together.wait(10)
    runs = [start(models, source), start(models, source)]
    wait_for(lambda: source.requests)
    # Time for the second to come as far as the lock.
    time.sleep(0.5)
    together.set()
    answers = sorted(json.loads(run.communicate(timeout=20)[0]) for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert answers == [[False, []], [True, list(MODEL)]]
    assert read_files(final) == MODEL
    assert sorted(path for path, _ in source.requests) == sorted(MODEL)


def test_a_lock_that_is_held_too_long_names_the_process(ensure, source, models, final):
    source.faults.silent_after_bytes[BIG] = 10_000
    process = start(models, source)
    try:
        wait_for(lambda: source.requested(BIG))
        with pytest.raises(WeightsError) as refusal:
            ensure(lock_timeout_seconds=0.3)
    finally:
        process.kill()
        process.communicate(timeout=10)
    assert str(refusal.value) == (
        f"Process {process.pid} has been fetching the same revision for longer than 0 s. "
        "Change: wait for it, or end it; its finished files are kept."
    )
    assert not final.exists()


def test_another_revision_does_not_wait(ensure, source, models):
    source.faults.silent_after_bytes[BIG] = 10_000
    process = start(models, source)
    try:
        wait_for(lambda: source.requested(BIG))
        small = manifest({"config.json": MODEL["config.json"]})
        outcome = ensure_model(models, "tiny", "other", small, [source.url], reserve_bytes=0, lock_timeout_seconds=0)
    finally:
        process.kill()
        process.communicate(timeout=10)
    assert outcome.changed is True
    assert [path.name for path in (models / "tiny").iterdir()] == ["other"]
