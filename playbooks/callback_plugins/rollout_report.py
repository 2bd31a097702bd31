"""Tells at the end of a rollout which host has what, however the run ended.

A play that fails ends the run, and nothing that stands behind it in a playbook is reached. A callback is.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

from metalserve.controller import this_run
from metalserve.plain import plain
from metalserve.rollout.aftermath import proofs_of, verdicts_of
from metalserve.rollout.report import report_html, report_lines, report_rows, summary

DOCUMENTATION = """
name: rollout_report
type: aggregate
short_description: Report of a rollout
description:
  - Prints at the end of a run with playbooks/rollout.yml, or with one of playbooks/ops that goes the same way, what
    each host had before and has now, and writes it as JSON and as an HTML page into C(rollout_report_dir). Silent
    in all other runs.
author: metalserve
"""


class CallbackModule(CallbackBase):  # type: ignore[misc]  # ansible-core has no types
    """Collects what the role rollout has done."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "rollout_report"
    # Found beside the playbooks, it needs no setting.
    CALLBACK_NEEDS_ENABLED = False

    def __init__(self) -> None:
        super().__init__()
        self._began = time.time()
        self._plan: dict[str, Any] = {}
        self._hosts: dict[str, dict[str, Any]] = {}

    def _host(self, result: Any) -> dict[str, Any]:
        empty: dict[str, Any] = {"outcomes": [], "reached": False, "proofs": [], "verdicts": [], "back": []}
        empty.update(message=None, lost=False, gateway_lost=None)
        return self._hosts.setdefault(result.host.get_name(), empty)

    def v2_runner_on_ok(self, result: Any) -> None:
        """Note what the modules of a rollout have returned."""
        action, data = result.task.action, result.result
        if action == "ansible.builtin.set_fact" and "rollout_plan" in data.get("ansible_facts", {}):
            self._plan = plain(data["ansible_facts"]["rollout_plan"])
        elif action == "serving_rollout":
            self._outcomes(self._host(result), plain(data))
        elif action in ("endpoint_gate", "gateway_servers"):
            self._answers(self._host(result), action, plain(data))

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Keep why a host failed; the last word counts, because it is the one that sums up."""
        data = result.result
        for item in (data, *data.get("results", [])):
            if item.get("gateway_lost"):
                self._host(result)["gateway_lost"] = str(item["gateway_lost"])
        if result.task.action in ("endpoint_gate", "gateway_servers"):
            self._answers(self._host(result), result.task.action, plain(data))
        messages = [item["msg"] for item in data.get("results", []) if item.get("failed") and item.get("msg")]
        self._host(result)["message"] = str((messages or [data.get("msg")])[0])

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """A host that is gone."""
        self._host(result).update(lost=True, message=str(result.result.get("msg")))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Print the report, and write it."""
        if not self._plan:
            return
        for name, host in self._hosts.items():
            # What was mended in a rescue is no failure.
            if not stats.failures.get(name) and not stats.dark.get(name):
                host["message"] = None
        check = bool(self._plan["check"])
        rows = report_rows(self._plan, self._hosts)
        head = summary(rows, check=check, action=self._plan["action"])
        gone = sorted({host["gateway_lost"] for host in self._hosts.values() if host["gateway_lost"]})
        head += "".join(f". The gateway {name} could not be reached" for name in gone)
        if not self._plan["changes"] and not any(row["message"] for row in rows):
            self._display.display(f"\n{head}")
            return
        self._display.display("\n" + "\n".join([head, "", *report_lines(rows)]))
        folder = str(self._plan.get("report_dir") or "")
        # One that was refused at its beginning has nothing to report but what is printed.
        if folder and not check and any(host["reached"] for host in self._hosts.values()):
            self._write(Path(folder), head, rows)

    def _outcomes(self, host: dict[str, Any], data: dict[str, Any]) -> None:
        facts = data["ansible_facts"]["serving_rollout"]
        if facts["check"] or facts["state"] == self._plan.get("action"):
            host["outcomes"] = facts["outcomes"]
            host["reached"] = not facts["check"] or host["reached"]
        else:
            host["back"] += facts["outcomes"]

    def _answers(self, host: dict[str, Any], action: str, data: dict[str, Any]) -> None:
        results = data.get("results", [])
        if action == "endpoint_gate":
            host["proofs"] += proofs_of(results)
        elif any("verdict" in item for item in results):
            host["verdicts"] += verdicts_of(results)

    def _write(self, folder: Path, head: str, rows: list[dict[str, Any]]) -> None:
        document = {
            "when": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._began)),
            "who": this_run()["who"],
            "summary": head,
            "seconds": round(time.time() - self._began, 1),
            "batches": self._plan["batches"],
            "rows": rows,
        }
        name = time.strftime("rollout-%Y%m%dT%H%M%SZ", time.gmtime(self._began))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            (folder / f"{name}.html").write_text(report_html(document), encoding="utf-8")
        except OSError as error:
            self._display.warning(
                f"The report cannot be written to {folder}: {error.strerror}. Change: rollout_report_dir."
            )
            return
        self._display.display(f"\nReport: {folder / name}.html and .json")
