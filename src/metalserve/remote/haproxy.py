"""What a running HAProxy knows about its servers, and what it is told, over its runtime socket."""

from __future__ import annotations

import csv
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Of `show servers state`: maintenance (1) or a drain (8) that somebody asked for. The other bits are HAProxy's own.
_ASKED_FOR = 1 | 8
_TYPE_SERVER = "2"
# HAProxy's averages are over so many requests, or over all that there were (TIME_STATS_SAMPLES).
AVERAGED_REQUESTS = 512


class HaproxyError(Exception):
    """HAProxy does not answer, or refuses what it was told; the text says which."""


@dataclass(frozen=True)
class Server:
    """A server of one pool, as HAProxy sees it.

    Args:
        pool: the back end.
        name: its name there.
        status: HAProxy's word, such as UP, DOWN, DRAIN, MAINT.
        admin: its administrative state as bits, 0 when nobody asked for anything.
        running: requests it works on.
        requests: requests it was given since HAProxy started, over reloads not.
        errors: connections that failed, answers that broke off, and answers with a status of 5xx.
        first_byte_ms: HAProxy's average of the time to the first byte of an answer.
    """

    pool: str
    name: str
    status: str
    admin: int
    running: int
    requests: int
    errors: int
    first_byte_ms: int

    @property
    def up(self) -> bool:
        """Whether it is given requests."""
        return self.status.startswith("UP") or self.status == "no check"

    @property
    def drained(self) -> bool:
        """Whether somebody has taken it out."""
        return bool(self.admin & _ASKED_FOR)

    @property
    def healthy(self) -> bool:
        """Whether it would answer, drained or not."""
        return self.up or self.status.startswith("DRAIN")


class Haproxy:
    """A running HAProxy, by its runtime socket."""

    def __init__(self, path: Path, timeout_seconds: float = 10.0) -> None:
        self._path = path
        self._timeout_seconds = timeout_seconds

    def ask(self, command: str) -> str:
        """What HAProxy answers to one command.

        Raises:
            HaproxyError: nothing listens, or it does not answer in time.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self._timeout_seconds)
                connection.connect(str(self._path))
                connection.sendall(f"{command}\n".encode())
                pieces = []
                while piece := connection.recv(65536):
                    pieces.append(piece)
        except OSError as error:
            raise HaproxyError(
                f"HAProxy does not answer at {self._path}: {error.strerror or error}. Needed: the gateway's HAProxy, "
                "running. Change: run playbooks/gateway.yml, or look at `systemctl status haproxy`."
            ) from None
        return b"".join(pieces).decode("utf-8", "replace")

    def servers(self) -> list[Server]:
        """All servers of all pools.

        Raises:
            HaproxyError: as for `ask`.
        """
        states = {}
        for line in self.ask("show servers state").splitlines():
            words = line.split()
            if len(words) > 6 and words[0].isdigit():
                states[words[1], words[3]] = int(words[6])
        rows = csv.DictReader(self.ask("show stat").lstrip("# ").splitlines())
        return [
            _server(row, states.get((row["pxname"], row["svname"]), 0)) for row in rows if row["type"] == _TYPE_SERVER
        ]

    def tell(self, server: Server, state: str) -> None:
        """Set a server to `drain` or `ready`.

        Raises:
            HaproxyError: HAProxy refuses it.
        """
        self._command(f"set server {server.pool}/{server.name} state {state}")

    def end_sessions(self, server: Server) -> None:
        """End what a server works on; its clients see their answers break off.

        Raises:
            HaproxyError: HAProxy refuses it.
        """
        self._command(f"shutdown sessions server {server.pool}/{server.name}")

    def _command(self, command: str) -> None:
        answer = self.ask(command).strip()
        if answer:
            raise HaproxyError(f"HAProxy refuses `{command}`: {answer}. Needed: a server of this gateway.")


def _server(row: dict[str, str], admin: int) -> Server:
    def number(name: str) -> int:
        return int(row.get(name) or 0)

    return Server(
        pool=row["pxname"],
        name=row["svname"],
        status=row["status"],
        admin=admin,
        running=number("scur"),
        requests=number("stot"),
        errors=number("econ") + number("eresp") + number("hrsp_5xx"),
        first_byte_ms=number("rtime"),
    )


def first_byte_ms_between(before: Server, after: Server) -> float | None:
    """The mean time to the first byte of the requests between two looks, in ms; None without any.

    HAProxy keeps one average over the last requests: each new one moves it by its part of the window. So the average
    before and after, and the number of requests in between, give the mean of those.
    """
    count = after.requests - before.requests
    if count <= 0:
        return None
    window = max(1, min(AVERAGED_REQUESTS, after.requests))
    kept = (1 - 1 / window) ** count
    return max(0.0, (after.first_byte_ms - before.first_byte_ms * kept) / (1 - kept)) if kept < 1 else None


def named(servers: Iterable[Server], names: Iterable[str]) -> list[Server]:
    """The servers of these names, in every pool that has them."""
    wanted = set(names)
    return [server for server in servers if server.name in wanted]
