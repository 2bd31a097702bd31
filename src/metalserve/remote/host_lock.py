"""One run at a time on a host, and the name of whoever is at it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_NAME = ".lock"


class HostBusyError(Exception):
    """Another run is at work on this host; the text names it."""


@contextmanager
def host_lock(root: Path, holder: str, timeout_seconds: float) -> Iterator[None]:
    """Hold the lock of a host's deployments; the kernel drops it when the process dies, so no stale lock can remain.

    Args:
        root: where deployments keep their releases.
        holder: who this is, for whoever has to wait.
        timeout_seconds: how long to wait for another holder.

    Raises:
        HostBusyError: another holder was not done in time.
        OSError: the lock file cannot be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_seconds
    with (root / LOCK_NAME).open("a+", encoding="utf-8") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    stream.seek(0)
                    other = stream.read().strip() or "unknown"
                    raise HostBusyError(
                        f"Another run is at work on the deployments of this host: {other}. "
                        f"Needed: one run at a time; this one has waited {timeout_seconds:.0f} s. "
                        "Change: wait for it, or end that process on the host."
                    ) from None
                time.sleep(0.2)
        stream.seek(0)
        stream.truncate()
        # Read by whoever waits: written at once, not when the file is closed.
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        stream.write(f"{holder}, process {os.getpid()}, since {when}")
        stream.flush()
        yield
