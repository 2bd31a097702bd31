"""From nothing to a published model, and every way a source can fail."""

from __future__ import annotations

import email.utils
import socket
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from weights_server import BIG, MODEL, SECOND, flipped, manifest, read_files, sha256, write_files

from metalserve.remote import weights_download
from metalserve.remote.weights_download import Progress, RateLimit
from metalserve.remote.weights_manifest import WeightsError


def test_a_fresh_model_is_published_whole_by_one_rename(ensure, source, models, final, incoming):
    seen = []
    source.faults.before = lambda path: seen.append((final.exists(), incoming.stat().st_ino))
    outcome = ensure()
    assert read_files(final) == MODEL
    assert {exists for exists, _ in seen} == {False}
    # The directory that was filled is the one that is published.
    assert {inode for _, inode in seen} == {final.stat().st_ino}
    assert not incoming.exists()
    assert outcome.changed is True
    assert outcome.path == str(final)
    assert outcome.fetched_files == tuple(MODEL)
    assert outcome.fetched_bytes == sum(map(len, MODEL.values()))
    assert outcome.healed_files == ()
    assert outcome.message == f"fetched 5 files, 0.00 GB, for {final}"


def test_the_second_run_asks_nobody(ensure, source, final):
    ensure()
    source.requests.clear()
    outcome = ensure()
    assert outcome.changed is False
    assert outcome.fetched_files == ()
    assert outcome.fetched_bytes == 0
    assert outcome.message == f"{final} is complete and proven"
    assert source.requests == []


def test_a_corrupt_file_publishes_nothing_and_says_what_came(ensure, source, final):
    source.files[SECOND] = flipped(MODEL[SECOND])
    with pytest.raises(WeightsError) as refusal:
        ensure()
    assert str(refusal.value) == (
        f"{SECOND} could not be had with the right content; nothing was published. "
        f"Found: {source.url}: sha256 {sha256(source.files[SECOND])}, the manifest says {sha256(MODEL[SECOND])}. "
        "Change: the source, or the locked manifest when the file was meant to change (playbooks/ops/lock.yml)."
    )
    assert not final.exists()
    # The same wrong bytes would come again: one request is enough.
    assert source.requested(SECOND) == [None]


def test_what_was_right_beside_a_corrupt_file_is_not_fetched_again(ensure, source, final):
    source.files[SECOND] = flipped(MODEL[SECOND])
    with pytest.raises(WeightsError):
        ensure()
    source.files[SECOND] = MODEL[SECOND]
    source.requests.clear()
    ensure()
    assert read_files(final) == MODEL
    assert source.requested(BIG) == []


def test_the_second_source_is_used_for_the_file_that_the_first_has_wrong(ensure, source, other, final):
    source.files[BIG] = flipped(MODEL[BIG])
    ensure(sources=[source.url, other.url])
    assert read_files(final) == MODEL
    assert other.requests == [(BIG, None)]


def test_the_refusal_names_every_source(ensure, source, other, final):
    source.files[BIG] = flipped(MODEL[BIG])
    del other.files[BIG]
    with pytest.raises(WeightsError) as refusal:
        ensure(sources=[source.url, other.url])
    assert f"Found: {source.url}: sha256 {sha256(source.files[BIG])}, " in str(refusal.value)
    assert f"; {other.url}: HTTP Error 404: Not Found. Change: " in str(refusal.value)
    assert not final.exists()


@pytest.mark.parametrize("code", [401, 403, 404, 410])
def test_an_answer_that_stays_the_same_is_asked_for_once(ensure, source, pauses, code):
    source.faults.status[BIG] = code
    with pytest.raises(WeightsError, match=f"{BIG} could not be had .*{source.url}: HTTP Error {code}"):
        ensure()
    assert source.requested(BIG) == [None]
    assert pauses == []


def test_an_overloaded_source_is_asked_again_after_growing_pauses(ensure, source, pauses):
    source.faults.status[BIG] = 503
    said = []
    with pytest.raises(WeightsError, match=r"HTTP Error 503: Service Unavailable \(3 times\)\. Change"):
        ensure(log=said.append)
    assert pauses == [1.0, 2.0]
    assert said[0] == f"{BIG} from {source.url}, attempt 1: HTTP Error 503: Service Unavailable"


