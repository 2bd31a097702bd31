"""Carries nvidia-ml-py from the controller to the module gpu_host, so that no host has to install it."""

from __future__ import annotations

import base64
import importlib.util
import zlib
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase


def packed_pynvml() -> str | None:
    """The text of the controller's pynvml.py, compressed (330 kB become 55), or None if there is none."""
    spec = importlib.util.find_spec("pynvml")
    if spec is None or not spec.origin or not spec.origin.endswith("pynvml.py"):
        return None
    return base64.b64encode(zlib.compress(Path(spec.origin).read_bytes())).decode("ascii")


# Ansible loads a plugin before it makes a worker for a host: packed once for all of them.
_PACKED = packed_pynvml()


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """Runs the module with the binding among its arguments."""

    _supports_check_mode = True
    _supports_async = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Add the binding unless the task names one (an empty text stands for none)."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        if arguments.get("pynvml") is None:
            arguments["pynvml"] = _PACKED
        result.update(
            self._execute_module(
                module_name="gpu_host",
                module_args=arguments,
                task_vars=task_vars,
                wrap_async=self._task.async_val,
            )
        )
        return result
