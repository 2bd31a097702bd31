"""Prometheus' rule files from rules.yaml: records, and alerts with a cause and a first command in each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.resources import files
from string import Template
from typing import Any

import yaml

from metalserve.errors import Refusal
from metalserve.monitoring.settings import catalogue

# Bounds of the engines' histograms of the time to the first token, in seconds, as they write them.
# vLLM 0.32.0: its own /metrics. SGLang 0.5.23: observability/metrics_collector.py.
TTFT_BOUNDS = {
    "vllm": ("0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "7.5", "10.0", "20.0", "40.0", "80.0"),
    "sglang": ("0.1", "0.2", "0.4", "0.6", "0.8", "1.0", "2.0", "4.0", "6.0", "8.0", "10.0", "20.0", "40.0", "60.0"),
}
# What a site may set, with what holds otherwise. Durations are Prometheus' own words.
SETTINGS: Mapping[str, Any] = {
    "ttft_objective_seconds": 5.0,
    "ttft_objective_ratio": 0.95,
    "down_for": "2m",
    "stall_window": "5m",
    "stall_for": "1m",
    "release_for": "30m",
    "kv_full_ratio": 0.95,
    "preemption_ratio": 0.2,
    "capacity_percent": 10,
    "certificate_days": 21,
    "driver_days": 90,
    "disk_ratio": 0.1,
    "stale_seconds": 600,
    "runbook": "docs/monitoring.md",
}


class _Placeholders(Template):
    """`@{name}`: braces and dollars belong to PromQL and to Prometheus' own templates."""

    delimiter = "@"
    pattern = r"@(?:(?P<escaped>@)|\{(?P<braced>[a-z0-9_]+)\}|(?P<named>(?!))|(?P<invalid>(?!)))"  # type: ignore[assignment]


def rule_files(settings: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Prometheus' rule files, text by name.

    Args:
        settings: values for names of `SETTINGS`; the others keep theirs.

    Raises:
        Refusal: a setting that does not exist, or an objective that no histogram can tell.
    """
    given = dict(settings or {})
    unknown = sorted(given.keys() - SETTINGS.keys())
    if unknown:
        raise Refusal(
            found=f"the settings {', '.join(unknown)} of the rules",
            needed=f"only {', '.join(SETTINGS)}",
            change="monitoring_rule_settings",
        )
    values = _values({**SETTINGS, **given})
    data = _data()
    records = [
        {"record": _fill(rule["record"], named), "expr": _fill(rule["expr"], named)}
        for rule in data["records"]
        for window in rule.get("windows", [None])
        for named in [{**values, "window": window}]
    ]
    groups: dict[str, list[dict[str, Any]]] = {"records": records}
    groups |= {name: [_alert(entry, values) for entry in alerts] for name, alerts in data["alerts"].items()}
    return {
        f"metalserve-{name}.yml": yaml.safe_dump(
            {"groups": [{"name": f"metalserve-{name}", "rules": rules}]}, sort_keys=False, width=10_000
        )
        for name, rules in groups.items()
    }


def alerts() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Group and entry of each alert, with its placeholders."""
    for group, entries in _data()["alerts"].items():
        for entry in entries:
            yield group, entry


def anchor(alert: str) -> str:
    """The heading of an alert's runbook in docs/monitoring.md, as a link writes it."""
    return alert.lower()


def _alert(entry: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    name = entry["alert"]
    return {
        "alert": name,
        "expr": _fill(entry["expr"], values),
        "for": _fill(entry["for"], values),
        "labels": {"severity": "page" if entry.get("page") else "ticket"},
        "annotations": {
            "summary": _fill(entry["summary"], values),
            "description": _fill(f"Cause: {entry['cause']}. First: {entry['first']}", values),
            "runbook_url": _fill(f"@{{runbook}}#{anchor(name)}", values),
        },
    }


def _values(settings: Mapping[str, Any]) -> dict[str, str]:
    objective, ratio = float(settings["ttft_objective_seconds"]), float(settings["ttft_objective_ratio"])
    # Fourteen times the budget must still be less than all.
    if not 0.94 <= ratio < 1:
        raise Refusal(
            found=f"ttft_objective_ratio {ratio:g}",
            needed="a share from 0.94 on and below 1: the fast alert fires when 14.4 times the rest is late",
            change="ttft_objective_ratio in monitoring_rule_settings",
        )
    bounds = {}
    for engine, known in TTFT_BOUNDS.items():
        fitting = [bound for bound in known if float(bound) <= objective]
        if not fitting:
            raise Refusal(
                found=f"ttft_objective_seconds {objective:g}",
                needed=f"at least {known[0]}, the first bound of {engine}'s histogram that counts here",
                change="ttft_objective_seconds in monitoring_rule_settings",
            )
        bounds[f"ttft_{engine}_bound"] = fitting[-1]
    xids: dict[str, list[int]] = {}
    for code, (kind, _name) in catalogue("xid.yaml")["codes"].items():
        xids.setdefault(kind, []).append(code)
    return {
        **{name: str(value) for name, value in settings.items()},
        **bounds,
        "ttft_budget": f"{1 - ratio:.4g}",
        "throttle_fail": "|".join(catalogue("health.yaml")["throttle_fail"]),
        **{f"xids_{kind}": "|".join(map(str, codes)) for kind, codes in xids.items()},
    }


def _fill(text: str, values: Mapping[str, Any]) -> str:
    return " ".join(_Placeholders(text).substitute(values).split())


@lru_cache(maxsize=1)
def _data() -> Mapping[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(files(__package__).joinpath("rules.yaml").read_text(encoding="utf-8"))
    return loaded