def after(source, times):
    """The source is well again when the big file has been asked for so often."""
    source.faults.before = lambda path: source.faults.status.clear() if len(source.requested(BIG)) > times else None


@pytest.mark.parametrize("code", [429, 503])
def test_a_source_that_asks_to_wait_is_waited_for_as_long_as_it_asks(ensure, source, pauses, final, code):
    source.faults.status[BIG], source.faults.headers["Retry-After"] = code, "7"
    after(source, times=4)
    progress = Progress()
    ensure(progress=progress, attempts=1)
    assert read_files(final) == MODEL
    # None of them counts as a failed attempt.
    assert pauses == [7.0, 7.0, 7.0, 7.0]


def test_a_source_that_names_a_time(ensure, source, pauses, final):
    moment = email.utils.format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    source.faults.status[BIG], source.faults.headers["Retry-After"] = 429, moment
    after(source, times=1)
    ensure(attempts=1)
    assert read_files(final) == MODEL
    assert len(pauses) == 1
    assert 25 < pauses[0] <= 30


def test_a_source_that_asks_for_too_much_patience_is_left(ensure, source, other, pauses, final):
    source.faults.status[BIG], source.faults.headers["Retry-After"] = 429, "100"
    ensure(sources=[source.url, other.url], patience_seconds=250, attempts=1)
    assert read_files(final) == MODEL
    assert pauses == [100.0, 100.0]
    assert len(source.requested(BIG)) == 3


def test_a_source_that_gives_no_time_is_asked_after_the_usual_pause(ensure, source, pauses):
    source.faults.status[BIG], source.faults.headers["Retry-After"] = 429, "soon"
    with pytest.raises(WeightsError, match=r"HTTP Error 429: Too Many Requests \(3 times\)"):
        ensure()
    assert pauses == [1.0, 2.0]


def test_a_transfer_that_moves_much_before_each_break_goes_on_for_as_long_as_it_takes(ensure, source, final):
    data = bytes(8 << 20)
    source.files["big.bin"] = data
    source.faults.cut_after_bytes["big.bin"] = [1_500_000] * 5
    ensure(files=manifest({"big.bin": data}), attempts=2)
    assert read_files(final) == {"big.bin": data}
    assert len(source.requested("big.bin")) == 6


def test_files_come_at_once_over_some_connections(ensure, source, final):
    together = threading.Barrier(3)
    source.faults.before = lambda path: together.wait(10) if path in (BIG, SECOND, "config.json") else None
    ensure(connections=3)
    assert read_files(final) == MODEL


def test_a_file_that_cannot_be_had_stops_the_others(ensure, source, final, incoming):
    source.faults.status[BIG] = 404
    source.files[SECOND] = MODEL[SECOND]
    source.faults.silent_after_bytes["config.json"] = 1
    with pytest.raises(WeightsError, match=f"{BIG} could not be had"):
        ensure(connections=2, read_timeout_seconds=1, attempts=1)
    assert not final.exists()
    assert source.requested(SECOND) == []


def test_the_rate_is_limited_for_all_connections_together(ensure, source, monkeypatch):
    monkeypatch.setattr(weights_download, "time", time)
    began = time.monotonic()
    ensure(connections=4, limit=RateLimit(100_000))
    # 70 kB at 100 kB/s.
    assert 0.65 <= time.monotonic() - began < 5


def test_the_progress_says_how_much_came_from_where(ensure, source, other):
    source.files[BIG] = flipped(MODEL[BIG])
    progress = Progress()
    ensure(sources=[source.url, other.url], progress=progress)
    assert progress.by_source == {source.url: 70_027 - 40_000, other.url: 40_000}
    assert progress.received_bytes == 70_027


def test_a_source_that_recovers_is_enough(ensure, source, final):
    source.faults.status[BIG] = 503
    source.faults.before = lambda path: source.faults.status.clear() if len(source.requested(BIG)) == 2 else None
    ensure()
    assert read_files(final) == MODEL


def test_nobody_listens_at_the_source(ensure, final):
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}/tiny"
        with pytest.raises(WeightsError, match=f"config.json could not be had .*{url}: .*Connection refused"):
            ensure(sources=[url])
    assert not final.exists()


