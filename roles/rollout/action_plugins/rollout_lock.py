"""Says whose lock it is: the run of Ansible that this process belongs to."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase

from metalserve.controller import has_ended, this_run
from metalserve.plain import plain


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """Runs the module of the same name; a lock of a run that has ended on this machine is taken over."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Hold or release."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = {**plain(self._task.args), "holder": this_run()}
        answer = self._execute_module(module_args=arguments, task_vars=task_vars)
        holder = plain(answer.get("holder") or {})
        if answer.get("failed") and holder and has_ended(holder):
            arguments["take_from"] = holder.get("token", "")
            answer = self._execute_module(module_args=arguments, task_vars=task_vars)
        return {**result, **answer}
