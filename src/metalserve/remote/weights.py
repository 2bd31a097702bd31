"""Put the files of one model revision on disk, each proven by its SHA-256, published whole or not at all.

Layout under the models directory:

    <model>/<revision>/...                  published, complete and proven
    <model>/<revision>/.metalserve.json     the manifest, with size and mtime of each file at its last full hash
    .incoming/<model>@<revision>/...        being fetched; what is complete there is not fetched again
    .incoming/<model>@<revision>.lock       one run at a time

The published directory appears by one rename, so that no reader ever sees half a model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Optional

from .file_lock import LockHeldError, file_lock
from .weights_content import Expectation, check_content
from .weights_download import Transfer, fetch_file, partial_path
from .weights_hash import hash_files
from .weights_manifest import RECORD_NAME, FileEntry, WeightsError, parse_manifest

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Outcome:
    """What a run did, or in a dry run would do.

    Bytes are those missing when it began; what an interrupted run left behind counts as there.
    """

    changed: bool
    path: str
    fetched_files: tuple[str, ...]
    fetched_bytes: int
    healed_files: tuple[str, ...]
    message: str
    record_stale: bool = False
    """All files are right, but they had to be hashed to know it: a real run would write that down."""


def ensure_model(
    models_dir: Path,
    model: str,
    revision: str,
    files: Sequence[Mapping[str, Any]],
    sources: Sequence[str],
    *,
    dry_run: bool = False,
    full_hash: bool = False,
    expected: Optional[Expectation] = None,
    reserve_bytes: int = 1 << 30,
    lock_timeout_seconds: float = 3600.0,
    connections: int = 1,
    transfer: Optional[Transfer] = None,
    removable: Callable[[], str] = lambda: "",
    started: Callable[[int, int], None] = lambda total_bytes, needed_bytes: None,
) -> Outcome:
    """Bring one revision to its published place, fetching only what is missing or damaged.

    Args:
        models_dir: where models live; made when missing.
        model, revision: names of the two directory levels.
        files: the manifest's list of {path, size_bytes, sha256}.
        sources: base URLs (http, https, file) or absolute directories, tried in order for each file.
        dry_run: look and check (disk space included), change nothing.
        full_hash: hash published files even when size and mtime are those of the last hash.
        expected: what the model must be beside its hashes; None does not look.
        reserve_bytes: free space that must remain on the disk afterwards.
        lock_timeout_seconds: how long to wait for another run on the same revision.
        connections: files that are fetched at once.
        transfer: how files are fetched.
        removable: says what could be removed when the disk is too small.
        started: called with the bytes of the model and those still to fetch, when it is known.

    Raises:
        WeightsError: with the file, the source and the numbers; nothing is published then.
    """
    for what, name in (("model", model), ("revision", revision)):
        if not _SAFE_NAME.fullmatch(name):
            raise WeightsError(
                f"The {what} is called {name!r}. Needed: letters, digits, dot, dash and underscore only."
            )
    entries = parse_manifest(files)
    final = models_dir / model / revision
    incoming = incoming_directory(models_dir, model, revision)
    if dry_run:
        bad = _damaged(final, entries, full_hash=full_hash) if final.is_dir() else list(entries)
        needed_bytes = _still_needed(incoming, bad)
        _check_space(models_dir, needed_bytes, model, reserve_bytes, removable)
        if final.is_dir():
            _refuse_strangers(final, entries)
            if not bad:
                _check_published(final, entries, expected, again=full_hash)
        outcome = _outcome(final, bad, needed_bytes, [], final.is_dir(), "would fetch")
        known = read_record(final)
        stale = not bad and {**_record(final, entries, expected), "published_at": known.get("published_at")} != known
        return replace(outcome, record_stale=stale)

    incoming.parent.mkdir(parents=True, exist_ok=True)
    with locked(incoming.with_name(incoming.name + ".lock"), lock_timeout_seconds):
        published = final.is_dir()
        if published:
            _refuse_strangers(final, entries)
        bad = _damaged(final, entries, full_hash=full_hash) if published else list(entries)
        needed_bytes = _still_needed(incoming, bad)
        started(sum(entry.size_bytes for entry in entries), needed_bytes)
        if bad:
            _check_space(models_dir, needed_bytes, model, reserve_bytes, removable)
            incoming.mkdir(exist_ok=True)
            _fetch_all(bad, incoming, sources, connections, transfer or Transfer())
            if published:
                # A running engine keeps the old file open; the rename gives later readers the right one.
                for entry in bad:
                    (final / entry.path).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(incoming / entry.path, final / entry.path)
                shutil.rmtree(incoming)
            else:
                _drop_strangers(incoming, entries)
                if expected:
                    check_content(incoming, [entry.path for entry in entries], expected)
                _write_record(incoming, _record(incoming, entries, expected))
                final.parent.mkdir(parents=True, exist_ok=True)
                _sync_directory(incoming)
                incoming.rename(final)
                _sync_directory(final.parent)
        if published:
            _check_published(final, entries, expected, again=bool(bad) or full_hash)
        # Also after a look that had to hash: what is proven now is believed at the next run.
        _write_record(final, _record(final, entries, expected))
    return _outcome(final, bad, needed_bytes, bad if published else [], published, "fetched")


def incoming_directory(models_dir: Path, model: str, revision: str) -> Path:
    """Where a revision lies while it is being fetched."""
    return models_dir / ".incoming" / f"{model}@{revision}"


def verify_published(directory: Path) -> tuple[FileEntry, ...]:
    """Hash every file of a published directory against its own record; returns those that are damaged or missing.

    Raises:
        WeightsError: there is no record, or there are files that it does not name.
    """
    rows = read_record(directory).get("files") or {}
    if not rows:
        raise WeightsError(
            f"{directory} has no record of its hashes. Needed: {RECORD_NAME}. Change: run playbooks/stage.yml."
        )
    entries = parse_manifest(
        [{"path": path, "size_bytes": row.get("size_bytes"), "sha256": row.get("sha256")} for path, row in rows.items()]
    )
    _refuse_strangers(directory, entries)
    return tuple(_damaged(directory, entries, full_hash=True))


def _fetch_all(
    entries: Sequence[FileEntry], incoming: Path, sources: Sequence[str], connections: int, transfer: Transfer
) -> None:
    """Fetch files, some at once; the first that cannot be had stops the others where they are."""
    errors: list[BaseException] = []

    def fetch(entry: FileEntry) -> None:
        try:
            fetch_file(entry, incoming / entry.path, sources, transfer)
        except BaseException as error:
            errors.append(error)
            transfer.stop.set()

    with ThreadPoolExecutor(max_workers=max(1, connections)) as pool:
        for entry in entries:
            pool.submit(fetch, entry)
    if errors:
        raise errors[0]


def _check_published(
    final: Path, entries: Sequence[FileEntry], expected: Optional[Expectation], *, again: bool
) -> None:
    if expected and (again or read_record(final).get("content") != expected.key):
        check_content(final, [entry.path for entry in entries], expected)


def _outcome(
    final: Path, bad: Sequence[FileEntry], size: int, healed: Sequence[FileEntry], published: bool, verb: str
) -> Outcome:
    if not bad:
        message = f"{final} is complete and proven"
    elif published:
        message = f"{verb} {len(bad)} damaged or missing files of {final}: {', '.join(e.path for e in bad)}"
    else:
        message = f"{verb} {len(bad)} files, {size / 1e9:.2f} GB, for {final}"
    names = tuple(entry.path for entry in bad)
    return Outcome(bool(bad), str(final), names, size, tuple(e.path for e in healed), message)


def _drop_strangers(incoming: Path, entries: Sequence[FileEntry]) -> None:
    """Remove what a run with another manifest left behind: only proven files are published."""
    wanted = {incoming / entry.path for entry in entries}
    for path in list(incoming.rglob("*")):
        if path not in wanted and not path.is_dir():
            path.unlink()


def _refuse_strangers(directory: Path, entries: Sequence[FileEntry]) -> None:
    """Refuse files that no manifest names: an engine loads whatever *.safetensors lies in the directory."""
    wanted = {entry.path for entry in entries}
    found = []
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        hidden = any(part.startswith(".") for part in Path(name).parts)
        if name not in wanted and not hidden and not path.is_dir():
            found.append(name)
    if found:
        raise WeightsError(
            f"{directory} holds {len(found)} files that the manifest does not name: {', '.join(sorted(found)[:5])}. "
            "Needed: only files that are proven: an engine loads every *.safetensors that lies there. "
            "Change: remove them, or name them in the manifest (playbooks/ops/lock.yml)."
        )


def _record(directory: Path, entries: Sequence[FileEntry], expected: Optional[Expectation]) -> dict[str, Any]:
    """What is written down of files that are proven."""
    rows = {}
    for entry in entries:
        status = (directory / entry.path).stat()
        rows[entry.path] = {
            "size_bytes": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "sha256": entry.sha256,
        }
    before = read_record(directory)
    # A run that did not look leaves what an earlier one has seen.
    content = expected.key if expected else before.get("content")
    return {"schema": 1, "files": rows, "content": content, "published_at": before.get("published_at") or time.time()}


def _write_record(directory: Path, record: Mapping[str, Any]) -> None:
    """Write the record, unless it is there."""
    if record == read_record(directory):
        return
    temporary = directory / (RECORD_NAME + ".new")
    temporary.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, directory / RECORD_NAME)


def read_record(directory: Path) -> Mapping[str, Any]:
    """What is written down of a published directory; empty when there is nothing that can be read."""
    try:
        record = json.loads((directory / RECORD_NAME).read_text(encoding="utf-8"))
        rows = record["files"]
        return {**record, "files": {path: row for path, row in rows.items() if isinstance(row, Mapping)}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _damaged(directory: Path, entries: Sequence[FileEntry], *, full_hash: bool) -> list[FileEntry]:
    """The entries whose file is missing or not what the manifest says.

    A file with the size and mtime of its last full hash is believed, unless `full_hash` asks again.
    """
    known = read_record(directory).get("files") or {}
    bad, doubtful = set(), {}
    for entry in entries:
        path = directory / entry.path
        try:
            status = path.stat()
        except OSError:
            bad.add(entry)
            continue
        row = known.get(entry.path, {})
        believed = (
            not full_hash
            and row.get("sha256") == entry.sha256
            and row.get("mtime_ns") == status.st_mtime_ns
            and row.get("size_bytes") == status.st_size
        )
        if status.st_size != entry.size_bytes:
            bad.add(entry)
        elif not believed:
            doubtful[path] = entry
    digests = hash_files(doubtful)
    bad |= {entry for path, entry in doubtful.items() if digests[path] != entry.sha256}
    return [entry for entry in entries if entry in bad]


def _still_needed(incoming: Path, entries: Sequence[FileEntry]) -> int:
    """Bytes still to come, given what an interrupted run left behind."""
    total = 0
    for entry in entries:
        have = 0
        for candidate in (incoming / entry.path, partial_path(incoming / entry.path)):
            if candidate.exists():
                have = max(have, min(candidate.stat().st_size, entry.size_bytes))
        total += entry.size_bytes - have
    return total


def _check_space(
    models_dir: Path, needed_bytes: int, model: str, reserve_bytes: int, removable: Callable[[], str]
) -> None:
    place = models_dir
    while not place.exists():
        place = place.parent
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    if needed_bytes and free < needed_bytes + reserve_bytes:
        raise WeightsError(
            f"The disk of {models_dir} has {_gib(free)} GiB free. Needed: {_gib(needed_bytes)} GiB still to fetch "
            f"for {model} and {_gib(reserve_bytes)} GiB in reserve. Change: free "
            f"{_gib(needed_bytes + reserve_bytes - free)} GiB there, or set model_weights_dir to a larger disk."
            + removable()
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f}"


@contextmanager
def locked(path: Path, timeout_seconds: float) -> Iterator[None]:
    """Hold the revision's lock.

    Raises:
        WeightsError: another process was not done in time.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(path, str(os.getpid()), timeout_seconds))
        except LockHeldError as error:
            raise WeightsError(
                f"Process {error.holder} has been fetching the same revision for longer "
                f"than {timeout_seconds:.0f} s. Change: wait for it, or end it; its finished files are kept."
            ) from None
        yield


def _sync_directory(path: Path) -> None:
    handle: Optional[int] = None
    try:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
    finally:
        if handle is not None:
            os.close(handle)
