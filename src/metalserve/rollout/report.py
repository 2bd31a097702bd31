"""The report of a rollout: who has what now, as lines, as JSON and as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment

COLUMNS = ("host", "deployment", "from", "to", "state", "seconds", "gate", "gateway", "watched", "planned", "measured")
_WORDS = {
    "rolled_out": "Rollout",
    "rolled_back": "Rollback",
    "taken_back": "Taking back",
    "restarted": "Restart",
    "retired": "Retirement",
}
_TITLES = {"planned": "planned tokens", "measured": "measured tokens"}


def report_rows(plan: Mapping[str, Any], seen: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each deployment of each host.

    Args:
        plan: what `rollout_plan` returns.
        seen: by host: outcomes (of `serving_rollout`, those of the check run where the change was not reached), reached
            (whether it was), proofs (server, passed, msg), verdicts (server, ok, text), back (outcomes of a way back),
            message (why it failed, None), lost (whether it could not be reached any more), gateway_lost (the gateway
            that could not be reached in its name, None).

    Returns:
        Rows with the keys of `COLUMNS` and `message`. State is one of unchanged, started, stopped, changed, not begun,
        back, failed, lost, gateway lost, and in a check run would change.
    """
    rows = []
    for name in plan["order"]:
        host = seen.get(name, {})
        for outcome in host.get("outcomes", ()):
            server = f"{name}:{outcome['deployment']}"
            changing = server in plan["hosts"][name]["changing"]
            back = {item["deployment"]: item for item in host.get("back", ())}.get(outcome["deployment"])
            last = back or outcome
            verdict = [item for item in host.get("verdicts", ()) if item["server"] == server]
            proof = [item for item in host.get("proofs", ()) if item["server"] == server]
            capacity = last.get("capacity") or {}
            rows.append(
                {
                    "host": name,
                    "deployment": outcome["deployment"],
                    "from": outcome["before"],
                    "to": last["active"] if host.get("reached") else outcome["before"],
                    "wanted": outcome["wanted"],
                    "state": "would change"
                    if plan.get("check") and changing
                    else _state(host, outcome, back, changing),
                    "seconds": last.get("seconds") or None,
                    "gate": last.get("gate") or None,
                    "gateway": ("passed" if all(item["passed"] for item in proof) else "refused") if proof else None,
                    "watched": "; ".join(item["text"] for item in verdict) or None,
                    "planned": capacity.get("planned"),
                    "measured": capacity.get("reported"),
                    "message": host.get("message"),
                }
            )
    return rows


def _state(host: Mapping[str, Any], outcome: Mapping[str, Any], back: Any, changing: bool) -> str:
    if host.get("lost"):
        return "lost"
    if back is not None:
        return "back" if back["serving"] else "failed"
    if host.get("gateway_lost") and host.get("message") and (outcome["ok"] or not host.get("reached")):
        return "gateway lost"
    if not host.get("reached"):
        return "not begun" if changing or host.get("message") else "unchanged"
    if outcome["ok"]:
        failed = [
            item
            for item in (*host.get("proofs", ()), *host.get("verdicts", ()))
            if not item.get("passed", item.get("ok"))
        ]
        if failed and host.get("message"):
            return "failed"
        if outcome.get("stopped"):
            return "stopped"
        return "changed" if outcome["before"] != outcome["active"] else "started" if outcome["started"] else "unchanged"
    return "back" if outcome["serving"] else "failed"


def report_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows as aligned lines; columns that say nothing are left out."""
    columns = [name for name in COLUMNS if name in ("host", "state") or any(row[name] is not None for row in rows)]
    table = [[_TITLES.get(name, name) for name in columns]]
    table += [[_text(row[name]) for name in columns] for row in rows]
    widths = [max(len(line[index]) for line in table) for index in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]


def summary(rows: Sequence[Mapping[str, Any]], *, check: bool, action: str = "rolled_out") -> str:
    """What became of the rollout, or of what else was done host by host, in one sentence."""
    states = [row["state"] for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    if check:
        return f"Check run: {counts}; nothing was changed"
    stopped = any(state in ("back", "failed", "lost", "gateway lost", "not begun") for state in states)
    return f"{_WORDS[action]} {'stopped' if stopped else 'done'}: {counts or 'no host'}"


def report_html(document: Mapping[str, Any]) -> str:
    """One page without anything from elsewhere.

    Args:
        document: when, who, summary, seconds, batches, rows.
    """
    source = resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    return template.render(**document, columns=COLUMNS, titles=_TITLES, text=_text)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if isinstance(value, float) else str(value)
