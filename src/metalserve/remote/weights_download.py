"""One file from a list of sources to the disk, proven by its SHA-256: ranges, pauses, a limit of rate, tokens.

A source is the base URL (http, https, file) or the absolute directory of a revision's files. What a source asks for is
honoured: Retry-After of 429 and 503 is waited for, a redirect is followed, and a token is sent to its own host only.
"""

from __future__ import annotations

import email.utils
import errno
import hashlib
import http.client
import os
import queue
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from .weights_hash import hash_file
from .weights_manifest import FileEntry, WeightsError

_CHUNK_BYTES = 1 << 20
# So much is on its way to the disk at a time: left to the kernel, a file would wait in memory until its end.
_FLUSH_BYTES = 128 << 20
# Answers that will be the same at the next try; 416 comes from a file shorter than what is here already.
_FINAL_ANSWERS = (401, 403, 404, 410, 416)
_WAIT_ANSWERS = (429, 503)
_LONGEST_PAUSE_SECONDS = 30.0
_SILENT_SECONDS = 300.0
# A transfer that moved this much before it broke does not count: a file of gigabytes may break more often than that.
_PROGRESS_BYTES = 1 << 20


class _TooLongError(OSError):
    """The source's file goes on where the manifest's file ends."""


class StoppedError(Exception):
    """Another file of the run could not be had: this one is left where it is."""


class RateLimit:
    """Shares so many bytes a second among all transfers of a run; 0 is no limit."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def pay(self, size_bytes: int) -> None:
        """Wait until so many bytes may have been taken."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size_bytes / self._rate
            pause = self._free_at - now
        if pause > 0:
            time.sleep(pause)


@dataclass
class Progress:
    """What a run has fetched so far; read by another thread while transfers write."""

    received_bytes: int = 0
    by_source: dict[str, int] = field(default_factory=dict)
    note: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, source: str, size_bytes: int) -> None:
        """Count bytes that came from a source; negative where they have to come again."""
        with self._lock:
            self.received_bytes += size_bytes
            self.by_source[source] = self.by_source.get(source, 0) + size_bytes


