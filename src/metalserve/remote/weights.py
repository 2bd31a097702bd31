"""Put the files of one model revision on disk, each proven by its SHA-256, published whole or not at all.

Layout under the models directory:

    <model>/<revision>/...                  published, complete and proven
    <model>/<revision>/.metalserve.json     the manifest, with size and mtime of each file at its last full hash
    .incoming/<model>@<revision>/...        being fetched; what is complete there is not fetched again
    .incoming/<model>@<revision>.lock       one run at a time

The published directory appears by one rename, so that no reader ever sees half a model.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

RECORD_NAME = ".metalserve.json"
MANIFEST_NAME = "metalserve-manifest.json"
_CHUNK_BYTES = 4 << 20
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Answers that will be the same at the next try; 416 comes from a file shorter than what is here already.
_FINAL_ANSWERS = (401, 403, 404, 410, 416)


class WeightsError(Exception):
    """A sentence: what was found, what is needed, what to change."""


class _TooLongError(OSError):
    """The source's file goes on where the manifest's file ends."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a manifest: path relative to the model directory, size in bytes, SHA-256 in lower-case hex."""

    path: str
    size_bytes: int
    sha256: str


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


def parse_manifest(files: Sequence[Mapping[str, Any]]) -> tuple[FileEntry, ...]:
    """Check a manifest's file list and return it as entries.

    Raises:
        WeightsError: for an empty list, a path that leaves the directory, or a malformed size or hash.
    """
    if not files:
        raise WeightsError(
            "The manifest lists no files. Needed: path, size_bytes and sha256 of every file. "
            "Change: run playbooks/ops/lock.yml for this model."
        )
    entries = []
    for item in files:
        if not isinstance(item, Mapping):
            raise WeightsError(f"The manifest has the entry {item!r}. Needed: path, size_bytes and sha256 of a file.")
        path, size, digest = str(item.get("path", "")), item.get("size_bytes"), str(item.get("sha256", ""))
        parts = Path(path).parts
        plain = path == Path(path).as_posix() and path.isprintable()
        if not parts or not plain or path.startswith("/") or ".." in parts or parts[0] == RECORD_NAME:
            raise WeightsError(f"The manifest names the file {path!r}. Needed: a path inside the model's directory.")
        if isinstance(size, bool) or not isinstance(size, int) or size < 0 or not _SHA256.fullmatch(digest):
            raise WeightsError(
                f"The manifest's entry for {path} has size {size!r} and hash {digest!r}. "
                "Needed: a whole number of bytes and 64 hex digits of SHA-256."
            )
        entries.append(FileEntry(path, int(size), digest))
    if len({entry.path for entry in entries}) != len(entries):
        raise WeightsError("The manifest lists a path twice. Needed: each file once.")
    return tuple(entries)


def manifest_sha256(files: Sequence[Mapping[str, Any]]) -> str:
    """The SHA-256 of a manifest's canonical form: one line `<sha256>  <size>  <path>` a file, sorted by path."""
    lines = sorted((e.path, f"{e.sha256}  {e.size_bytes}  {e.path}\n") for e in parse_manifest(files))
    return hashlib.sha256("".join(line for _, line in lines).encode()).hexdigest()


def make_manifest(directory: Path) -> list[dict[str, Any]]:
    """Hash every file below a directory, except hidden ones and a manifest already there.

    Raises:
        WeightsError: when the directory holds no file.
    """
    found = []
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        name = path.relative_to(directory).as_posix()
        if name == MANIFEST_NAME or any(part.startswith(".") for part in Path(name).parts):
            continue
        found.append({"path": name, "size_bytes": path.stat().st_size, "sha256": _hash_file(path)})
    if not found:
        raise WeightsError(f"{directory} holds no files. Needed: the directory of a model.")
    return found


