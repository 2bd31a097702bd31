"""Taking servers out of a gateway and putting them back, for a rollout and for a person.

The gateway itself remembers what is drained (HAProxy's state file, written by `keep-states`). Which of these a rollout
has taken out is remembered beside it, in `drained.json`: only those are put back by a later rollout, and what a person
has drained stays out until a person puts it back.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from .files import read_json_object, write_json
from .haproxy import Haproxy, Server, first_byte_ms_between, named

DRAINED_FILE = "drained.json"
_POLL_SECONDS = 0.5


class GatewayRefusalError(Exception):
    """What was asked for will not be done; the text says why, what is needed and what to change."""


class Gateway:
    """The servers of one gateway.

    Args:
        haproxy: the running HAProxy.
        directory: where it is kept which servers a rollout has taken out.
        keep_states: the program that has HAProxy's states kept over a restart; None leaves that out.
    """

    def __init__(self, haproxy: Haproxy, directory: Path, keep_states: Optional[Path]) -> None:
        self._haproxy = haproxy
        self._directory = directory
        self._keep_states = keep_states

    def look(self) -> list[dict[str, Any]]:
        """Each server with its pool, status, running requests, and who has drained it (`rollout`, `operator`, None)."""
        ours = self._ours()
        return [
            {
                "pool": server.pool,
                "name": server.name,
                "status": server.status,
                "up": server.up,
                "running": server.running,
                "drained_by": ("rollout" if server.name in ours else "operator") if server.drained else None,
            }
            for server in self._haproxy.servers()
        ]

    def drain(self, names: Sequence[str], by: str, keep: Mapping[str, int], *, dry_run: bool = False) -> bool:
        """Give these servers nothing new; returns whether that was a change.

        Args:
            names: the servers.
            by: `rollout` or `operator`. A server that a person has drained stays that person's.
            keep: servers of a pool that must be up without these, by pool. A server that is not up takes nothing away.

        Raises:
            GatewayRefusalError: too few servers of a pool would be left.
        """
        servers = self._haproxy.servers()
        chosen = named(servers, names)
        for pool in {server.pool for server in chosen if server.up}:
            here = [server for server in servers if server.pool == pool]
            left = [server.name for server in here if server.up and server.name not in names]
            if len(left) < keep.get(pool, 0):
                states = ", ".join(f"{server.name} {server.status}" for server in here)
                raise GatewayRefusalError(
                    f"Without {', '.join(sorted(names))} only {len(left)} of {len(here)} engines would serve {pool} "
                    f"({states}). Needed: {keep[pool]}. Change: bring the others back, or rollout_min_serving."
                )
        open_ones = [server for server in chosen if not server.drained]
        ours = self._ours()
        wanted = dict(ours)
        if by == "rollout":
            # Written before it is done: a run killed in between leaves a note too many, which does no harm.
            wanted.update({server.name: by for server in open_ones})
        else:
            wanted = {name: who for name, who in ours.items() if name not in names}
        changed = bool(open_ones) or wanted != ours
        if changed and not dry_run:
            self._note(wanted)
            for server in open_ones:
                self._haproxy.tell(server, "drain")
            self._keep()
        return changed

    def undrain(self, names: Sequence[str], by: str, seconds: float = 0, *, dry_run: bool = False) -> bool:
        """Put servers back and wait until they are up; returns whether that was a change.

        Args:
            names: the servers.
            by: `rollout` puts back only what a rollout has drained, `operator` all of them.
            seconds: how long to wait for HAProxy to find them well; 0 does not wait.

        Raises:
            GatewayRefusalError: one of them is not up in time.
        """
        ours = self._ours()
        back = [
            server
            for server in named(self._haproxy.servers(), names)
            if server.drained and (by == "operator" or server.name in ours)
        ]
        wanted = {name: who for name, who in ours.items() if name not in names}
        changed = bool(back) or wanted != ours
        if changed and not dry_run:
            for server in back:
                self._haproxy.tell(server, "ready")
            self._note(wanted)
            self._keep()
        if back and seconds and not dry_run:
            self._until(lambda server: server.up, [server.name for server in back], seconds, "up")
        return changed

    def wait_idle(self, names: Sequence[str], seconds: float) -> dict[str, int]:
        """Wait until these servers work on nothing; returns what they still work on, by name, when the time is over."""
        end = time.monotonic() + seconds
        while True:
            left: dict[str, int] = {}
            for server in named(self._haproxy.servers(), names):
                if server.running:
                    left[server.name] = left.get(server.name, 0) + server.running
            if not left or time.monotonic() >= end:
                return left
            time.sleep(_POLL_SECONDS)

    def end_sessions(self, names: Sequence[str]) -> None:
        """End what these servers work on."""
        for server in named(self._haproxy.servers(), names):
            if server.running:
                self._haproxy.end_sessions(server)

    def wait_healthy(self, names: Sequence[str], seconds: float) -> None:
        """Wait until the gateway finds these servers well, drained as they are.

        Raises:
            GatewayRefusalError: it does not in time.
        """
        self._until(lambda server: server.healthy, names, seconds, "well")

    def counters(self, names: Sequence[str]) -> dict[str, Any]:
        """The counters of all servers in the pools of these, for `judge` later on."""
        servers = self._haproxy.servers()
        pools = {server.pool for server in named(servers, names)}
        return {"when": time.time(), "rows": [vars(server) for server in servers if server.pool in pools]}

    def watch(
        self, names: Sequence[str], before: Mapping[str, Any], seconds: float, limits: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Wait until so many seconds have passed since `before`, and judge what was served meanwhile; see `judge`."""
        time.sleep(max(0.0, min(seconds, float(before["when"]) + seconds - time.time())))
        return judge(names, [Server(**row) for row in before["rows"]], self._haproxy.servers(), limits)

    def _until(self, condition: Any, names: Sequence[str], seconds: float, word: str) -> None:
        end = time.monotonic() + seconds
        while True:
            waiting = [server for server in named(self._haproxy.servers(), names) if not condition(server)]
            if not waiting:
                return
            if time.monotonic() >= end:
                states = ", ".join(f"{server.pool}/{server.name} {server.status}" for server in waiting)
                raise GatewayRefusalError(
                    f"After {seconds:.0f} s this gateway does not find them {word}: {states}. Needed: an engine that "
                    "answers its health route to the gateway. Change: the address of the host (serving_address), or "
                    "what lies between gateway and engine."
                )
            time.sleep(_POLL_SECONDS)

    def _ours(self) -> dict[str, Any]:
        return read_json_object(self._directory / DRAINED_FILE)

    def _note(self, drained: Mapping[str, Any]) -> None:
        if drained != self._ours():
            self._directory.mkdir(parents=True, exist_ok=True)
            write_json(self._directory / DRAINED_FILE, dict(drained))

    def _keep(self) -> None:
        if self._keep_states is not None:
            subprocess.run([str(self._keep_states)], check=True, capture_output=True, timeout=60)