@dataclass(frozen=True)
class Transfer:
    """How files are fetched.

    Attributes:
        read_timeout_seconds: longest silence of a source before the attempt is given up.
        attempts: tries of each source for each file that bring nothing; pauses between them grow.
        patience_seconds: how long all told a source may make one file wait with Retry-After.
        peers: those of the sources that are other hosts of the fleet: they are waited for as long as they say that the
            file is on its way.
        tokens: {host or host:port: token}, sent as a bearer token to that host alone.
    """

    read_timeout_seconds: float = 60.0
    attempts: int = 5
    patience_seconds: float = 3600.0
    peers: Sequence[str] = ()
    tokens: Mapping[str, str] = field(default_factory=dict)
    limit: RateLimit = field(default_factory=lambda: RateLimit(0))
    progress: Progress = field(default_factory=Progress)
    log: Callable[[str], None] = lambda text: None
    stop: threading.Event = field(default_factory=threading.Event)
    silent_until: dict[str, float] = field(default_factory=dict)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows as usual, and leaves the token behind when the way leads to another host (a hub's storage)."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str) -> Any:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urllib.parse.urlsplit(newurl)[:2] != urllib.parse.urlsplit(req.full_url)[:2]:
            request.remove_header("Authorization")
        return request


_OPENER = urllib.request.build_opener(_Redirects)


def partial_path(path: Path) -> Path:
    """Where a file lies while it is being fetched."""
    return path.with_name(path.name + ".part")


def file_url(source: str, path: str) -> str:
    """The URL of a file at a source."""
    if source.startswith("/"):
        return Path(source, path).as_uri()
    return source.rstrip("/") + "/" + urllib.request.pathname2url(path)


def fetch_file(entry: FileEntry, target: Path, sources: Sequence[str], how: Transfer) -> None:
    """Fetch one file into `target` from the first source that gives the right bytes; goes on from what is there.

    Raises:
        WeightsError: no source gives it, or the disk is full.
        StoppedError: `how.stop` was set.
    """
    if how.stop.is_set():
        raise StoppedError
    target.parent.mkdir(parents=True, exist_ok=True)
    if _is_right(entry, target):
        return
    if _is_right(entry, partial_path(target)):
        # Complete when the run before this one was killed.
        os.replace(partial_path(target), target)
        return
    if not sources:
        raise WeightsError(
            f"No source is given for {entry.path}. Needed: at least one URL or directory. "
            "Change: the model's `sources`."
        )
    failures: list[str] = []
    # A source that did not even answer for the file before this one comes last for a while.
    ordered = sorted(sources, key=lambda source: how.silent_until.get(source, 0.0) > time.monotonic())
    for source in ordered:
        if _from_source(entry, source, target, how, failures):
            return
    raise WeightsError(
        f"{entry.path} could not be had with the right content; nothing was published. Found: {_told(failures)}. "
        "Change: the source, or the locked manifest when the file was meant to change (playbooks/ops/lock.yml)."
    )


def _is_right(entry: FileEntry, path: Path) -> bool:
    return path.exists() and path.stat().st_size == entry.size_bytes and hash_file(path) == entry.sha256


def _told(failures: Sequence[str]) -> str:
    """The failures in their order, each once with how often it came."""
    counted: dict[str, int] = {}
    for text in failures:
        counted[text] = counted.get(text, 0) + 1
    return "; ".join(text if times == 1 else f"{text} ({times} times)" for text, times in counted.items())


def _from_source(entry: FileEntry, source: str, target: Path, how: Transfer, failures: list[str]) -> bool:
    """Try one source until it gives the file or is given up; returns whether the file is there."""
    partial = partial_path(target)
    attempt, waited_seconds = 1, 0.0
    while True:
        before = _size(partial)
        try:
            found = _download(entry, source, partial, how)
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise WeightsError(
                    f"The disk of {target.parent} filled up while {entry.path} was being written. Needed: "
                    f"{entry.size_bytes / 2**30:.2f} GiB for this file. Change: free space there and run again; "
                    "what is complete is kept."
                ) from error
            asked = _retry_after(error)
            if asked is not None and source in how.peers:
                how.progress.note = f"waiting for {entry.path} at {_host(source)}, which is fetching it"
                time.sleep(asked)
                continue
            if asked is not None and waited_seconds + asked <= how.patience_seconds:
                how.log(f"{entry.path} from {source}: {error}; waiting {asked:.0f} s as it asks")
                how.progress.note = f"{_host(source)} asks to wait {asked:.0f} s ({_reason(error)})"
                time.sleep(asked)
                waited_seconds += asked
                continue
            failures.append(f"{source}: {_reason(error)}")
            how.log(f"{entry.path} from {source}, attempt {attempt}: {_reason(error)}")
            if isinstance(error, _TooLongError) or getattr(error, "code", None) in _FINAL_ANSWERS:
                return False
            if _size(partial) - before >= _PROGRESS_BYTES:
                attempt = 1
                failures.pop()
            elif attempt >= how.attempts:
                if not isinstance(error, urllib.error.HTTPError):
                    how.silent_until[source] = time.monotonic() + _SILENT_SECONDS
                return False
            pause = min(_LONGEST_PAUSE_SECONDS, 0.5 * 2.0**attempt) * random.uniform(0.5, 1.5)  # noqa: S311 (spreads hosts)
            how.progress.note = f"{_host(source)}: {_reason(error)}; trying again in {pause:.0f} s"
            time.sleep(pause)
            attempt += 1
            continue
        how.progress.note = ""
        if found == entry.sha256:
            os.replace(partial, target)
            return True
        partial.unlink()
        how.progress.add(source, -entry.size_bytes)
        failures.append(f"{source}: sha256 {found}, the manifest says {entry.sha256}")
        how.log(f"{entry.path} from {source}: sha256 {found}, the manifest says {entry.sha256}")
        return False


def _download(entry: FileEntry, source: str, partial: Path, how: Transfer) -> str:
    """Continue or start the download of one file; returns the SHA-256 of what came.

    Raises:
        OSError, HTTPException: connection trouble, or a file shorter or longer than the manifest says.
        ValueError: a source that is no URL.
    """
    have = _size(partial)
    if have >= entry.size_bytes:
        have = 0
    request = urllib.request.Request(file_url(source, entry.path))
    request.add_header("User-Agent", "metalserve")
    token = _token(request.full_url, how.tokens)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    if have and request.full_url.startswith("http"):
        request.add_header("Range", f"bytes={have}-")
    with _OPENER.open(request, timeout=how.read_timeout_seconds) as response:
        resumed = have > 0 and getattr(response, "status", None) == 206
        hasher = _Hasher()
        if resumed:
            with partial.open("rb") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    hasher.update(chunk)
        try:
            _receive(response, entry, source, partial, have if resumed else 0, hasher, how)
        finally:
            digest = hasher.finish()
    if resumed and digest != entry.sha256:
        # The part that was continued may have come from another source: this one is judged by what is all its own.
        how.progress.add(source, -(entry.size_bytes - have))
        partial.unlink()
        return _download(entry, source, partial, how)
    return digest


def _receive(
    response: Any, entry: FileEntry, source: str, partial: Path, written: int, hasher: _Hasher, how: Transfer
) -> None:
    # Without a buffer: what has been counted is in the file, also when the process is killed.
    with partial.open("ab" if written else "wb", buffering=0) as out, _Flusher(out.fileno()) as flusher:
        while chunk := response.read(_CHUNK_BYTES):
            if how.stop.is_set():
                raise StoppedError
            how.limit.pay(len(chunk))
            if written + len(chunk) > entry.size_bytes:
                # What is here is of no use to the next source.
                how.progress.add(source, -written)
                partial.unlink()
                raise _TooLongError(f"longer than the {entry.size_bytes} bytes of the manifest")
            hasher.update(chunk)
            view = memoryview(chunk)
            while view:
                view = view[out.write(view) :]
            written += len(chunk)
            how.progress.add(source, len(chunk))
            flusher.wrote(len(chunk))
    if written < entry.size_bytes:
        raise OSError(f"ended after {written} of {entry.size_bytes} bytes")


class _Flusher:
    """Brings a file to the disk while it is being written, and all of it at the end.

    Raises, at the end:
        OSError: the disk failed. The kernel tells each failure once, so the one that the thread met is raised here.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unasked_bytes = 0
        self._asked: queue.Queue[bool] = queue.Queue(maxsize=1)
        self._failure: Optional[OSError] = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Flusher:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._asked.put(False)
        self._thread.join()
        if kind is not None:
            return
        if self._failure:
            raise self._failure
        os.fsync(self._descriptor)

    def wrote(self, size_bytes: int) -> None:
        """Count what was written; while the disk is behind, the writer goes on."""
        self._unasked_bytes += size_bytes
        if self._unasked_bytes >= _FLUSH_BYTES and not self._asked.full():
            self._asked.put(True)
            self._unasked_bytes = 0

    def _run(self) -> None:
        while self._asked.get():
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                self._failure = self._failure or error


class _Hasher:
    """Hashes in a thread of its own, so that the network does not wait for it."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._chunks: queue.Queue[Optional[bytes]] = queue.Queue(maxsize=16)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            self._digest.update(chunk)

    def update(self, chunk: bytes) -> None:
        self._chunks.put(chunk)

    def finish(self) -> str:
        self._chunks.put(None)
        self._thread.join()
        return self._digest.hexdigest()


def _retry_after(error: Exception) -> Optional[float]:
    """The seconds that a source asks to wait, or None when it does not."""
    if not isinstance(error, urllib.error.HTTPError) or error.code not in _WAIT_ANSWERS:
        return None
    text = (error.headers.get("Retry-After") or "").strip()
    if text.isdigit():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def _token(url: str, tokens: Mapping[str, str]) -> Optional[str]:
    parts = urllib.parse.urlsplit(url)
    return tokens.get(parts.netloc) or tokens.get(parts.hostname or "")


def _reason(error: Exception) -> str:
    """The error in words; what a 401 and a 403 of a hub want is said."""
    code = getattr(error, "code", None)
    if code in (401, 403):
        return f"{error} (a gated or private repository: model_weights_tokens for this host, and its licence accepted)"
    return str(error)


def _host(source: str) -> str:
    return urllib.parse.urlsplit(source).netloc or source


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