def ensure_model(
    models_dir: Path,
    model: str,
    revision: str,
    files: Sequence[Mapping[str, Any]],
    sources: Sequence[str],
    *,
    dry_run: bool = False,
    full_hash: bool = False,
    reserve_bytes: int = 1 << 30,
    lock_timeout_seconds: float = 3600.0,
    read_timeout_seconds: float = 60.0,
    attempts: int = 3,
    log: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Bring one revision to its published place, fetching only what is missing or damaged.

    Args:
        models_dir: where models live; made when missing.
        model, revision: names of the two directory levels.
        files: the manifest's list of {path, size_bytes, sha256}.
        sources: base URLs (http, https, file) or absolute directories, tried in order for each file.
        dry_run: look and check (disk space included), change nothing.
        full_hash: hash published files even when size and mtime are those of the last hash.
        reserve_bytes: free space that must remain on the disk afterwards.
        lock_timeout_seconds: how long to wait for another run on the same revision.
        read_timeout_seconds: longest silence of a source before the attempt is given up.
        attempts: tries of each source for each file, with growing pauses between them.

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
    incoming = models_dir / ".incoming" / f"{model}@{revision}"
    if dry_run:
        bad = _damaged(final, entries, full_hash=full_hash) if final.is_dir() else list(entries)
        needed_bytes = _still_needed(incoming, bad)
        _check_space(models_dir, needed_bytes, model, reserve_bytes)
        outcome = _outcome(final, bad, needed_bytes, [], final.is_dir(), "would fetch")
        return replace(outcome, record_stale=not bad and _record_rows(final, entries) != _read_record(final))

    incoming.parent.mkdir(parents=True, exist_ok=True)
    with _locked(incoming.with_name(incoming.name + ".lock"), lock_timeout_seconds):
        published = final.is_dir()
        bad = _damaged(final, entries, full_hash=full_hash) if published else list(entries)
        needed_bytes = _still_needed(incoming, bad)
        if bad:
            _check_space(models_dir, needed_bytes, model, reserve_bytes)
            incoming.mkdir(exist_ok=True)
            for entry in bad:
                _fetch(entry, incoming / entry.path, sources, read_timeout_seconds, attempts, log)
            if published:
                # A running engine keeps the old file open; the rename gives later readers the right one.
                for entry in bad:
                    (final / entry.path).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(incoming / entry.path, final / entry.path)
                shutil.rmtree(incoming)
            else:
                _drop_strangers(incoming, entries)
                _write_record(incoming, entries)
                final.parent.mkdir(parents=True, exist_ok=True)
                _sync_directory(incoming)
                incoming.rename(final)
                _sync_directory(final.parent)
        # Also after a look that had to hash: what is proven now is believed at the next run.
        _write_record(final, entries)
    return _outcome(final, bad, needed_bytes, bad if published else [], published, "fetched")


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


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _drop_strangers(incoming: Path, entries: Sequence[FileEntry]) -> None:
    """Remove what a run with another manifest left behind: only proven files are published."""
    wanted = {incoming / entry.path for entry in entries}
    for path in list(incoming.rglob("*")):
        if path not in wanted and not path.is_dir():
            path.unlink()


def _record_rows(directory: Path, entries: Sequence[FileEntry]) -> dict[str, dict[str, Any]]:
    rows = {}
    for entry in entries:
        status = (directory / entry.path).stat()
        rows[entry.path] = {
            "size_bytes": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "sha256": entry.sha256,
        }
    return rows


def _write_record(directory: Path, entries: Sequence[FileEntry]) -> None:
    """Write down size and mtime of files that are proven, unless that is what the record says."""
    rows = _record_rows(directory, entries)
    if rows == _read_record(directory):
        return
    temporary = directory / (RECORD_NAME + ".new")
    temporary.write_text(json.dumps({"schema": 1, "files": rows}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, directory / RECORD_NAME)


def _read_record(directory: Path) -> Mapping[str, Any]:
    """The record's rows by path; empty when there is none that can be read."""
    try:
        rows = json.loads((directory / RECORD_NAME).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {path: row for path, row in rows.items() if isinstance(row, Mapping)} if isinstance(rows, Mapping) else {}


def _damaged(directory: Path, entries: Sequence[FileEntry], *, full_hash: bool) -> list[FileEntry]:
    """The entries whose file is missing or not what the manifest says.

    A file with the size and mtime of its last full hash is believed, unless `full_hash` asks again.
    """
    known = _read_record(directory)
    bad = []
    for entry in entries:
        path = directory / entry.path
        try:
            status = path.stat()
        except OSError:
            bad.append(entry)
            continue
        row = known.get(entry.path, {})
        believed = (
            not full_hash
            and row.get("sha256") == entry.sha256
            and row.get("mtime_ns") == status.st_mtime_ns
            and row.get("size_bytes") == status.st_size
        )
        if status.st_size != entry.size_bytes or not (believed or _hash_file(path) == entry.sha256):
            bad.append(entry)
    return bad


def _still_needed(incoming: Path, entries: Sequence[FileEntry]) -> int:
    """Bytes still to come, given what an interrupted run left behind."""
    total = 0
    for entry in entries:
        have = 0
        for candidate in (incoming / entry.path, _partial(incoming / entry.path)):
            if candidate.exists():
                have = max(have, min(candidate.stat().st_size, entry.size_bytes))
        total += entry.size_bytes - have
    return total


def _check_space(models_dir: Path, needed_bytes: int, model: str, reserve_bytes: int) -> None:
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
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f}"


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _fetch(
    entry: FileEntry,
    target: Path,
    sources: Sequence[str],
    timeout: float,
    attempts: int,
    log: Callable[[str], None],
) -> None:
    """Fetch one file into `target` from the first source that gives the right bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and target.stat().st_size == entry.size_bytes and _hash_file(target) == entry.sha256:
        return
    if not sources:
        raise WeightsError(
            f"No source is given for {entry.path}. Needed: at least one URL or directory. "
            "Change: the model's `sources`."
        )
    failures = []
    for source in sources:
        for attempt in range(1, attempts + 1):
            try:
                found = _download(entry, source, _partial(target), timeout)
            except (OSError, ValueError, http.client.HTTPException) as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise WeightsError(
                        f"The disk of {target.parent} filled up while {entry.path} was being written. Needed: "
                        f"{_gib(entry.size_bytes)} GiB for this file. Change: free space there and run again; "
                        "what is complete is kept."
                    ) from error
                failures.append(f"{source}: {error}")
                log(f"{entry.path} from {source}, attempt {attempt}: {error}")
                if isinstance(error, _TooLongError) or getattr(error, "code", None) in _FINAL_ANSWERS:
                    break
                if attempt < attempts:
                    time.sleep(min(30.0, 0.5 * 2**attempt))
                continue
            if found == entry.sha256:
                os.replace(_partial(target), target)
                return
            _partial(target).unlink()
            failures.append(f"{source}: sha256 {found}, the manifest says {entry.sha256}")
            break
    raise WeightsError(
        f"{entry.path} could not be had with the right content; nothing was published. Found: {'; '.join(failures)}. "
        "Change: the source, or the locked manifest when the file was meant to change (playbooks/ops/lock.yml)."
    )


def _download(entry: FileEntry, source: str, partial: Path, timeout: float) -> str:
    """Continue or start the download of one file; returns the SHA-256 of what came.

    Raises:
        OSError, HTTPException: connection trouble, or a file shorter or longer than the manifest says.
        ValueError: a source that is no URL.
    """
    url = source.rstrip("/") + "/" + urllib.request.pathname2url(entry.path)
    if source.startswith("/"):
        url = Path(source, entry.path).as_uri()
    have = partial.stat().st_size if partial.exists() else 0
    if have >= entry.size_bytes:
        have = 0
    request = urllib.request.Request(url)
    if have and url.startswith("http"):
        request.add_header("Range", f"bytes={have}-")
    digest = hashlib.sha256()
    with urllib.request.urlopen(request, timeout=timeout) as response:
        resumed = have > 0 and getattr(response, "status", None) == 206
        if resumed:
            with partial.open("rb") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    digest.update(chunk)
        written = have if resumed else 0
        with partial.open("ab" if resumed else "wb") as out:
            while chunk := response.read(_CHUNK_BYTES):
                written += len(chunk)
                if written > entry.size_bytes:
                    # What is here is of no use to the next source.
                    partial.unlink()
                    raise _TooLongError(f"longer than the {entry.size_bytes} bytes of the manifest")
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    if written < entry.size_bytes:
        raise OSError(f"ended after {written} of {entry.size_bytes} bytes")
    if resumed and digest.hexdigest() != entry.sha256:
        # The part that was continued may have come from another source: this one is judged by what is all its own.
        partial.unlink()
        return _download(entry, source, partial, timeout)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path, timeout_seconds: float) -> Iterator[None]:
    """Hold the revision's lock; the kernel drops it when the process dies, so no stale lock can remain."""
    deadline = time.monotonic() + timeout_seconds
    with path.open("a+", encoding="utf-8") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    stream.seek(0)
                    raise WeightsError(
                        f"Process {stream.read().strip() or 'unknown'} has been fetching the same revision for longer "
                        f"than {timeout_seconds:.0f} s. Change: wait for it, or end it; its finished files are kept."
                    ) from None
                time.sleep(0.2)
        stream.seek(0)
        stream.truncate()
        stream.write(str(os.getpid()))
        stream.flush()
        yield


def _sync_directory(path: Path) -> None:
    handle: Optional[int] = None
    try:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
    finally:
        if handle is not None:
            os.close(handle)
