"""Starts a fetch on the host, and watches it from here: the host goes on alone when the connection ends."""

from __future__ import annotations

import base64
import io
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

from metalserve import remote
from metalserve.plain import plain
from metalserve.weights_fanout import FleetHost, fetch_plan, sharing_addresses
from metalserve.weights_progress import progress_line, summary_line

# The controller's own arguments, which the module on the host does not know.
_OWN = ("peers", "hosts_at_once", "progress_seconds", "timeout_seconds")
# What the worker imports beside the modules whose names begin with weights.
_WORKER_NEEDS = ("file_answers.py", "file_lock.py", "release_names.py")
_FIRST_LOOK_SECONDS, _LAST_LOOK_SECONDS = 0.5, 5.0
_CONNECTION_PATIENCE_SECONDS = 900.0


def packed_worker() -> str:
    """The worker as one file that Python runs (PEP 441), the same bytes from the same sources."""
    folder = Path(remote.__file__).parent
    sources = sorted([*folder.glob("weights*.py"), *(folder / name for name in _WORKER_NEEDS)])
    texts = {
        "metalserve_remote/__init__.py": "",
        **{f"metalserve_remote/{p.name}": p.read_text("utf-8") for p in sources},
    }
    texts["__main__.py"] = "import sys\n\nfrom metalserve_remote.weights_worker import main\n\nsys.exit(main())\n"
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    return base64.b64encode(data.getvalue()).decode("ascii")


def fleet(names: list[str], hostvars: Mapping[str, Any]) -> list[FleetHost]:
    """The hosts of the play as the plan needs them, from what the role's look at each of them has found."""
    hosts = []
    for name in names:
        variables = hostvars[name]
        wanted, pending = set(), set()
        for row in (variables.get("__model_weights_found") or {}).get("results") or []:
            model = row.get("model") or {}
            label = f"{model.get('key')}@{model.get('revision')}"
            wanted.add(label)
            if row.get("pending"):
                pending.add(label)
        address = variables.get("model_weights_address") or variables.get("ansible_host") or name
        site = str(variables.get("model_weights_site") or "")
        hosts.append(FleetHost(name, str(address), site, frozenset(wanted), frozenset(pending)))
    return hosts


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """Runs the module of the same name; `share` and `fetch` know the other hosts of the play."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Look, share, or fetch and watch."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        self._vars = task_vars or {}
        given = plain(self._task.args)
        arguments = {name: value for name, value in given.items() if name not in _OWN}
        step = given.get("step", "look")
        if step == "share":
            return {**result, **self._share(given, arguments)}
        if step == "install":
            return {**result, **self._module({**arguments, "worker": packed_worker()})}
        if step == "fetch" and not self._task.check_mode:
            return {**result, **self._fetch(given, arguments)}
        return {**result, **self._module({**arguments, "step": "look"})}

    def _module(self, arguments: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self._execute_module("model_weights", module_args=arguments, task_vars=self._vars)
        return found

    def _fleet(self, given: Mapping[str, Any]) -> list[FleetHost]:
        return fleet(list(given.get("peers") or []), self._vars["hostvars"])

    def _share(self, given: Mapping[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
        addresses = sharing_addresses(self._fleet(given), self._vars["inventory_hostname"])
        if not addresses or self._task.check_mode:
            return {"changed": False, "message": "no other host needs what is here"}
        # Not a change of the host's state: the server ends by itself.
        return self._module({**arguments, "addresses": addresses, "worker": packed_worker()})

    def _fetch(self, given: Mapping[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
        host, model = self._vars["inventory_hostname"], f"{given['key']}@{given['revision']}"
        plan = fetch_plan(
            self._fleet(given), host, model, int(given.get("hosts_at_once") or 1), int(given.get("share_port") or 0)
        )
        # One file after the other along a chain: the next host begins when the first file is whole.
        connections = arguments.get("connections") if plan.seed else 1
        begun = self._module(
            {
                **arguments,
                "step": "start",
                "seed": plan.seed,
                "peer_urls": list(plan.peers),
                "connections": connections,
                "worker": packed_worker(),
            }
        )
        if begun.get("failed"):
            return begun
        label = f"{given['key']}@{str(given['revision'])[:12]}"
        if begun["joined"]:
            self._display.display(f"{host}: {label}: is being fetched already; watching it")
        status = {"step": "status", **{name: given[name] for name in ("models_dir", "key", "revision")}}
        return self._watch(host, label, status, given)

    def _watch(self, host: str, label: str, status: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        every = float(given.get("progress_seconds") or 0)
        timeout = float(given.get("timeout_seconds") or 86400)
        began = said = answered = time.monotonic()
        pause, line = _FIRST_LOOK_SECONDS, ""
        while True:
            time.sleep(pause)
            pause = min(_LAST_LOOK_SECONDS, pause * 1.5)
            try:
                found = self._module(status)
            except AnsibleConnectionFailure as error:
                if time.monotonic() - answered > _CONNECTION_PATIENCE_SECONDS:
                    raise
                self._display.display(f"{host}: no connection ({error}); the fetch goes on there, trying again")
                self._connection.reset()
                continue
            if found.get("failed"):
                return found
            answered = time.monotonic()
            state = found["job"]
            if state["state"] == "done":
                self._display.display(summary_line(host, label, state))
                names = ("changed", "path", "message", "fetched_files", "healed_files")
                return {**{name: state.get(name) for name in names}, "job": state}
            if state["state"] not in ("queued", "starting", "running"):
                return {"failed": True, "msg": state.get("message") or self._died(label, found), "job": state}
            if answered - began > timeout:
                return {"failed": True, "msg": self._too_long(label, timeout, state), "job": state}
            new = progress_line(host, label, state)
            if every and answered - said >= every and new != line:
                self._display.display(new)
                said, line = answered, new

    @staticmethod
    def _died(label: str, found: Mapping[str, Any]) -> str:
        return (
            f"The worker for {label} is gone and left no result ({found.get('last_words') or 'its journal is empty'}). "
            f"Needed: a worker that may run to its end. Change: look at `journalctl -u {found.get('unit')}`, then run "
            "again; what is complete is kept."
        )

    @staticmethod
    def _too_long(label: str, timeout: float, state: Mapping[str, Any]) -> str:
        return (
            f"{label} is at {state.get('done_bytes', 0)} of {state.get('total_bytes', 0)} bytes after {timeout:.0f} s. "
            "Needed: the whole model in that time. Change: model_weights_timeout_seconds, or run again: the worker "
            "goes on meanwhile, and the next run watches it."
        )
