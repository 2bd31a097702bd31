"""A boolean that came as a text, from `-e` or from a survey, is what it says: "false" allows nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from metalserve.driver_plan import Wishes
from metalserve.errors import Refusal
from metalserve.plain import truths
from metalserve.verdict.options import read_options

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "value"), [("false", False), ("true", True), ("No", False), ("yes", True), (None, None), (False, False)]
)
def test_permissions_of_the_driver(text, value):
    assert truths(Wishes, {"reboot_allowed": text})["reboot_allowed"] is value
    assert read_options({"driver": {"reload_allowed": text}}).driver.reload_allowed is value


def test_other_texts_stay_and_unclear_ones_are_refused():
    assert truths(Wishes, {"version": "true"}) == {"version": "true"}
    with pytest.raises(Refusal, match=r"hold_kernel is 'perhaps'\. Needed: true or false"):
        truths(Wishes, {"hold_kernel": "perhaps"})


@pytest.mark.parametrize(("text", "value"), [("false", False), ("true", True), (None, None), (True, True)])
def test_the_permission_to_restart_docker(text, value, tmp_path):
    """The role's own variable, as ansible-core computes it."""
    variables = yaml.safe_load((ROOT / "roles/docker_engine/vars/main.yml").read_text())
    name = "__docker_engine_restart_allowed"
    show = {
        "ansible.builtin.debug": {"msg": "{{ " + name + " is sameas " + repr(value).replace("None", "none") + " }}"}
    }
    given = {name: variables[name], "docker_engine_restart_allowed": text}
    play = [{"hosts": "localhost", "gather_facts": False, "vars": given, "tasks": [{"name": "Show", **show}]}]
    (tmp_path / "play.yml").write_text(json.dumps(play))
    program = Path(sys.executable).with_name("ansible-playbook")
    argv = [program if program.exists() else "ansible-playbook", tmp_path / "play.yml"]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    run = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert "msg: true" in run.stdout.lower(), run.stdout + run.stderr


def test_the_roles_ask_that_variable_and_not_the_text():
    text = (ROOT / "roles/docker_engine/tasks/service.yml").read_text()
    assert " docker_engine_restart_allowed is" not in text
