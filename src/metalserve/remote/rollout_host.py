"""The host side of a rollout: systemd, Docker, the readiness wait and the gate, on the machine this runs on."""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from . import gate, gate_record
from .capacity import RECORD_NAME, compare, parse_capacity, read_metrics, record
from .files import read_json_object, read_text
from .gate_key import read_api_key
from .readiness import SLOWEST_READ_BYTES_PER_SECOND, run_command, start_limit, wait_until_ready
from .release_names import model_directories
from .rollout_types import Proof

ENGINES = ("vllm", "sglang")
RUNNING = ("active", "running")
STOPPED = (("inactive", "dead"), ("", ""))
LABEL = '{{ index .Config.Labels "metalserve.release" }}'
UNIT_DIRECTORY = Path("/etc/systemd/system")
JOURNAL_LINES = 25
# A stop may take as long as the unit gives it, which is bounded by TimeoutStopSec.
SYSTEMCTL_SECONDS = 1800.0


class HostError(Exception):
    """The host does not do what it must; the text says what was found and needed."""


@dataclass(frozen=True)
class GateSettings:
    """How the gate is asked, for all deployments of the host; see `gate.run_gate`."""

    checks: Sequence[str] = ()
    burst_size: int = gate.DEFAULT_BURST_SIZE
    hidden_routes: Sequence[str] = ()
    long_prompt_tokens: int = gate.DEFAULT_LONG_PROMPT_TOKENS
    timeout_seconds: float = gate.DEFAULT_TIMEOUT_SECONDS
    request_timeout_seconds: float = gate.DEFAULT_REQUEST_TIMEOUT_SECONDS
    api_key_file: Optional[str] = None


