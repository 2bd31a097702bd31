"""A lock on a file, with the name of whoever holds it; the kernel drops it when the process dies: none can be stale."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class LockHeldError(Exception):
    """Somebody else holds the lock and was not done in time; `holder` is what they wrote."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


@contextmanager
def file_lock(path: Path, holder: str, timeout_seconds: float) -> Iterator[None]:
    """Hold the lock of a file, which is made when it is missing.

    Args:
        path: the file; its directory exists.
        holder: who this is, written into the file for whoever has to wait.
        timeout_seconds: how long to wait for another holder.

    Raises:
        LockHeldError: another holder was not done in time.
        OSError: the file cannot be made.
    """
    deadline = time.monotonic() + timeout_seconds
    with path.open("a+", encoding="utf-8") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    stream.seek(0)
                    raise LockHeldError(stream.read().strip() or "unknown") from None
                time.sleep(0.2)
        stream.seek(0)
        stream.truncate()
        # Read by whoever waits: written at once, not when the file is closed.
        stream.write(holder)
        stream.flush()
        yield
