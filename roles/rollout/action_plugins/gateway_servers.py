"""Tells a lost gateway from a lost host: what is asked of a gateway in a host's name fails by the gateway's name.

Ansible counts a host as lost when that to which its task is delegated cannot be reached, and runs no rescue for it. The
file has a name for each module that is asked of a gateway.
"""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """Runs the module of the task's name."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run it; `gateway_lost` names a gateway that could not be reached."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        try:
            return {**result, **self._execute_module(task_vars=task_vars)}
        except AnsibleConnectionFailure as error:
            gateway, host = self._task.delegate_to, (task_vars or {})["inventory_hostname"]
            if not gateway or gateway == host:
                raise
            message = (
                f"The gateway {gateway} could not be reached: {str(error).strip().rstrip('.')}. {host} itself is not "
                f"lost. Needed: a gateway that answers. Change: bring {gateway} back and run again, or take it out of "
                "the inventory when it is gone for good."
            )
            return {**result, "failed": True, "changed": False, "gateway_lost": gateway, "msg": message}
