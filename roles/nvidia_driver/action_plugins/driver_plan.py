"""Decides about the driver of a host on the controller: a refusal is one sentence, with no template around it."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase

from metalserve.driver_plan import Seen, Wishes, driver_plan
from metalserve.errors import MetalserveError
from metalserve.plain import plain, truths


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """Never touches the host: what was seen on it is an argument."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Decide, and return the plan."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        given = plain(self._task.args)
        try:
            plan = driver_plan(given["facts"], Wishes(**truths(Wishes, given["wishes"])), Seen(**given["seen"]))
        except MetalserveError as refusal:
            return {**result, "failed": True, "msg": str(refusal)}
        return {**result, "changed": False, "plan": plan}
