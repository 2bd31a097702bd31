"""Plans the deployments of a host on the controller: a refusal is one sentence, without a template's stack above it."""

from __future__ import annotations

from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

from metalserve.deployments import Inputs, normalize, serving_releases, with_kept_starts
from metalserve.errors import MetalserveError
from metalserve.plain import plain


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """Plans from facts that are an argument. On the host it only reads what earlier starts left."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Plan, and leave the releases as a fact."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        given = plain(self._task.args)
        try:
            deployments = given.get("deployments") or []
            kept = self._kept(normalize(deployments), given, task_vars)
            inputs = Inputs(
                models=given.get("models") or {},
                engines=given.get("engines") or {},
                lock=given.get("lock") or {},
                weight_sources=given.get("weight_sources") or {},
                models_dir=given["models_dir"],
                kept=kept,
                image_keys=given.get("image_keys") or {},
                relearn=boolean(given.get("relearn", False)),
            )
            releases = serving_releases(deployments, given["facts"], inputs)
        except MetalserveError as refusal:
            return {**result, "failed": True, "msg": str(refusal)}
        return {**result, "changed": False, "ansible_facts": {"serving_plan_releases": releases}}

    def _kept(
        self, deployments: list[dict[str, Any]], given: dict[str, Any], task_vars: dict[str, Any] | None
    ) -> dict[str, Any]:
        """What the host keeps that decides something."""
        names = with_kept_starts(deployments, given["facts"])
        if not names:
            return {}
        answer = self._execute_module(
            module_name="serving_starts",
            module_args={"root": given.get("root") or "/etc/metalserve", "deployments": names},
            task_vars=task_vars,
        )
        if answer.get("failed"):
            raise MetalserveError(f"What earlier starts left could not be read: {answer.get('msg')}")
        found: dict[str, Any] = plain(answer["deployments"])
        return found
