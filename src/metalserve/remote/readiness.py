"""Wait until an engine answers, or say at once that its unit has died and what it said last."""

from __future__ import annotations

import http.client
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from .failures import Failure, find_failures

Runner = Callable[[Sequence[str]], str]
# A traceback of an engine with workers fills hundreds of lines; the cause stands above it.
EXPLAINED_LINES = 600
# At which weights are read at worst, from a disk that others use as well.
SLOWEST_READ_BYTES_PER_SECOND = 200_000_000
_PROPERTIES = "LoadState,ActiveState,SubState,InvocationID,NRestarts,Result,ExecMainStatus"


@dataclass(frozen=True)
class Readiness:
    """What became of the wait: ready or not, after how many seconds, with the reason and the journal's last lines.

    `failures` is what the journal says about the cause, the most telling first.
    """

    ready: bool
    seconds: float
    message: str
    journal: tuple[str, ...]
    failures: tuple[Failure, ...] = ()

    def explained(self) -> str:
        """The message with the causes that were recognised, each on a line of its own."""
        return "\n".join([self.message, *(failure.sentence() for failure in self.failures)])


def start_limit(
    endpoint: Mapping[str, Any],
    ready_timeout_seconds: float,
    slowest_read_bytes_per_second: float = SLOWEST_READ_BYTES_PER_SECOND,
) -> float:
    """Seconds that the start of a release may take: for everything but reading its weights, and for these."""
    return ready_timeout_seconds + int(endpoint.get("weights_bytes") or 0) / slowest_read_bytes_per_second


def run_command(argv: Sequence[str]) -> str:
    """Standard output of a command; empty when it fails or takes longer than 20 s."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def answers(url: str) -> bool:
    """Whether a GET of the URL gives 200 within 5 s."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException, ValueError):
        return False


def wait_until_ready(
    unit: str,
    url: str,
    timeout_seconds: float,
    *,
    run: Runner = run_command,
    probe: Callable[[str], bool] = answers,
    journal_lines: int = 40,
    pause_seconds: float = 1.0,
    since: Optional[float] = None,
) -> Readiness:
    """Wait for the engine's readiness route while its unit lives.

    Args:
        unit: the systemd unit.
        url: the readiness route; 200 means that the engine serves.
        timeout_seconds: after this long a unit that still lives is given up.
        run: runs a command and returns its output.
        probe: asks the URL.
        journal_lines: how much of the journal goes into the result when the wait fails.
        pause_seconds: between two looks.
        since: where the journal of this start begins, in seconds since the epoch; without it all of it is looked at.
    """
    start = time.monotonic()
    first: Mapping[str, str] = {}
    while True:
        state = _state(unit, run)
        first = first or state
        seconds = time.monotonic() - start
        died = _why_dead(state, first)
        ready = not died and probe(url)
        if ready:
            # The unit once more: an answer on the port may come from somebody else after the engine died.
            died = _why_dead(_state(unit, run), first)
        if died:
            return _failed(unit, seconds, f"{unit} died: {died}", run, journal_lines, since)
        if ready:
            return Readiness(True, seconds, f"{unit} answers after {seconds:.0f} s", ())
        if seconds > timeout_seconds:
            text = f"{unit} lives but {url} does not answer after {seconds:.0f} s"
            return _failed(unit, seconds, text, run, journal_lines, since)
        time.sleep(pause_seconds)


def _state(unit: str, run: Runner) -> dict[str, str]:
    lines = run(["systemctl", "show", unit, f"--property={_PROPERTIES}"]).splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def _why_dead(state: Mapping[str, str], first: Mapping[str, str]) -> str:
    """Why the unit counts as dead, or an empty text.

    A unit that systemd starts again is dead too: the engine that was being waited for is gone.
    """
    result = f"result {state.get('Result', 'unknown')}, exit status {state.get('ExecMainStatus', 'unknown')}"
    if not state or state.get("LoadState") == "not-found":
        return "systemd does not know it"
    if state.get("ActiveState") in ("failed", "inactive"):
        return result
    # auto-restart-queued since systemd 254.
    if state.get("SubState", "").startswith("auto-restart"):
        return f"{result}, systemd is about to start it again"
    restarted = any(state.get(name) != first.get(name) for name in ("InvocationID", "NRestarts"))
    return f"systemd has started it again ({result})" if restarted else ""


def read_journal(unit: str, run: Runner, since: Optional[float] = None, lines: int = EXPLAINED_LINES) -> list[str]:
    """The last lines of a unit's journal, since a moment in seconds since the epoch."""
    bound = [] if since is None else [f"--since=@{since:.0f}"]
    text = run(["journalctl", "--unit", unit, "--lines", str(lines), "--output", "cat", "--no-pager", *bound])
    return text.splitlines()


def _failed(
    unit: str, seconds: float, message: str, run: Runner, journal_lines: int, since: Optional[float]
) -> Readiness:
    lines = read_journal(unit, run, since)
    return Readiness(False, seconds, message, tuple(lines[-journal_lines:]), tuple(find_failures(lines)))