class LocalHost:
    """This machine.

    Args:
        ready_timeout_seconds: bounds the wait for an engine whose unit lives, without the time to read its weights.
        slowest_read_bytes_per_second: at which the weights are read at worst.
        settings: how the gate is asked.
    """

    def __init__(
        self,
        *,
        ready_timeout_seconds: float,
        slowest_read_bytes_per_second: int = SLOWEST_READ_BYTES_PER_SECOND,
        settings: Optional[GateSettings] = None,
    ) -> None:
        self._ready_timeout_seconds = ready_timeout_seconds
        self._slowest_read_bytes_per_second = slowest_read_bytes_per_second
        self._settings = settings or GateSettings()
        self._started_at: dict[str, float] = {}

    def running_release(self, deployment: str) -> Optional[str]:
        """The release of the deployment's container; not being able to ask is no answer.

        Raises:
            HostError: Docker is there and does not answer.
        """
        try:
            done = _run(["docker", "inspect", "--format", LABEL, f"metalserve-{deployment}"], 60)
        except FileNotFoundError:
            return None
        if done.returncode != 0 and "no such" not in done.stderr.lower():
            raise HostError(
                f"Docker does not say what runs for {deployment}: {done.stderr.strip()}. "
                "Needed: a Docker that answers. Change: look at `systemctl status docker`."
            )
        return done.stdout.strip() or None if done.returncode == 0 else None

    def unit_state(self, unit: str) -> str:
        """`running`, `stopped`, or `failing` for a unit that failed or that systemd keeps starting again."""
        state = run_command(["systemctl", "show", unit, "--property=ActiveState,SubState"])
        properties = dict(line.split("=", 1) for line in state.splitlines() if "=" in line)
        pair = (properties.get("ActiveState", ""), properties.get("SubState", ""))
        return "running" if pair == RUNNING else "stopped" if pair in STOPPED else "failing"

    def other_units(self, deployment: str, engine: str) -> list[str]:
        """Units of this deployment for other engines that run or start at boot."""
        units = [f"{other}@{deployment}.service" for other in ENGINES if other != engine]
        return [unit for unit in units if starts_at_boot(unit) or self.unit_state(unit) != "stopped"]

    def start(self, unit: str) -> None:
        """Enable the unit and start it with a new budget: what was wrong may be mended now.

        Raises:
            HostError: systemd cannot enable it, or the start takes longer than any unit may.
        """
        self._started_at[unit] = time.time()
        run_command(["systemctl", "reset-failed", unit])
        self.enable(unit)
        # Waited for, so that the wait for readiness sees the new start. A start that fails is that wait's to report.
        _systemctl("restart", unit, must_succeed=False)

    def enable(self, unit: str) -> bool:
        """Have the unit start at boot; returns whether it did not.

        Raises:
            HostError: systemd refuses it.
        """
        if starts_at_boot(unit):
            return False
        _systemctl("enable", "--quiet", unit)
        return True

    def stop(self, unit: str) -> None:
        """Stop the unit and keep it from starting at boot.

        Raises:
            HostError: systemd refuses it.
        """
        _systemctl("disable", "--now", "--quiet", unit)
        run_command(["systemctl", "reset-failed", unit])

    def prove(self, deployment: str, release_id: str, directory: Path, endpoint: Mapping[str, Any]) -> Proof:
        """Wait until the engine is ready, compare its capacity with the plan, and run the gate.

        Raises:
            OSError: a record cannot be written.
        """
        unit, url = str(endpoint["unit"]), str(endpoint["url"])
        outcome = wait_until_ready(
            unit,
            f"{url}{endpoint['ready_route']}",
            start_limit(endpoint, self._ready_timeout_seconds, self._slowest_read_bytes_per_second),
            journal_lines=JOURNAL_LINES,
            since=self._started_at.get(unit),
        )
        if not outcome.ready:
            cause = outcome.failures[0] if outcome.failures else None
            reason = f"{outcome.message}; {cause.cause} ({cause.name})" if cause else outcome.message
            text = "\n".join([outcome.explained(), "The last lines of its journal:", *outcome.journal])
            return Proof(False, "start", reason, text)
        running = self.running_release(deployment)
        if running != release_id:
            reason = f"{unit} runs the release {running}, not {release_id}"
            return Proof(False, "start", reason, reason)
        notes, changed = [f"{deployment}: {outcome.message}"], False
        try:
            note, changed, capacity = self._capacity(directory, endpoint)
        except ValueError as error:
            reason = f"the capacity at {url}{endpoint['metrics_route']} could not be read: {error}"
            return Proof(False, "start", reason, reason)
        notes.append(f"{deployment}: {note}")
        judged = self._judge(endpoint)
        kept = gate_record.new_record(judged, release_id, _utc_now())
        before, after = gate_record.keep_record(directory / "gate.json", kept, dry_run=False)
        reason = judged.verdict() if judged.passed else "; ".join(f"{r.name}: {r.detail}" for r in judged.failed_rows)
        return Proof(
            judged.passed,
            "gate",
            reason,
            judged.verdict() if judged.passed else judged.refusal(),
            tuple(judged.table()),
            tuple(notes),
            changed or before != after,
            f"{len(judged.rows) - len(judged.failed_rows)} of {len(judged.rows)}",
            capacity,
        )

    def circumstances(self, directory: Path, unit: str) -> dict[str, Any]:
        """What a refusal may depend on: the unit file, the weights on the disk, the driver, the boot, the gate."""
        release = read_json_object(directory / "release.json")
        template = f"{unit.split('@', 1)[0]}@.service"
        asked = {**vars(self._settings), "checks": sorted(self._settings.checks), "known": gate.CHECK_NAMES}
        return {
            "unit": _digest(read_text(UNIT_DIRECTORY / template)),
            "weights": _weights(release),
            "driver": (read_text(Path("/sys/module/nvidia/version")) or "").strip() or None,
            "boot": (read_text(Path("/proc/sys/kernel/random/boot_id")) or "").strip() or None,
            "gate": _digest(json.dumps(asked, sort_keys=True)),
        }

    def now(self) -> str:
        """The time in UTC."""
        return _utc_now().strftime("%Y-%m-%dT%H:%M:%SZ")

    def _capacity(self, directory: Path, endpoint: Mapping[str, Any]) -> tuple[str, bool, dict[str, Any]]:
        plan = read_json_object(directory / "release.json").get("plan") or {}
        url = f"{endpoint['url']}{endpoint['metrics_route']}"
        try:
            comparison = compare(plan, parse_capacity(read_metrics(url)))
        except OSError as error:
            raise ValueError(str(error)) from None
        changed = record(directory / RECORD_NAME, comparison, dry_run=False)
        measure, percent = comparison["measure"], comparison["difference_percent"]
        values = comparison["values"][measure]
        text = f"{measure}: planned {values['planned']}, the engine reports {values['reported']:.0f}"
        capacity = {"measure": measure, "planned": values["planned"], "reported": values["reported"]}
        return f"{text} ({percent:+} %)" if percent is not None else text, changed, capacity

    def _judge(self, endpoint: Mapping[str, Any]) -> gate.GateResult:
        settings = self._settings
        key_file = endpoint.get("api_key_file") or settings.api_key_file
        key = None
        if key_file:
            try:
                key = read_api_key(key_file)
            except ValueError as error:
                raise HostError(f"{error}. Needed: the key that the engine was given. Change: that file.") from None
        return gate.run_gate(
            str(endpoint["url"]),
            str(endpoint["model"]),
            timeout_seconds=settings.timeout_seconds,
            request_timeout_seconds=settings.request_timeout_seconds,
            api_key=key,
            checks=list(settings.checks),
            served_names=list(endpoint.get("served_names") or []),
            engine=str(endpoint["engine"]),
            thinking=str(endpoint.get("thinking", "absent")),
            burst_size=settings.burst_size,
            hidden_routes=settings.hidden_routes,
            long_prompt_tokens=settings.long_prompt_tokens,
        )


def _run(argv: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=seconds, check=False)


def _systemctl(*words: str, must_succeed: bool = True) -> None:
    try:
        done = _run(["systemctl", *words], SYSTEMCTL_SECONDS)
    except subprocess.TimeoutExpired:
        raise HostError(f"`systemctl {' '.join(words)}` was not done in {SYSTEMCTL_SECONDS:.0f} s") from None
    if must_succeed and done.returncode != 0:
        raise HostError(f"`systemctl {' '.join(words)}` failed: {done.stderr.strip()}. Needed: a unit that starts.")


def starts_at_boot(unit: str) -> bool:
    """Whether the unit is enabled."""
    return (UNIT_DIRECTORY / "multi-user.target.wants" / unit).is_symlink()


def _digest(text: Optional[str]) -> Optional[str]:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()[:12]


def _weights(release: Mapping[str, Any]) -> Optional[str]:
    """Of everything a release mounts; None when something of it is not there."""
    try:
        found = [_identity(Path(directory)) for directory in model_directories(release)]
    except (KeyError, TypeError, AttributeError):
        return None
    return None if None in found else " ".join(map(str, found))


def _identity(directory: Path) -> Optional[str]:
    """Changes when the directory was published again; its files are never written in place."""
    try:
        status = directory.stat()
    except OSError:
        return None
    return f"{status.st_ino}-{status.st_mtime_ns}"


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017 - datetime.UTC is newer than Python 3.9