def judge(
    names: Sequence[str], before: Sequence[Server], after: Sequence[Server], limits: Mapping[str, Any]
) -> dict[str, Any]:
    """Whether servers may stay in, from HAProxy's counters at two moments.

    Args:
        names: the servers.
        before: all servers of their pools at the first moment.
        after: all servers at the second.
        limits: `errors_percent` of the requests that may fail; `latency_factor`, how many times the mean first-byte
            time of the others in its pool its own may be (0: not judged); `min_requests` without which a time is
            not compared.

    Returns:
        ok, requests, errors, first_byte_ms and others_first_byte_ms (None: not known), and `text`, one line.
    """
    first = {(server.pool, server.name): server for server in before}
    pairs = [(first[server.pool, server.name], server) for server in after if (server.pool, server.name) in first]
    # Counters begin again with a reload.
    pairs = [(old, new) for old, new in pairs if new.requests >= old.requests]
    ours = [pair for pair in pairs if pair[1].name in names]
    requests = sum(new.requests - old.requests for old, new in ours)
    errors = sum(max(0, new.errors - old.errors) for old, new in ours)
    mine = _mean(ours, limits["min_requests"])
    others = _mean([pair for pair in pairs if pair[1].name not in names], limits["min_requests"])
    reasons = []
    if errors * 100 > float(limits["errors_percent"]) * requests:
        reasons.append(f"more than {limits['errors_percent']} % of them failed")
    factor = limits.get("latency_factor")
    # Below 50 ms a factor tells nothing.
    if factor and mine is not None and others is not None and mine > factor * max(others, 50.0):
        reasons.append(f"more than {factor} times the {others:.0f} ms of the other engines")
    time_text = f", first byte after {mine:.0f} ms" if mine is not None else ""
    text = f"{requests} requests, {errors} failed{time_text}"
    return {
        "ok": not reasons,
        "requests": requests,
        "errors": errors,
        "first_byte_ms": mine,
        "others_first_byte_ms": others,
        "text": text + (f": {'; '.join(reasons)}" if reasons else ""),
    }


def _mean(pairs: Sequence[tuple[Server, Server]], min_requests: int) -> Optional[float]:
    weighted = [(new.requests - old.requests, first_byte_ms_between(old, new)) for old, new in pairs]
    known = [(count, value) for count, value in weighted if value is not None]
    total = sum(count for count, _ in known)
    return round(sum(count * value for count, value in known) / total, 1) if total and total >= min_requests else None
