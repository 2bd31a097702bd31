"""Proves a bundle on the controller and gives it to the hosts for as long as this run lives."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

from metalserve.bundle import MANIFEST, check_bundle, require
from metalserve.bundle_server import start_server
from metalserve.deployments import engine_for, normalize
from metalserve.errors import MetalserveError, Refusal
from metalserve.plain import plain

# Of this run: which bundle is proven, and where it is given. In the main process's environment nothing can be kept
# between tasks, so that it lies beside what is remembered of the bundle's files.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metalserve" / "bundles"


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """Touches no host."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Prove and give, or look for what is needed."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        given = plain(self._task.args)
        directory = Path(given["directory"]).expanduser().absolute()
        try:
            if given["step"] == "require":
                self._require(directory, given)
                return {**result, "changed": False}
            return {**result, "changed": False, **self._give(directory, given)}
        except MetalserveError as refusal:
            return {**result, "failed": True, "msg": str(refusal)}

    @staticmethod
    def _give(directory: Path, given: dict[str, Any]) -> dict[str, Any]:
        name = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
        known, run = _CACHE / f"{name}.json", _CACHE / f"{name}-{os.getppid()}-{_started(os.getppid())}.json"
        if run.exists():
            # An earlier play of this run.
            found: dict[str, Any] = json.loads(run.read_text(encoding="utf-8"))
            return found
        if boolean(given.get("full_hash", False)):
            known.unlink(missing_ok=True)
        manifest = check_bundle(
            directory,
            given.get("signers") or [],
            unsigned_allowed=boolean(given.get("unsigned_allowed", False)),
            known=known,
        )
        port = 0
        if boolean(given.get("serve", True)):
            port = start_server(directory, int(given.get("port", 8748)), os.getppid())
        digest = hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()
        given_now = {"manifest": digest, "port": port, "systems": manifest["systems"]}
        for old in _CACHE.glob(f"{name}-*.json"):
            old.unlink()
        run.write_text(json.dumps(given_now), encoding="utf-8")
        return given_now

    @staticmethod
    def _require(directory: Path, given: dict[str, Any]) -> None:
        try:
            deployments = normalize(given.get("deployments") or [])
            images = [engine_for(item, given.get("engines") or {}).image for item in deployments]
        except Refusal:
            # The verdict says it, in its table.
            return
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        models = [key for item in deployments for key in _keys(item)]
        require(manifest, images, models, given.get("lock") or {}, directory)


def _keys(item: dict[str, Any]) -> list[str]:
    """What a deployment needs of the lock's models."""
    drafts = [item["draft_model"]] if item["draft_model"] else []
    return [item["model"], *drafts, *(adapter["key"] for adapter in item["lora_adapters"])]


def _started(pid: int) -> str:
    """When a process was started, in the kernel's ticks: a number that a later process of the same id does not have."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
