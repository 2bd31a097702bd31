"""Finds engines that live but produce nothing, and starts them again within a budget.

Health routes answer 200 while an engine hangs: what tells is that requests wait and no token is made. Both are in the
engine's own metrics, but it is the core of an engine that counts the requests: a core that hung while it had none never
tells of those that came later. So an engine that made no token for a while is asked for one, which counts as waiting.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from .capacity import read_metrics
from .files import read_json_object
from .gate_key import read_api_key
from .host_lock import HostBusyError, host_lock
from .http_client import HttpError, parse_base_url, request
from .readiness import SLOWEST_READ_BYTES_PER_SECOND, run_command, start_limit
from .releases import active_release, deployment_names, release_directory

# Counters that grow when an engine does anything for its requests, and gauges of the requests it has.
# vLLM 0.33.0 v1/metrics/loggers.py; SGLang 0.5.23 observability/metrics_collector.py.
PROGRESS = {
    "vllm": ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_sum"),
    "sglang": ("sglang:generation_tokens_total", "sglang:prompt_tokens_total"),
}
REQUESTS = {
    "vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    "sglang": ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
}
# Several tokens with any tokenizer: of a prompt of one, vLLM 0.32's kernel for the linear attention of hybrid models on
# a CPU cannot tell the layout, and the engine dies ("causal_conv1d_fwd_cpu: expect x to be transposed").
QUESTION = "1 2 3 4 5 6 7 8"
_SAMPLE = re.compile(r"^([a-z_:]+)(?:\{[^\n]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Sample:
    """What the metrics of an engine said: tokens handled since its start, and requests it has now."""

    tokens: float
    requests: float


def parse_sample(engine: str, metrics: str) -> Optional[Sample]:
    """The sample in the text of a metrics route; None when it holds none of the engine's counters."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(metrics):
        sums[name] = sums.get(name, 0.0) + float(value)
    if not any(name in sums for name in PROGRESS.get(engine, ())):
        return None
    tokens, requests = (sum(sums.get(name, 0.0) for name in names[engine]) for names in (PROGRESS, REQUESTS))
    return Sample(tokens, requests)


@dataclass
class Watch:
    """What is remembered about one engine, for one life of its unit.

    Args:
        stall_seconds: how long tokens may stand still while requests wait.
    """

    stall_seconds: float
    life: str = ""
    tokens: Optional[float] = None
    still_since: Optional[float] = None
    moved_at: float = 0.0
    restarts: list[float] = field(default_factory=list)

    def look(
        self,
        life: str,
        sample: Optional[Sample],
        now: float,
        *,
        asked: bool = False,
        start_seconds: float = float("inf"),
    ) -> str:
        """Take a sample, or None when the metrics do not answer; returns why the engine is stuck, or an empty text.

        `asked` says that a question of the watchdog's own is open. An engine that has not answered yet in this life is
        loading, for which it has `start_seconds`.
        """
        if life != self.life:
            self.life, self.tokens, self.still_since, self.moved_at = life, None, None, now
        if sample is None:
            if self.tokens is None:
                seconds = now - self.moved_at
                return f"it has not become ready for {seconds:.0f} s" if seconds >= start_seconds else ""
            what = "its metrics do not answer"
        elif (sample.requests > 0 or asked) and sample.tokens == self.tokens:
            # Where the engine counts the watchdog's own question, there is one at least.
            what = f"{max(sample.requests, 1):.0f} request(s) wait and no token was made"
        else:
            if sample.tokens != self.tokens:
                self.moved_at = now
            self.tokens, self.still_since = sample.tokens, None
            return ""
        if self.still_since is None:
            self.still_since = now
        seconds = now - self.still_since
        return f"{what} for {seconds:.0f} s" if seconds >= self.stall_seconds else ""

    def is_idle(self, now: float) -> bool:
        """Whether a loaded engine has made no token for so long that it should show that it can; asks once a while."""
        if self.tokens is None or self.still_since is not None or now - self.moved_at < self.stall_seconds:
            return False
        self.moved_at = now
        return True

    def may_restart(self, now: float, budget: int, window_seconds: float) -> bool:
        """Whether the budget of restarts within the window has room; takes one of it."""
        self.restarts = [moment for moment in self.restarts if now - moment < window_seconds]
        if len(self.restarts) >= budget:
            return False
        self.restarts.append(now)
        self.still_since, self.moved_at = None, now
        return True


@dataclass(frozen=True)
class Settings:
    """How the watchdog works.

    Seconds of standstill, restarts within a window, seconds between two looks, and seconds that a start may take beside
    the reading of the weights, which are read at so many bytes per second at worst.
    """

    stall_seconds: float = 300.0
    budget: int = 2
    window_seconds: float = 3600.0
    pause_seconds: float = 15.0
    ready_timeout_seconds: float = 1800.0
    slowest_read_bytes_per_second: float = SLOWEST_READ_BYTES_PER_SECOND


