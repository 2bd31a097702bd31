"""Every metric that a rule or a dashboard asks for exists, by the recorded output of what tells it."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from expressions import BUILT_IN, DASHBOARDS, FIXTURES, all_expressions, metric_names, recorded_names, records

from metalserve.monitoring.rules import TTFT_BOUNDS

EXPRESSIONS = dict(all_expressions())
KNOWN = recorded_names()


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_the_names_of_an_expression_exist(where):
    names = metric_names(EXPRESSIONS[where])
    assert names
    assert names - set().union(*KNOWN.values()) - records() - BUILT_IN == set()


def test_there_is_something_to_check():
    assert len(EXPRESSIONS) > 80
    assert {name: len(names) > 20 for name, names in KNOWN.items()} == dict.fromkeys(KNOWN, True)
    assert len(KNOWN) == 6


def test_a_name_that_nobody_tells_would_be_noticed():
    asked = metric_names(
        "sum by (le) (rate(vllm:time_to_first_tokn_seconds_bucket[5m])) or on (a) up{x='vllm:b'} offset 5m"
    )
    assert asked == {"vllm:time_to_first_tokn_seconds_bucket", "up"}
    assert not asked & set().union(*KNOWN.values())


def test_a_record_is_used_somewhere():
    used = set().union(*map(metric_names, EXPRESSIONS.values()))
    assert records() - used == set()


def test_the_fields_that_dcgm_is_asked_for_are_its_own():
    template = (FIXTURES.parents[2] / "roles/host_metrics/templates/dcgm-fields.csv.j2").read_text(encoding="utf-8")
    asked = set(re.findall(r"^(DCGM_\w+),", template, re.MULTILINE))
    assert asked
    assert asked <= KNOWN["dcgm-exporter.csv"]
    shown = {name for text in EXPRESSIONS.values() for name in metric_names(text) if name.startswith("DCGM_")}
    assert shown <= asked


def test_the_bounds_of_the_histogram_are_vllms_own():
    text = (FIXTURES / "vllm-0.32.0.metrics").read_text(encoding="utf-8")
    real = set(re.findall(r'vllm:time_to_first_token_seconds_bucket\{.*le="([^"]+)"', text))
    assert set(TTFT_BOUNDS["vllm"]) <= real


def test_the_dashboards_are_what_the_code_makes():
    """Change src/metalserve/monitoring/dashboards.py, then `make dashboards`."""
    from metalserve.monitoring.dashboards import dashboards

    assert {path.name: path.read_text(encoding="utf-8") for path in DASHBOARDS.iterdir()} == dashboards()


@pytest.mark.parametrize("path", sorted(DASHBOARDS.glob("*.json")), ids=lambda path: path.stem)
def test_a_dashboard_has_titles_units_and_one_data_source(path):
    board = json.loads(path.read_text(encoding="utf-8"))
    assert board["uid"] == f"metalserve-{path.stem}"
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert all(panel["title"] and panel["targets"] for panel in panels)
    assert {panel["datasource"]["uid"] for panel in panels} == {"metalserve"}
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
