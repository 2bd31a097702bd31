"""Disks that are too small, and runs that only look."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import pytest
from weights_server import BIG, MODEL, REVISION, SECOND, flipped, manifest, read_files

from metalserve.remote import weights
from metalserve.remote.weights import ensure_model
from metalserve.remote.weights_download import Transfer
from metalserve.remote.weights_manifest import WeightsError

GIB = 1 << 30


@pytest.fixture
def free_bytes(monkeypatch):
    """Says how many bytes are free, in blocks of 4096, wherever one looks."""

    def say(size_bytes):
        status = SimpleNamespace(f_bavail=size_bytes // 4096, f_frsize=4096)
        monkeypatch.setattr(weights.os, "statvfs", lambda path: status)

    return say


@pytest.fixture(params=["loop device", "tmpfs"])
def small_disk(tmp_path, request):
    """A file system of 1 MiB: ext4 on a loop device, which says only late that it is full, and one in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    what = ["-t", "tmpfs", "-o", "size=1m", "tmpfs"]
    if request.param == "loop device":
        image = tmp_path / "disk.img"
        image.write_bytes(bytes(1 << 20))
        made = subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", image], check=False)
        if made.returncode != 0:
            pytest.skip("this machine has no mke2fs that makes ext4")
        what = ["-o", "loop", str(image)]
    mounted = subprocess.run(["mount", *what, place], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"this machine mounts no {request.param}: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def everything_below(directory):
    return sorted((path.relative_to(directory).as_posix(), path.stat().st_mtime_ns) for path in directory.rglob("*"))


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_disk_that_is_too_small_is_refused_before_anything_is_fetched(
    ensure, source, models, final, free_bytes, dry_run
):
    free_bytes(2 * GIB)
    files = [{**entry, "size_bytes": 4 * GIB} if entry["path"] == BIG else entry for entry in manifest()]
    with pytest.raises(WeightsError) as refusal:
        ensure(files=files, reserve_bytes=GIB, dry_run=dry_run)
    assert str(refusal.value) == (
        f"The disk of {models} has 2.00 GiB free. Needed: 4.00 GiB still to fetch for tiny and 1.00 GiB in reserve. "
        "Change: free 3.00 GiB there, or set model_weights_dir to a larger disk."
    )
    assert source.requests == []
    assert not final.exists()


def test_the_reserve_is_kept_free(ensure, final, free_bytes):
    size = sum(map(len, MODEL.values()))
    free_bytes(GIB + size // 4096 * 4096)
    with pytest.raises(WeightsError, match=r"1\.00 GiB in reserve"):
        ensure(reserve_bytes=GIB)
    free_bytes(GIB + size + 4096)
    assert ensure(reserve_bytes=GIB).changed is True


def test_what_an_interrupted_run_left_needs_no_space_again(ensure, source, final, free_bytes):
    source.faults.cut_after_bytes[SECOND] = [20_480]
    with pytest.raises(WeightsError):
        ensure(attempts=1)
    free_bytes(8192)
    with pytest.raises(WeightsError, match=r"Needed: 0\.00 GiB still to fetch"):
        ensure()
    free_bytes(12288)
    ensure()
    assert read_files(final) == MODEL


def test_a_complete_model_is_not_refused_on_a_full_disk(ensure, free_bytes):
    ensure()
    free_bytes(0)
    assert ensure(reserve_bytes=GIB).changed is False


def test_a_disk_that_fills_up_while_writing(small_disk, source):
    ballast = small_disk / "ballast"

    def fill(path):
        if path == SECOND:
            with ballast.open("wb") as out:
                status = os.statvfs(small_disk)
                out.write(bytes(status.f_bavail * status.f_frsize - 8192))

    source.faults.before = fill
    models = small_disk / "models"
    said = []
    with pytest.raises(WeightsError) as refusal:
        ensure_model(
            models, "tiny", REVISION, manifest(), [source.url], reserve_bytes=0, transfer=Transfer(log=said.append)
        )
    incoming = models / ".incoming" / f"tiny@{REVISION}"
    assert str(refusal.value) == (
        f"The disk of {incoming} filled up while {SECOND} was being written. Needed: 0.00 GiB for this file. "
        "Change: free space there and run again; what is complete is kept."
    )
    # Neither another attempt nor another source would help.
    assert source.requested(SECOND) == [None]
    assert said == []
    assert not (models / "tiny").exists()

    ballast.unlink()
    source.faults.before = lambda path: None
    source.requests.clear()
    ensure_model(models, "tiny", REVISION, manifest(), [source.url], reserve_bytes=0)
    assert read_files(models / "tiny" / REVISION) == MODEL
    assert source.requested(BIG) == []


def test_a_dry_run_of_a_bare_host_says_what_would_come(ensure, source, models, final):
    outcome = ensure(dry_run=True)
    assert outcome.changed is True
    assert outcome.fetched_files == tuple(MODEL)
    assert outcome.fetched_bytes == sum(map(len, MODEL.values()))
    assert outcome.message == f"would fetch 5 files, 0.00 GB, for {final}"
    assert not models.exists()
    assert source.requests == []


def test_a_dry_run_names_the_damage_and_leaves_it(ensure, source, models, final):
    ensure()
    (final / BIG).write_bytes(flipped(MODEL[BIG]))
    os.utime(final / SECOND, ns=(1, 1))
    source.requests.clear()
    before = everything_below(models)
    outcome = ensure(dry_run=True)
    assert outcome.changed is True
    assert outcome.fetched_files == (BIG,)
    assert outcome.healed_files == ()
    assert outcome.message == f"would fetch 1 damaged or missing files of {final}: {BIG}"
    assert everything_below(models) == before
    assert source.requests == []


def test_a_dry_run_of_a_complete_model(ensure):
    ensure()
    outcome = ensure(dry_run=True)
    assert outcome.changed is False
    assert outcome.fetched_files == ()


def test_a_dry_run_counts_only_what_is_still_missing(ensure, source):
    source.faults.cut_after_bytes[SECOND] = [20_000]
    with pytest.raises(WeightsError):
        ensure(attempts=1)
    outcome = ensure(dry_run=True)
    # The two files before it are complete; their names stay in the list of what is not published.
    assert outcome.fetched_bytes == len(MODEL[SECOND]) - 20_000 + len(MODEL["tokenizer/merges.txt"])
    assert outcome.fetched_files == tuple(MODEL)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_manifest_is_checked_in_a_dry_run_too(ensure, models, dry_run):
    with pytest.raises(WeightsError, match="The manifest lists no files"):
        ensure(files=[], dry_run=dry_run)
    assert not models.exists()