def test_a_silent_source_is_given_up(ensure, source, final):
    source.faults.silent_after_bytes[BIG] = 10_000
    with pytest.raises(WeightsError, match=f"{BIG} could not be had .*{source.url}: .*timed out"):
        ensure(read_timeout_seconds=0.2, attempts=1)
    assert not final.exists()


def test_a_slow_source_is_taken_for_as_long_as_something_comes(ensure, source, final):
    """The limit is on silence, not on the whole: a shard of gigabytes over a thin line takes what it takes."""
    source.faults.slow[BIG] = (4_000, 0.1)
    ensure(read_timeout_seconds=0.5, attempts=1)
    assert read_files(final) == MODEL
    assert source.requested(BIG) == [None]


def test_a_silent_source_does_not_keep_the_second_from_being_used(ensure, source, other, final):
    source.faults.silent_after_bytes[BIG] = 10_000
    ensure(sources=[source.url, other.url], read_timeout_seconds=0.2, attempts=1)
    assert read_files(final) == MODEL


def test_a_file_that_is_too_short(ensure, source, final):
    source.files[BIG] = MODEL[BIG][:-1]
    with pytest.raises(WeightsError, match=f"{source.url}: ended after 39999 of 40000 bytes"):
        ensure(attempts=1)
    assert not final.exists()


def test_a_file_that_is_too_long_is_given_up_at_once(ensure, source, pauses, final):
    source.files[BIG] = MODEL[BIG] + b"x"
    with pytest.raises(WeightsError, match=f"{source.url}: longer than the 40000 bytes of the manifest"):
        ensure()
    assert not final.exists()
    assert source.requested(BIG) == [None]
    assert pauses == []


def test_something_that_does_not_speak_http(ensure, source):
    source.faults.raw[BIG] = b"SSH-2.0-OpenSSH_9.2p1\r\n"
    with pytest.raises(WeightsError, match=f"{BIG} could not be had .*{source.url}: SSH-2.0"):
        ensure(attempts=1)


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("mirror/tiny", "mirror/tiny: unknown url type: 'mirror/tiny/config.json'"),
        ("http://mirror:none/tiny", "http://mirror:none/tiny: nonnumeric port: 'none'"),
        ("/nowhere", "/nowhere: .*No such file or directory: '/nowhere/config.json'"),
    ],
    ids=["no scheme", "bad port", "no directory"],
)
def test_a_place_that_cannot_be_read(ensure, place, found):
    with pytest.raises(WeightsError, match=f"config.json could not be had .*Found: {found}"):
        ensure(sources=[place], attempts=1)


def test_no_source_at_all(ensure, final):
    with pytest.raises(WeightsError) as refusal:
        ensure(sources=[])
    assert str(refusal.value) == (
        "No source is given for config.json. Needed: at least one URL or directory. Change: the model's `sources`."
    )
    assert not final.exists()


@pytest.mark.parametrize("form", ["{}", "{}/", "file://{}"])
def test_a_directory_is_a_source(ensure, tmp_path, final, form):
    directory = write_files(tmp_path / "a mirror")
    place = form.format(directory) if form == "{}" else form.format(str(directory).replace(" ", "%20"))
    if form == "{}/":
        place = f"{directory}/"
    assert ensure(sources=[place]).changed is True
    assert read_files(final) == MODEL


def test_names_are_quoted_in_urls(ensure, source, final):
    files = {"vocab file#1.txt": b"x"}
    source.files["vocab%20file%231.txt"] = b"x"
    ensure(files=manifest(files))
    assert read_files(final) == files


def test_a_file_in_chunks_without_a_length(ensure, source, final):
    source.faults.chunked.add(BIG)
    ensure()
    assert read_files(final) == MODEL


def test_files_that_another_manifest_left_are_not_published(ensure, source, final):
    stale = {"adapter.safetensors": b"y" * 2000, **MODEL}
    source.files["adapter.safetensors"] = b"y" * 2000
    del source.files[SECOND]
    with pytest.raises(WeightsError):
        ensure(files=manifest(stale))
    source.files[SECOND] = MODEL[SECOND]
    ensure()
    assert read_files(final) == MODEL
