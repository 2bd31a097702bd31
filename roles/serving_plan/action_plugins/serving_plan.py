"""Plans the deployments of a host on the controller: a refusal is one sentence, without a template's stack above it."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase

from metalserve.deployments import Inputs, serving_releases
from metalserve.errors import MetalserveError
from metalserve.plain import plain


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """Never touches the host: its facts are an argument."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Plan, and leave the releases as a fact."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        given = plain(self._task.args)
        try:
            inputs = Inputs(
                models=given.get("models") or {},
                engines=given.get("engines") or {},
                lock=given.get("lock") or {},
                weight_sources=given.get("weight_sources") or {},
                models_dir=given["models_dir"],
            )
            releases = serving_releases(given.get("deployments") or [], given["facts"], inputs)
        except MetalserveError as refusal:
            return {**result, "failed": True, "msg": str(refusal)}
        return {**result, "changed": False, "ansible_facts": {"serving_plan_releases": releases}}
