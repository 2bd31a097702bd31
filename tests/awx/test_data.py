"""What the data of awx/ says against the playbooks and roles: it cannot name what does not exist."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest
import yaml
from controller import playbooks
from survey_rules import choices, job_variables, survey_error
from test_apply import data

from metalserve.errors import Refusal
from metalserve.surveys import awx_survey, read_options

ROOT = Path(__file__).resolve().parents[2]
# What looks at, or acts for, other hosts than the task's own.
ACROSS_HOSTS = re.compile(r"\brun_once\b|\bansible_play_hosts|\bdelegate_to\b|\bhostvars\b|\bthrottle\b")
TEMPLATES = data("job_templates")["controller_job_templates"]
OPTIONS = read_options(ROOT / "roles")
each_template = pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template["key"])
# The type of a question for the type of an option.
TYPES = {
    "bool": "multiplechoice",
    "int": "integer",
    "float": "float",
    "str": "text",
    "path": "text",
    "list": "multiselect",
}


def survey(template):
    return awx_survey(template.get("survey", []), template["key"], OPTIONS)


def plays(playbook):
    """The plays of a playbook, those that it imports too."""
    for play in yaml.safe_load((ROOT / playbook).read_text()):
        imported = play.get("ansible.builtin.import_playbook")
        yield from plays(Path(playbook).parent / imported) if imported else [play]


def roles(playbook):
    return [role for play in plays(playbook) for role in play.get("roles", [])]


@each_template
def test_a_template_s_playbook_exists_and_awx_offers_it(template):
    assert template["playbook"] in playbooks(ROOT)
    assert template["description"]


def test_keys_are_unique_and_every_operation_has_a_template():
    keys = [template["key"] for template in TEMPLATES]
    assert len(set(keys)) == len(keys)
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "playbooks").rglob("*.yml")}
    # The lock is written into the repository, a bundle onto a disk to carry away, and a support bundle into a directory
    # of whoever asks for it: the controller has none of them.
    assert there - {template["playbook"] for template in TEMPLATES} == {
        "playbooks/ops/lock.yml",
        "playbooks/ops/bundle.yml",
        "playbooks/ops/support_bundle.yml",
    }


@each_template
def test_the_api_takes_the_survey(template):
    made = survey(template)
    assert not made or survey_error(made) is None
    assert all("default" not in question for question in made.get("spec", [])), "a default would win over the inventory"


@each_template
def test_a_question_has_the_type_and_the_choices_of_its_option(template):
    for given, question in zip(template.get("survey", []), survey(template).get("spec", []), strict=True):
        option = OPTIONS[given.get("option", given["variable"])]
        kind = "multiplechoice" if option["type"] == "str" and option.get("choices") else TYPES[option["type"]]
        assert question["type"] == kind
        wanted = ["true", "false"] if option["type"] == "bool" else option.get("choices", [])
        assert choices(question) == wanted


@each_template
def test_what_is_asked_reaches_a_role_of_the_playbook(template):
    called = roles(template["playbook"])
    names = {role["role"] for role in called}
    names |= set(chain.from_iterable(map(included, names)))
    for given in template.get("survey", []):
        variable, option = given["variable"], given.get("option", given["variable"])
        handed = [str(value) for role in called for value in flat(role.get("vars", {}))]
        if variable == option and any(option.startswith(f"{name}_") for name in names):
            continue
        assert any(re.search(rf"\b{variable}\b", text) for text in handed), (
            f"{variable} reaches no role of {template['playbook']}"
        )
        if variable != option:
            assert any(re.search(rf"\b{variable}\b", str(role.get("vars", {}).get(option, ""))) for role in called)


def included(role):
    """The roles that a role's own tasks call."""
    for path in (ROOT / "roles" / role / "tasks").glob("*.yml"):
        yield from re.findall(r"(?:include|import)_role:\n\s+name: (\w+)", path.read_text())


def flat(value):
    """The texts of nested mappings and lists."""
    if isinstance(value, dict):
        for each in value.values():
            yield from flat(each)
    elif isinstance(value, list):
        for each in value:
            yield from flat(each)
    else:
        yield value


@each_template
def test_only_what_looks_at_each_host_alone_may_be_sliced(template):
    (word, reason) = next(iter(template["slicing"].items()))
    assert len(template["slicing"]) == 1
    assert word in ("safe", "forbidden")
    assert len(reason) > 10
    if word == "forbidden":
        return
    for play in plays(template["playbook"]):
        assert not set(play) & {"serial", "max_fail_percentage", "any_errors_fatal"}
    for role in roles(template["playbook"]):
        text = "".join(path.read_text() for path in (ROOT / "roles" / role["role"]).rglob("*.yml"))
        text += str(role.get("vars", ""))
        assert not re.search(r"\brun_once\b|\bansible_play_hosts|\bdelegate_to\b|\bhostvars\b|\bthrottle\b", text), (
            role["role"]
        )


@each_template
def test_credentials_are_kinds_that_the_settings_know(template):
    assert set(template["credentials"]) <= set(data("settings")["controller_credentials"])


def test_each_kind_of_credential_is_a_setting():
    kinds = {each["key"] for each in data("credential_types")["controller_credential_types"]}
    assert kinds | {"machine"} == set(data("settings")["controller_credentials"])


def test_nodes_and_schedules_name_what_is_there():
    keys = {template["key"]: template for template in TEMPLATES}
    for workflow in data("workflows")["controller_workflows"]:
        names = [node["key"] for node in workflow["nodes"]]
        for node in workflow["nodes"]:
            assert ("template" in node) != ("approval" in node)
            assert "template" not in node or node["template"] in keys
            assert {*node.get("then", []), *node.get("otherwise", []), *node.get("always", [])} <= set(names)
            if "answers" in node:
                asked = survey(keys[node["template"]])
                assert job_variables(asked, node["answers"]) == node["answers"]
    for schedule in data("schedules")["controller_schedules"]:
        asked = survey(keys[schedule["template"]])
        assert not any(question["required"] for question in asked.get("spec", []))


# ---- the survey itself ----


def ask(**question):
    return awx_survey([{"question": "Q?", **question}], "s", OPTIONS)["spec"][0]


def test_no_questions_make_no_survey():
    assert awx_survey([], "s", OPTIONS) == {}


def test_an_unanswered_text_is_not_handed_on_as_an_empty_one():
    assert ask(variable="gateway_drain_deployment")["min"] == 1


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"variable": "nobody_x"}, "no role takes nobody_x"),
        ({"variable": "serving_release"}, "no role takes serving_release"),
        ({"variable": "gateway_drain_host", "default": "a"}, "unknown default"),
        ({"variable": "model_weights_tokens"}, "model_weights_tokens is secret"),
        ({"variable": "gateway_clients"}, "gateway_clients is a list"),
        ({"variable": "gpu_health_expected"}, "gpu_health_expected is a dict"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(question, words):
    with pytest.raises(Refusal, match=words):
        ask(**question)


def test_roles_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(Refusal, match="no role with argument specifications"):
        read_options(tmp_path)
