"""Every expression of rules and dashboards, and the names of metrics in them as Prometheus' own grammar sees them."""

import json
import re
from pathlib import Path

import promql_parser
import yaml

from metalserve.monitoring.rules import rule_files
from metalserve.remote.host_metrics import METRICS

PROJECT = Path(__file__).resolve().parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
DASHBOARDS = PROJECT / "roles/monitoring/files/dashboards"
# Prometheus' own.
BUILT_IN = {"up", "ALERTS"}
# What a host tells only with GPUs, or after a refusal.
_RARE = re.compile(r"metalserve_(driver|gpu|gpus|xid|sxid|container_toolkit|plan_gpu|release_refused)(_|$)")


def rules():
    """Each record and alert as Prometheus gets it."""
    for name, text in rule_files().items():
        for group in yaml.safe_load(text)["groups"]:
            for rule in group["rules"]:
                yield f"{name} {rule.get('record') or rule['alert']}", rule


def all_expressions():
    """Where an expression stands, and the expression with Grafana's variables filled in."""
    for where, rule in rules():
        yield where, rule["expr"]
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", []):
                text = target["expr"].replace("$__rate_interval", "5m")
                yield f"{path.name} {panel['title']} {target['refId']}", re.sub(r"\$(model|host)\b", ".*", text)


def metric_names(expression):
    """The names of the metrics that an expression selects."""
    found = set()

    def walk(node):
        for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
            child = getattr(node, name, None)
            if isinstance(child, promql_parser.Expr):
                walk(child)
        for child in getattr(node, "args", None) or []:
            walk(child)
        if isinstance(node, promql_parser.VectorSelector):
            found.add(node.name)

    walk(promql_parser.parse(expression))
    return found


def records():
    """Names that the rules make."""
    return {rule["record"] for _, rule in rules() if "record" in rule}


def recorded_names():
    """What each fixture names."""

    def samples(path):
        return {
            re.match(r"[A-Za-z_:][\w:]*", line)[0]
            for line in path.read_text().splitlines()
            if line[:1] not in ("#", "")
        }

    names = {path.name: samples(path) for path in FIXTURES.iterdir() if path.suffix in (".metrics", ".csv")}
    sglang = [line.split() for line in (FIXTURES / "sglang-0.5.23.names").read_text().splitlines() if line[0] != "#"]
    suffixes = {"Histogram": ("_bucket", "_count", "_sum")}
    names["sglang-0.5.23.names"] = {name + end for name, kind in sglang for end in suffixes.get(kind, ("",))}
    return {**names, "host_metrics.py": set(METRICS)}


def absent_without_gpus(name):
    """Whether a name may be missing where there is no GPU, no SGLang, and no release was refused."""
    return name.startswith(("DCGM_", "sglang:")) or bool(_RARE.match(name)) or name in BUILT_IN
