"""What a run of a playbook has come to, by the events of ansible-runner: a line a host, and what is worth telling."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# What roles/model_weights says while files come (weights_progress): HOST: MODEL@REVISION: how far.
_PROGRESS = re.compile(r"^(?P<host>\S+): (?P<model>\S+@\w{1,40}): +(?P<far>.+)$")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

WAITING, RUNNING, DONE, FAILED, UNREACHABLE = "waiting", "running", "done", "failed", "unreachable"


@dataclass
class HostLine:
    """Where a host is.

    Args:
        stage: the play.
        step: the task.
        state: one of `waiting`, `running`, `done`, `failed`, `unreachable`.
        since: when the step began, in seconds of the run.
        progress: how far its weights have come.
        gate: what the gate said last.
    """

    stage: str = ""
    step: str = ""
    state: str = WAITING
    since: float = 0.0
    progress: str = ""
    gate: str = ""


@dataclass(frozen=True)
class Notice:
    """Something worth telling.

    Args:
        kind: `stage`, `step`, `changed`, `progress`, `gate`, `message`, `failed`, `unreachable` or `host` (at the end).
        text: what to tell.
        host: whom it is about; empty for all.
        stage: the play at this time.
    """

    kind: str
    text: str
    host: str = ""
    stage: str = ""

    def as_dict(self) -> dict[str, str]:
        """The notice as plain types, without what is empty."""
        return {name: value for name, value in vars(self).items() if value}


@dataclass
class Board:
    """All hosts of a run, in the order of their first event; `ended` once Ansible has counted its results."""

    hosts: dict[str, HostLine] = field(default_factory=dict)
    stage: str = ""
    batches: int = 0
    ended: bool = False

    def take(self, event: Mapping[str, Any], seconds: float) -> list[Notice]:
        """Note an event.

        Args:
            event: as ansible-runner gives it.
            seconds: of the run.
        """
        data = event.get("event_data") or {}
        name = str(event.get("event"))
        handler = getattr(self, f"_{name}", None)
        if handler:
            return list(handler(data, seconds))
        if name.startswith(("runner_on_", "runner_item_on_")) and data.get("host"):
            return list(self._result(name, data))
        # What plugins print themselves: how far weights are, the table of preflight.
        return list(self._printed(event)) if name == "verbose" else []

    def _playbook_on_play_start(self, data: Mapping[str, Any], _seconds: float) -> Iterator[Notice]:
        again = self.stage == str(data.get("play"))
        self.stage = str(data.get("play"))
        self.batches = self.batches + 1 if again else 1
        yield Notice("stage", self.stage + (f", batch {self.batches}" if again else ""), stage=self.stage)

    def _playbook_on_task_start(self, data: Mapping[str, Any], _seconds: float) -> Iterator[Notice]:
        # Ansible's own first task of each role says nothing of what happens.
        if not str(data.get("task") or data.get("name")).startswith("Validating arguments against arg spec"):
            yield Notice("step", _step(data), stage=self.stage)

    def _runner_on_start(self, data: Mapping[str, Any], seconds: float) -> Iterator[Notice]:
        line = self.hosts.setdefault(str(data["host"]), HostLine())
        line.stage, line.step, line.state, line.since = self.stage, _step(data), RUNNING, seconds
        return iter(())

    def _playbook_on_stats(self, data: Mapping[str, Any], _seconds: float) -> Iterator[Notice]:
        self.ended = True
        for host in sorted({*self.hosts, *(data.get("processed") or {})}):
            line = self.hosts.setdefault(host, HostLine())
            numbers = {key: (data.get(key) or {}).get(host, 0) for key in ("ok", "changed", "failures", "dark")}
            line.state = UNREACHABLE if numbers["dark"] else FAILED if numbers["failures"] else DONE
            line.step = "" if line.state == DONE else line.step
            told = f"{line.state}: {numbers['ok']} ok, {numbers['changed']} changed"
            yield Notice("host", told + (f"; gate: {line.gate}" if line.gate else ""), host, self.stage)

    def _result(self, name: str, data: Mapping[str, Any]) -> Iterator[Notice]:
        host, result = str(data["host"]), data.get("res") or {}
        line = self.hosts.setdefault(host, HostLine())
        yield from self._gate(host, line, result)
        if name == "runner_on_unreachable":
            line.state = UNREACHABLE
            yield Notice("unreachable", _message(result), host, self.stage)
        elif name == "runner_on_failed" and not data.get("ignore_errors"):
            line.state = FAILED
            yield Notice("failed", f"{_step(data)}: {_message(result)}", host, self.stage)
        elif name == "runner_on_ok":
            if str(data.get("task_action", "")).endswith("debug") and result.get("msg"):
                yield Notice("message", str(result["msg"]), host, self.stage)
            if result.get("changed"):
                yield Notice("changed", _step(data), host, self.stage)

    def _gate(self, host: str, line: HostLine, result: Mapping[str, Any]) -> Iterator[Notice]:
        """What a rollout or the gate found, a deployment each."""
        found = [(each["deployment"], each["ok"]) for each in result.get("outcomes") or [] if "deployment" in each]
        endpoint = result.get("__endpoint_gate_item") or {}
        if "passed" in result and "name" in endpoint:
            found.append((endpoint["name"], result["passed"]))
        for deployment, passed in found:
            line.gate = f"{deployment} {'passed' if passed else 'refused'}"
            yield Notice("gate", line.gate, host, self.stage)

    def _printed(self, event: Mapping[str, Any]) -> Iterator[Notice]:
        rest = []
        for text in _COLOURS.sub("", str(event.get("stdout") or "")).splitlines():
            match = _PROGRESS.match(text)
            if match and match["host"] in self.hosts:
                self.hosts[match["host"]].progress = match["far"]
                yield Notice("progress", f"{match['model']}: {match['far']}", match["host"], self.stage)
            else:
                rest.append(text)
        if any(text.strip() for text in rest):
            yield Notice("message", "\n".join(rest), stage=self.stage)


def _step(data: Mapping[str, Any]) -> str:
    role = f"{data['role']}: " if data.get("role") else ""
    return f"{role}{data.get('task') or data.get('name') or ''}"


def _message(result: Mapping[str, Any]) -> str:
    """Why a task failed; of a loop, why each of its items did."""
    items = [str(each["msg"]) for each in result.get("results") or [] if each.get("failed") and each.get("msg")]
    return "\n".join(items) or str(result.get("msg") or result.get("censored") or "no reason was given")
