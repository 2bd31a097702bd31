"""The rulebook by ansible-rulebook's own schema and parsers, and what it starts by the templates that there are."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from ansible_rulebook.exception import ConditionParsingException
from ansible_rulebook.rules_parser import parse_rule_sets
from ansible_rulebook.validators import Validate
from awx_job import ROOT, TEMPLATES
from controller import Controller, serve
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


# ---- the real engine, where there is a Java for it ----


def post(port, token, *alerts):
    """An alert as Alertmanager sends it; gives the status, 0 while nothing listens."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/endpoint",
        json.dumps({"version": "4", "status": "firing", "alerts": alerts}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def alert(host, status="firing", action="isolate"):
    return {"status": status, "labels": {"alertname": "X", "host": host, "metalserve_action": action}}


@pytest.mark.skipif(
    not shutil.which("java"), reason="ansible-rulebook's engine needs Java; its parsers were asked above"
)
def test_an_alert_starts_both_templates_for_its_host_once(tmp_path):
    controller = Controller(ROOT, "token-of-the-test")
    for key in ("drain", "diagnose"):
        new = {"name": f"metalserve {key}", "organization": 1, "playbook": TEMPLATES[key]["playbook"]}
        made = controller.add("job_templates", {**new, "ask_limit_on_launch": True, "survey_enabled": True})
        controller.surveys["job_templates", made["id"]] = survey(TEMPLATES[key])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {**VARIABLES, "alertmanager_listen_address": "127.0.0.1", "alertmanager_listen_port": port}
    del variables["alertmanager_token"]
    (tmp_path / "variables.yml").write_text(yaml.safe_dump(variables))
    program = Path(sys.executable).with_name("ansible-rulebook")
    with serve(controller) as url, (tmp_path / "log").open("w") as log:
        argv = [program, "--rulebook", PATH, "--vars", tmp_path / "variables.yml", "--env-vars", "alertmanager_token"]
        argv += ["--controller-url", url, "--controller-token", controller.token]
        environment = {**os.environ, "alertmanager_token": "secret"}
        process = subprocess.Popen(argv, env=environment, cwd=tmp_path, stdout=log, stderr=log)
        try:
            wait(lambda: post(port, "secret"), process, tmp_path)
            assert post(port, "wrong", alert("gpu-0")) == 401
            ignored = [alert("gpu-2", status="resolved"), alert("gpu-3", action="page"), alert("gpu*")]
            assert post(port, "secret", *ignored, alert("gpu-1"), alert("gpu-1")) == 200
            assert post(port, "secret", alert("gpu-1")) == 200
            wait(lambda: len(controller.launches) >= 2, process, tmp_path)
            # One that is followed after all that is not to be.
            assert post(port, "secret", alert("gpu-4")) == 200
            wait(lambda: len(controller.launches) >= 4, process, tmp_path)
        finally:
            process.terminate()
            process.wait(timeout=60)
    assert [(name, given["extra_vars"], given["limit"]) for name, given in controller.launches] == [
        started
        for host in ("gpu-1", "gpu-4")
        for started in (
            ("metalserve drain", {"gateway_drain_host": host}, "all"),
            ("metalserve diagnose", {}, host),
        )
    ]


def wait(condition, process, folder):
    end = time.monotonic() + 180
    while not condition():
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < end, (folder / "log").read_text()
        time.sleep(0.2)
