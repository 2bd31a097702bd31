"""Searches on the controller, and has the host try each candidate."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

from metalserve.errors import MetalserveError
from metalserve.plain import plain
from metalserve.tuning import report
from metalserve.tuning.drive import Tuning, choose_item, planner, write_report
from metalserve.tuning.search import Budget


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """The border between `metalserve.tuning` and Ansible: arguments in, calls of a module out."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Tune, and tell what was found."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        self._vars = task_vars or {}
        given = plain(self._task.args)
        try:
            return {**result, **self._tune(given)}
        except MetalserveError as error:
            return {**result, "failed": True, "msg": str(error)}

    def _tune(self, given: dict[str, Any]) -> dict[str, Any]:
        host, inputs = self._vars["inventory_hostname"], given["inputs"]
        self._same = {**given["trial"], "deployment": given["deployment"]}
        item, names = choose_item(inputs["deployments"], given["deployment"], given["facts"])
        if not self._task.check_mode:
            # First of all: what is planned goes by the release that is current.
            healed = self._call({"state": "healed"})
            if healed.get("failed"):
                raise MetalserveError(str(healed["msg"]))
            self._say(host, healed["healed"])
        tuning = Tuning(
            item,
            planner(item, given["facts"], inputs, self._kept(names)),
            objective=given["objective"],
            workload=given["workload"],
            space=given.get("space") or {},
            budget=Budget(int(given["candidates"]), 60 * float(given["minutes"])),
        )
        if self._task.check_mode:
            return {"changed": False, "lines": tuning.preview(), "files": [], "broken": ""}
        told = {"when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "host": host}
        tuned, broken = tuning.run(
            self._call,
            force=boolean(given["trial"].get("force", False)),
            clock=time.monotonic,
            say=lambda line: self._say(host, line),
            told=told,
        )
        lines = report.lines(tuned) if tuned else []
        files = write_report(str(given.get("results_dir") or ""), tuned) if tuned else []
        return {"changed": False, "lines": [*lines, *files], "files": files, "broken": broken}

    def _call(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run the module on the host; a host that cannot be reached is an answer like any other failure."""
        try:
            found: dict[str, Any] = self._execute_module(
                "serving_trial", module_args={**self._same, **arguments}, task_vars=self._vars
            )
        except AnsibleConnectionFailure as error:
            return {"failed": True, "msg": f"the host could not be reached: {error}"}
        if found.get("failed") or found.get("unreachable"):
            # What else Ansible puts into a failed result is no plain data.
            return {"failed": True, "msg": str(found.get("msg"))}
        answer: dict[str, Any] = plain(found)
        return answer

    def _kept(self, names: list[str]) -> dict[str, Any]:
        if not names:
            return {}
        root = self._same.get("root") or "/etc/metalserve"
        answer = self._execute_module(
            "serving_starts", module_args={"root": root, "deployments": names}, task_vars=self._vars
        )
        if answer.get("failed"):
            raise MetalserveError(f"What earlier starts left could not be read: {answer.get('msg')}")
        found: dict[str, Any] = plain(answer["deployments"])
        return found

    def _say(self, host: str, line: str) -> None:
        if line:
            self._display.display(f"{host}: {line}")
