"""The lock of a whole rollout: a lease that names its holder, kept on the gateways, or on the hosts without any.

A lease is renewed by every step of the rollout and ends by itself when its controller has died. Time is that of the
machine that keeps it.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

from .files import read_json_object, write_json

LOCK_FILE = "rollout.json"


class RolloutLockedError(Exception):
    """Another rollout holds the lock; `holder` is its record."""

    def __init__(self, holder: Mapping[str, Any]) -> None:
        self.holder = dict(holder)
        super().__init__(
            f"Another rollout is at work: {describe(holder)}. Needed: one rollout at a time. Change: wait for it; when "
            f"it is dead, its lock ends by itself at {_clock(holder.get('until'))}, or is taken with "
            "-e rollout_take_lock=true."
        )


def describe(record: Mapping[str, Any]) -> str:
    """Who holds a lock, since when, and at what, as one phrase."""
    return (
        f"{record.get('who', 'somebody')}, process {record.get('process', 'unknown')}, since "
        f"{_clock(record.get('since'))}, {record.get('what') or 'a rollout'}"
    )


def hold(
    directory: Path,
    holder: Mapping[str, Any],
    seconds: float,
    *,
    take_from: Optional[str] = None,
    take: bool = False,
    now: Optional[float] = None,
) -> dict[str, Any]:
    """Take the lock, or renew it; returns the record that was replaced when it was somebody else's, else nothing.

    Args:
        directory: where the lock lies; it is made.
        holder: `token` (what tells rollouts apart), `who`, `process`, `what`, and whatever else shall be kept.
        seconds: how long the lease lasts from now on.
        take_from: the token of a holder that is known to be dead, whose lock may be taken.
        take: take it from anybody.
        now: seconds since the epoch, for tests.

    Raises:
        RolloutLockedError: somebody else holds it.
        OSError: the record cannot be written.
    """
    moment = time.time() if now is None else now
    with _alone(directory):
        found = read_json_object(directory / LOCK_FILE)
        mine = found.get("token") == holder["token"]
        free = not found or mine or float(found.get("until") or 0) <= moment
        if not (free or take or found.get("token") == take_from):
            raise RolloutLockedError(found)
        since = found.get("since", moment) if mine else moment
        write_json(directory / LOCK_FILE, {**holder, "since": since, "until": moment + seconds})
    return {} if mine else found


def release(directory: Path, token: str) -> bool:
    """Give the lock back; returns whether it was held. One of somebody else is left alone.

    Raises:
        OSError: the record cannot be removed.
    """
    if not (directory / LOCK_FILE).exists():
        return False
    with _alone(directory):
        if read_json_object(directory / LOCK_FILE).get("token") != token:
            return False
        (directory / LOCK_FILE).unlink()
    return True


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".rollout.lock").open("a", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _clock(seconds: Any) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(float(seconds)))
    except (TypeError, ValueError):
        return "an unknown time"
