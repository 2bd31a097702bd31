"""Shows on the controller what differs from the inventory, in one table, and fails once where that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from metalserve.drift import drift_refusal, drift_remarks, drift_summary, drift_table, host_aspects, report_json
from metalserve.errors import Refusal
from metalserve.plain import plain

_ARGUMENTS: dict[str, Any] = {
    "hosts": {"type": "list", "elements": "str", "required": True},
    "json": {"type": "path"},
    "fail": {"type": "bool", "default": False},
}


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """Runs once, for the whole play; touches no host."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Compare, show, write, refuse."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _validated, arguments = self.validate_argument_spec(_ARGUMENTS)
        given = plain(arguments)
        hostvars = (task_vars or {})["hostvars"]
        found = {host: _found(hostvars[host]) for host in given["hosts"]}
        Display().display("\n".join([*drift_table(found), "", *drift_remarks(found), drift_summary(found)]))
        if given["json"]:
            try:
                Path(given["json"]).write_text(report_json(found), encoding="utf-8")
            except OSError as error:
                refusal = Refusal(
                    found=f"the report {given['json']} cannot be written: {error.strerror}",
                    needed="a directory on the controller that exists and may be written",
                    change="drift_report_json",
                )
                return {**result, "failed": True, "msg": str(refusal)}
        final = drift_refusal(found)
        if final and given["fail"]:
            return {**result, "failed": True, "msg": str(final)}
        return {**result, "changed": False, "msg": drift_summary(found)}


def _found(variables: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of one host, from what its plays have left."""
    aspects: dict[str, list[str] | None] = {}
    trouble = ""
    gateway = plain(variables.get("gateway_drift"))
    if gateway is not None:
        aspects["gateway"] = gateway["differences"]
        trouble = gateway["trouble"]
    looked = plain(variables.get("__drift_look"))
    if looked is not None:
        seen = plain(variables.get("__drift_seen") or {})
        trouble = trouble or looked["trouble"] or ("" if "aspects" in seen else str(seen.get("msg", "")))
        if not trouble:
            aspects |= host_aspects(
                looked["facts"],
                looked["releases"],
                seen["aspects"],
                looked["files"],
                toolkit_version=looked["toolkit_version"],
            )
    if gateway is None and looked is None:
        trouble = "it could not be reached"
    return {"aspects": aspects, "trouble": trouble or None}
