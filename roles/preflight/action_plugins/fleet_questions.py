"""Finds, on the controller, the hosts that have to be asked more than their facts tell."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase

from metalserve.plain import plain
from metalserve.verdict.questions import DOCKER, DRIVER, open_questions


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """Runs once, for the whole play; touches no host, for the facts are there already."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Name them."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        hostvars = (task_vars or {})["hostvars"]
        questions = {name: _questions(hostvars[name]) for name in plain(self._task.args["hosts"])}
        found = {about: [name for name, asked in questions.items() if about in asked] for about in (DOCKER, DRIVER)}
        return {**result, "changed": False, **found, "hosts": [name for name, asked in questions.items() if asked]}


def _questions(variables: Any) -> set[str]:
    facts = plain((variables.get("ansible_facts") or {}).get("gpu_host"))
    try:
        managed = plain(variables.get("nvidia_driver_manage"))
    except Exception:  # templating fails in many ways; that this variable cannot be read is told with the verdict
        managed = True
    return open_questions(facts, driver_managed=managed is not False)
