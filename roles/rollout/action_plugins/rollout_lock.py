"""Says whose lock it is: the run of Ansible that this process belongs to."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleConnectionFailure
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
        try:
            answer = self._execute_module(module_args=arguments, task_vars=task_vars)
        except AnsibleConnectionFailure as error:
            place = self._task.delegate_to
            if not place or place == (task_vars or {})["inventory_hostname"]:
                raise
            # Ansible would count the host as lost in whose name the place of the lock was asked.
            message = (
                f"{place}, which keeps the rollout's lock, could not be reached: {str(error).strip().rstrip('.')}. "
                f"Needed: a machine that answers. Change: bring {place} back and run again."
            )
            return {**result, "failed": True, "changed": False, "place_lost": place, "msg": message}
        holder = plain(answer.get("holder") or {})
        if answer.get("failed") and holder and has_ended(holder):
            arguments["take_from"] = holder.get("token", "")
            answer = self._execute_module(module_args=arguments, task_vars=task_vars)
        return {**result, **answer}
