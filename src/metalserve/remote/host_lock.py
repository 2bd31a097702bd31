"""One run at a time on a host, and the name of whoever is at it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .file_lock import LockHeldError, file_lock

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
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with ExitStack() as stack:
        try:
            stack.enter_context(
                file_lock(root / LOCK_NAME, f"{holder}, process {os.getpid()}, since {when}", timeout_seconds)
            )
        except LockHeldError as error:
            raise HostBusyError(
                f"Another run is at work on the deployments of this host: {error.holder}. "
                f"Needed: one run at a time; this one has waited {timeout_seconds:.0f} s. "
                "Change: wait for it, or end that process on the host."
            ) from None
        yield
