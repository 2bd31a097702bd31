"""The verdicts of a fleet in one table, with each remedy once, and as files for machines."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from typing import Any

from metalserve.errors import Refusal
from metalserve.verdict.check import AFTER, GROUPS, OK, REFUSED, WARN, worst

Verdicts = Mapping[str, Mapping[str, Any]]

# What a cell says. Only a refusal is loud.
_WORDS = {OK: "ok", WARN: "warn", AFTER: "after", REFUSED: "REFUSED"}
_NOTHING = "-"
_HOSTS_NAMED = 5


def fleet_table(verdicts: Verdicts) -> list[str]:
    """One line a host, one column a group of checks, aligned."""
    rows: list[tuple[str, ...]] = [("host", "verdict", *GROUPS)]
    for host, verdict in verdicts.items():
        cells = [_cell(verdict["checks"], group) for group in GROUPS]
        rows.append((host, _WORDS[verdict["verdict"]], *cells))
    return aligned(rows)


def _cell(checks: Sequence[Mapping[str, Any]], group: str) -> str:
    verdicts = [check["verdict"] for check in checks if check["group"] == group]
    return _WORDS[worst(verdicts)] if verdicts else _NOTHING


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines whose columns stand below each other."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def fleet_remarks(verdicts: Verdicts) -> list[str]:
    """Every refusal, action and warning, the worst first; what several hosts have in common stands once."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for host, verdict in verdicts.items():
        for check in verdict["checks"]:
            if check["verdict"] != OK:
                found.setdefault((check["verdict"], check["name"], _sentence(check)), []).append(host)
    lines = []
    for level in (REFUSED, AFTER, WARN):
        lines += [
            f"{_WORDS[level]:<7}  {hosts_named(hosts)}: {name}: {text}"
            for (verdict, name, text), hosts in found.items()
            if verdict == level
        ]
    return lines


def _sentence(check: Mapping[str, Any]) -> str:
    text = str(Refusal(found=check["found"], needed=check["needed"], change=check["change"]))
    return f"{check['action']}. {text}" if check["action"] else text


def hosts_named(hosts: Sequence[str]) -> str:
    """A few hosts by name, and how many more."""
    if len(hosts) <= _HOSTS_NAMED:
        return ", ".join(hosts)
    return f"{', '.join(hosts[:_HOSTS_NAMED])} and {len(hosts) - _HOSTS_NAMED} more"


def fleet_plan(plans: Mapping[str, Sequence[str]]) -> list[str]:
    """The plan tables of the hosts under one heading; hosts with one and the same plan stand together.

    Args:
        plans: host -> the lines of `plan_table`.
    """
    same: dict[tuple[str, ...], list[str]] = {}
    for host, lines in plans.items():
        if len(lines) > 1:
            same.setdefault(tuple(lines), []).append(host)
    out: list[str] = []
    for lines, hosts in same.items():
        out += [f"{hosts_named(hosts)}:", *(f"  {line}" for line in lines)]
    return out


def fleet_summary(verdicts: Verdicts) -> str:
    """How many hosts got which verdict."""
    counts = {level: sum(verdict["verdict"] == level for verdict in verdicts.values()) for level in _WORDS}
    parts = [f"{counts[OK]} ok", f"{counts[AFTER]} ok after the playbooks have run", f"{counts[REFUSED]} refused"]
    return f"{len(verdicts)} host{'s' * (len(verdicts) != 1)}: {', '.join(parts)}"


def fleet_refusal(verdicts: Verdicts) -> Refusal | None:
    """The one sentence with which a run ends, None where no host is refused."""
    bad = [host for host, verdict in verdicts.items() if verdict["verdict"] == REFUSED]
    if not bad:
        return None
    return Refusal(
        found=f"{len(bad)} of {len(verdicts)} hosts are refused: {hosts_named(bad)}",
        needed="no refused host; nothing has been changed on any of them",
        change="what each line marked REFUSED above says, or leave those hosts out with --limit",
    )


def report_json(verdicts: Verdicts) -> str:
    """The verdicts as a JSON text: {schema, hosts: {host: {verdict, action, checks}}}."""
    return json.dumps({"schema": 1, "hosts": verdicts}, indent=1, sort_keys=True) + "\n"


def report_junit(verdicts: Verdicts) -> str:
    """The verdicts as JUnit XML: a test suite for each host, a test case for each check.

    A refusal is a failure. Warnings and actions pass and stand in the case's output.
    """
    root = ElementTree.Element("testsuites", name="preflight")
    for host, verdict in verdicts.items():
        checks = verdict["checks"]
        failures = sum(check["verdict"] == REFUSED for check in checks)
        suite = ElementTree.SubElement(
            root, "testsuite", name=host, tests=str(len(checks)), failures=str(failures), errors="0", skipped="0"
        )
        for check in checks:
            case = ElementTree.SubElement(suite, "testcase", classname=f"{host}.{check['group']}", name=check["name"])
            if check["verdict"] == REFUSED:
                ElementTree.SubElement(case, "failure", message=_printable(_sentence(check)), type="refused")
            elif check["verdict"] != OK:
                output = ElementTree.SubElement(case, "system-out")
                output.text = _printable(f"{check['verdict']}: {_sentence(check)}")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _printable(text: str) -> str:
    """XML 1.0 has no control characters, and a kernel's message may have them."""
    return "".join(character if character.isprintable() else " " for character in text)
