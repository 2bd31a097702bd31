"""Each alert in Prometheus' own hands: when it fires, with which words, and when it does not."""

import re
from pathlib import Path

import pytest
import yaml

from metalserve.errors import Refusal
from metalserve.monitoring.rules import SETTINGS, alerts, anchor, rule_files

CASES = yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text(encoding="utf-8"))
ENTRIES = {entry["alert"]: entry for _, entry in alerts()}


@pytest.fixture(scope="session")
def rendered():
    """The rules as Prometheus gets them, by alert."""
    files = [yaml.safe_load(text) for text in rule_files().values()]
    return {
        rule["alert"]: rule
        for content in files
        for group in content["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }


@pytest.fixture
def folder(tmp_path):
    for name, text in rule_files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def filled(text, labels):
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: labels.get(match[1], ""), text)


def unit_test(alert, case, rule):
    """One case in promtool's own form."""
    expected = [
        {
            "exp_labels": {**labels, **rule["labels"]},
            "exp_annotations": {name: filled(text, labels) for name, text in rule["annotations"].items()},
        }
        for labels in case["fires"]
    ]
    return {
        "rule_files": ["metalserve-*.yml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": case.get("step", "1m"),
                "input_series": [{"series": name, "values": str(values)} for name, values in case["series"].items()],
                "alert_rule_test": [{"eval_time": case["at"], "alertname": alert, "exp_alerts": expected}],
            }
        ],
    }


def test_prometheus_takes_the_rules(promtool, folder):
    status, said = promtool("check", "rules", *sorted(folder.iterdir()))
    assert status == 0, said


@pytest.mark.parametrize("alert", ENTRIES)
def test_an_alert_has_a_firing_and_a_silent_case(alert):
    assert {bool(case["fires"]) for case in CASES[alert]} == {True, False}


def test_there_are_no_cases_of_alerts_that_are_gone():
    assert sorted(CASES) == sorted(ENTRIES)


@pytest.mark.parametrize(
    ("alert", "case"),
    [
        pytest.param(alert, case, id=f"{alert}: {case['case']}".replace(" ", "_"))
        for alert, cases in CASES.items()
        for case in cases
    ],
)
def test_an_alert_fires_when_it_should_and_only_then(promtool, folder, rendered, alert, case):
    wanted = folder / "case.yml"
    wanted.write_text(yaml.safe_dump(unit_test(alert, case, rendered[alert]), sort_keys=False), encoding="utf-8")
    status, said = promtool("test", "rules", wanted)
    assert status == 0, said


def test_a_wrong_expectation_is_noticed(promtool, folder, rendered):
    """The other way round: promtool refuses a case whose outcome is turned over."""
    case = {**CASES["HostDown"][0], "fires": []}
    wanted = folder / "case.yml"
    wanted.write_text(yaml.safe_dump(unit_test("HostDown", case, rendered["HostDown"])), encoding="utf-8")
    assert promtool("test", "rules", wanted)[0] == 1


@pytest.mark.parametrize("alert", ENTRIES)
def test_an_alert_names_a_cause_a_first_command_and_its_page(rendered, alert):
    words = rendered[alert]["annotations"]
    assert re.fullmatch(r"Cause: .+\. First: .+", words["description"])
    assert words["runbook_url"] == f"docs/monitoring.md#{anchor(alert)}"
    assert "@{" not in str(rendered[alert])


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_used(name):
    changed = {"ttft_objective_seconds": 2.5, "ttft_objective_ratio": 0.99, "runbook": "https://x"}
    value = changed.get(name, {"10": 11}.get(str(SETTINGS[name]), "7m" if str(SETTINGS[name]).endswith("m") else 77))
    assert rule_files({name: value}) != rule_files()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ttft_objektive": 1}, "the settings ttft_objektive of the rules. Needed: only ttft_objective_seconds"),
        ({"ttft_objective_seconds": 0.05}, "Needed: at least 0.1, the first bound of vllm's histogram"),
        ({"ttft_objective_ratio": 0.9}, "Needed: a share from 0.94 on and below 1"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings, text):
    with pytest.raises(Refusal, match=re.escape(text)):
        rule_files(settings)


def test_an_objective_takes_the_largest_bound_up_to_it():
    records = rule_files({"ttft_objective_seconds": 3})["metalserve-records.yml"]
    assert 'vllm:time_to_first_token_seconds_bucket{le="2.5"}' in records
    assert 'sglang:time_to_first_token_seconds_bucket{le="2.0"}' in records


def test_each_alert_has_its_place_in_the_documentation_with_its_first_command():
    text = (Path(__file__).parents[3] / "docs/monitoring.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL))
    assert sorted(sections) == sorted(ENTRIES)
    for alert, entry in ENTRIES.items():
        # Up to the first name that is only known when it fires.
        assert entry["first"].partition("{{")[0].rstrip() in sections[alert], alert


def test_the_documentation_has_the_settings_and_their_values():
    text = (Path(__file__).parents[3] / "docs/monitoring.md").read_text(encoding="utf-8")
    assert [name for name in SETTINGS if f"`{name}`" not in text] == []
