"""The rulebook by ansible-rulebook's own schema and parsers, and what it starts by the templates that there are."""

from __future__ import annotations

import re

import pytest
import yaml
from ansible_rulebook.exception import ConditionParsingException
from ansible_rulebook.rules_parser import parse_rule_sets
from ansible_rulebook.validators import Validate
from awx_job import ROOT, TEMPLATES
from jsonschema import ValidationError
from survey_rules import answer_errors
from test_data import survey

PATH = ROOT / "extensions/eda/rulebooks/isolate_host.yml"
VARIABLES = {**yaml.safe_load((ROOT / "extensions/eda/variables.yml").read_text()), "alertmanager_token": "t"}


@pytest.fixture
def rulebook():
    return yaml.safe_load(PATH.read_text())


def actions(rulebook):
    return [action["run_job_template"] for each in rulebook for rule in each["rules"] for action in rule["actions"]]


def test_the_schema_and_the_parsers_take_it(rulebook):
    Validate.rulebook(rulebook)
    ((rule,),) = (each.rules for each in parse_rule_sets(rulebook, VARIABLES))
    assert rule.throttle.group_by_attributes == ["event.labels.host"]
    assert [action.action for action in rule.actions] == ["run_job_template", "run_job_template"]


def test_the_whole_condition_is_understood(rulebook):
    """The parser leaves out what follows a mistake, without a word."""
    ((rule,),) = (each.rules for each in parse_rule_sets(rulebook, VARIABLES))
    text = str(rule.condition)
    assert all(f"'event.{name}'" in text for name in ("status", "labels.metalserve_action", "labels.host"))
    assert text.count("operator='and'") == rulebook[0]["rules"][0]["condition"].count(" and ") == 2


def test_a_wrong_key_and_a_wrong_condition_are_noticed(rulebook):
    rule = rulebook[0]["rules"][0]
    with pytest.raises(ConditionParsingException):
        parse_rule_sets([{**rulebook[0], "rules": [{**rule, "condition": "== 1"}]}], VARIABLES)
    rule["conditions"] = rule.pop("condition")
    with pytest.raises(ValidationError):
        Validate.rulebook(rulebook)


def test_what_it_starts_is_there_and_takes_what_it_gives(rulebook):
    for action in actions(rulebook):
        key = action["name"].removeprefix("metalserve ")
        assert answer_errors(survey(TEMPLATES[key]), action["job_args"].get("extra_vars", {})) == []
        # The controller would drop the event, which no survey asks for.
        assert action["include_events"] is False


def test_its_variables_are_named(rulebook):
    used = set(re.findall(r"\{\{ (\w+) \}\}", PATH.read_text()))
    assert used == set(VARIABLES)


@pytest.mark.parametrize(
    ("name", "fits"),
    [("gpu-1.example.com", True), ("all", True), ("!gpu-1", False), ("gpu*", False), ("a,b", False), ("a:b", False)],
)
def test_a_host_s_name_is_no_pattern(rulebook, name, fits):
    (pattern,) = re.findall(r'regex\("(.+?)"', rulebook[0]["rules"][0]["condition"])
    assert bool(re.search(pattern, name)) is fits
