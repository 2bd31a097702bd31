"""Judges all hosts of a play on the controller, shows one table, and fails once when a host is refused."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from metalserve.deployments import Inputs, plan_table
from metalserve.errors import Refusal
from metalserve.plain import plain
from metalserve.verdict.fleet import (
    fleet_plan,
    fleet_refusal,
    fleet_remarks,
    fleet_summary,
    fleet_table,
    report_json,
    report_junit,
)
from metalserve.verdict.host import HostVerdict, host_verdict, refused_host
from metalserve.verdict.options import read_options

_INPUTS: dict[str, Any] = {
    "models": {},
    "engines": {},
    "lock": {},
    "weight_sources": {},
    "models_dir": "/var/lib/metalserve/models",
}


_ARGUMENTS: dict[str, Any] = {
    "hosts": {"type": "list", "elements": "str", "required": True},
    "variables": {"type": "dict", "required": True},
    "json": {"type": "path"},
    "junit": {"type": "path"},
}


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """Runs once, for the whole play; touches no host, for the facts are there already."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Judge, show, write, refuse."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _validated, arguments = self.validate_argument_spec(_ARGUMENTS)
        given = plain(arguments)
        hostvars = (task_vars or {})["hostvars"]
        today = dt.datetime.now(tz=dt.UTC).date()
        judged = {host: _judge(hostvars[host], given["variables"], today) for host in given["hosts"]}
        verdicts = {host: verdict.as_dict() for host, verdict in judged.items()}
        lines = [
            *fleet_plan({host: plan_table(verdict.releases) for host, verdict in judged.items()}),
            "",
            *fleet_table(verdicts),
            "",
            *fleet_remarks(verdicts),
            fleet_summary(verdicts),
        ]
        Display().display("\n".join(lines))
        for name, make in (("json", report_json), ("junit", report_junit)):
            if given.get(name):
                try:
                    Path(given[name]).write_text(make(verdicts), encoding="utf-8")
                except OSError as error:
                    refusal = Refusal(
                        found=f"the report {given[name]} cannot be written: {error.strerror}",
                        needed="a directory on the controller that exists and may be written",
                        change=f"preflight_report_{name}",
                    )
                    return {**result, "failed": True, "msg": str(refusal)}
        final = fleet_refusal(verdicts)
        if final:
            return {**result, "failed": True, "msg": str(final)}
        releases = {
            host: [{name: release[name] for name in ("deployment", "release_id")} for release in verdict.releases]
            for host, verdict in judged.items()
        }
        known = [host for host in judged if _has_releases(hostvars[host])]
        return {**result, "changed": False, "msg": fleet_summary(verdicts), "known": known, "releases": releases}


def _has_releases(variables: Mapping[str, Any]) -> bool:
    facts = (variables.get("ansible_facts") or {}).get("gpu_host") or {}
    return bool(facts.get("deployments"))


def _judge(variables: Mapping[str, Any], names: Mapping[str, Any], today: dt.date) -> HostVerdict:
    """The verdict of one host from its variables; a variable that cannot be read is that host's trouble only."""
    try:
        values = _values(variables, names)
        facts = plain((variables.get("ansible_facts") or {}).get("gpu_host"))
    except Exception as error:  # templating fails in many ways, and no host may hide the others
        return refused_host(f"a variable of the host cannot be read: {error}")
    given = {**_INPUTS, **{name: value for name, value in values["inputs"].items() if value is not None}}
    try:
        options = read_options(_signed(values["options"]))
    except Refusal as refusal:
        return refused_host(str(refusal))
    trouble = values["trouble"] or ""
    return host_verdict(facts, values["deployments"] or [], Inputs(**given), options, today, trouble=trouble)


def _values(variables: Mapping[str, Any], names: Any) -> Any:
    """The values in the place of their variables' names; None for a variable that the host does not have."""
    if isinstance(names, Mapping):
        return {key: _values(variables, name) for key, name in names.items()}
    return plain(variables.get(names))


def _signed(options: dict[str, Any]) -> dict[str, Any]:
    """A key that the inventory names is taken to be enrolled: the driver's role looks at it."""
    driver = dict(options["driver"])
    named = driver.pop("signing_key")
    return {**options, "driver": {**driver, "key_enrolled": True if named else None}}