class Questions:
    """Asks engines for one token each in the background; a hung engine holds its thread until the deadline only.

    Args:
        seconds: how long an answer may take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._open: dict[str, threading.Thread] = {}

    def is_open(self, life: str) -> bool:
        """Whether the engine of this life of a unit has been asked and has not answered yet."""
        thread = self._open.get(life)
        if thread is not None and not thread.is_alive():
            del self._open[life]
        return life in self._open

    def ask(self, life: str, endpoint: Mapping[str, Any]) -> None:
        """Ask for one token, unless a question is open."""
        if not self.is_open(life):
            thread = threading.Thread(target=self._ask, args=(dict(endpoint),), daemon=True)
            self._open[life] = thread
            thread.start()

    def _ask(self, endpoint: Mapping[str, Any]) -> None:
        # A refusal and a closed connection end the question: the engine answers, or the metrics will fall silent.
        with contextlib.suppress(HttpError, ValueError):
            request(
                parse_base_url(endpoint["url"]),
                "POST",
                "/v1/completions",
                deadline=time.monotonic() + self._seconds,
                payload={"model": endpoint["model"], "prompt": QUESTION, "max_tokens": 1},
                api_key=read_api_key(endpoint["api_key_file"]) if endpoint.get("api_key_file") else None,
            )


class Watchdog:
    """Looks at all deployments of a host; the effects can be replaced for tests."""

    def __init__(
        self,
        root: Path,
        settings: Settings,
        *,
        say: Callable[[str], None],
        life_of: Optional[Callable[[str], str]] = None,
        metrics_of: Optional[Callable[[str], str]] = None,
        restart: Optional[Callable[[str], None]] = None,
        questions: Optional[Questions] = None,
    ) -> None:
        self._root = root
        self._settings = settings
        self._say = say
        self._life_of = life_of or unit_life
        self._metrics_of = metrics_of or (lambda url: read_metrics(url, 5.0))
        self._restart = restart or restart_unit
        # Longer than a standstill: a question must not end before it has counted.
        self._questions = questions or Questions(2 * settings.stall_seconds + settings.pause_seconds)
        self._watches: dict[str, Watch] = {}
        self._told: set[str] = set()

    def look(self, now: float) -> None:
        """One look at every deployment."""
        for name in deployment_names(self._root):
            current = active_release(self._root, name)
            if current is None:
                continue
            endpoint = read_json_object(release_directory(self._root, name, current) / "endpoint.json")
            if endpoint.get("unit"):
                self._look_at(name, endpoint, now)

    def _look_at(self, name: str, endpoint: Mapping[str, Any], now: float) -> None:
        unit = endpoint["unit"]
        watch = self._watches.setdefault(name, Watch(self._settings.stall_seconds))
        life = self._life_of(unit)
        if not life:
            return
        try:
            sample = parse_sample(endpoint["engine"], self._metrics_of(f"{endpoint['url']}{endpoint['metrics_route']}"))
        except (OSError, ValueError):
            sample = None
        settings = self._settings
        stuck = watch.look(
            life,
            sample,
            now,
            asked=self._questions.is_open(life),
            start_seconds=start_limit(endpoint, settings.ready_timeout_seconds, settings.slowest_read_bytes_per_second),
        )
        if not stuck:
            self._told.discard(name)
            # Half of a pair for prefill and decode answers nobody; releases of older versions do not say what they are.
            if watch.is_idle(now) and endpoint.get("answers_alone") is True:
                self._questions.ask(life, endpoint)
            return
        try:
            with host_lock(self._root, "metalserve-watchdog", 0):
                self._act(name, unit, stuck, watch, now)
        except HostBusyError:
            # Whoever is at work proves the engine.
            return

    def _act(self, name: str, unit: str, stuck: str, watch: Watch, now: float) -> None:
        settings = self._settings
        if watch.may_restart(now, settings.budget, settings.window_seconds):
            self._say(f"{name}: {stuck}. {unit} is started again.")
            self._restart(unit)
        elif name not in self._told:
            self._told.add(name)
            self._say(
                f"{name}: {stuck}. {unit} has been started again {settings.budget} times within "
                f"{settings.window_seconds / 60:.0f} min and is left alone now. Needed: a person. "
                f"Change: see `metalserve-host diagnose {name}`."
            )

    def run(self, files: Sequence[Path] = ()) -> None:
        """Look again and again, until one of `files` is another one: systemd then starts the new program."""
        first = [_stamp(path) for path in files]
        while [_stamp(path) for path in files] == first:
            self.look(time.monotonic())
            time.sleep(self._settings.pause_seconds)
        self._say("The program or its unit has changed; ends, to be started anew.")


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_ino, status.st_mtime_ns)


def unit_life(unit: str) -> str:
    """Names this life of a running unit; empty when it does not run."""
    state = run_command(["systemctl", "show", unit, "--property=ActiveState,SubState,InvocationID"])
    properties = dict(line.split("=", 1) for line in state.splitlines() if "=" in line)
    running = (properties.get("ActiveState"), properties.get("SubState")) == ("active", "running")
    return properties.get("InvocationID", "") if running else ""


def restart_unit(unit: str) -> None:
    """Start a unit again; its stop may take as long as the unit gives it, and is not waited for."""
    run_command(["systemctl", "restart", "--no-block", unit])
