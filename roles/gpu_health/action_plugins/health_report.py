"""Judges the health of a host on the controller: a wrong expectation is one sentence."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase

from metalserve.errors import MetalserveError
from metalserve.health import health_report
from metalserve.plain import plain


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """Never touches the host: its facts are an argument."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Judge, and return state, rows, table and refusals."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        given = plain(self._task.args)
        try:
            report = health_report(
                given["facts"], given.get("expected"), given.get("probes") or [], given.get("diag") or None
            )
        except MetalserveError as refusal:
            return {**result, "failed": True, "msg": str(refusal)}
        return {**result, "changed": False, **report}
