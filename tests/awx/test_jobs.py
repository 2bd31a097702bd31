"""Each template's playbook on ansible-runner as AWX runs it; hosts are trees of files where a host is needed."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from awx_job import ROOT, TEMPLATES, export, start
from survey_rules import choices
from test_data import plays, survey

sys.path.insert(0, str(ROOT / "lab"))
import fleet

MODEL = "qwen3.6-35b-a3b-fp8"
FILE = {"path": "a", "size_bytes": 1000, "sha256": "a" * 64}
VARIABLES = {
    # Nothing listens there.
    "serving_deployments": [{"name": "qwen", "engine": "vllm", "model": MODEL, "port": 9}],
    "serving_lock": {
        "images": {"vllm/vllm-openai:v0.33.0": {"digest": "sha256:" + "d" * 64, "compressed_bytes": 1000}},
        "models": {MODEL: {"revision": "0123", "files": [FILE]}},
    },
}
ANSWERS = {"text": "a-word", "integer": 1024, "float": 1.5}
KEY = "sk-this-is-the-key-that-nobody-may-see"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return export(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def inventory(tmp_path_factory):
    """Two good hosts and one that cannot serve an FP8 model, as an inventory script of AWX gives them."""
    folder = tmp_path_factory.mktemp("fleet")
    fleet.build_fleet(folder, [fleet.read_shape(text) for text in ("2x8xH800", "1xcpu")])
    written = yaml.safe_load((folder / "hosts.yml").read_text())["serving_hosts"]
    variables = {
        **written["vars"],
        **VARIABLES,
        "ansible_python_interpreter": sys.executable,
        "serving_unit_root": str(folder / "etc"),
    }
    return {
        "_meta": {"hostvars": {host: values or {} for host, values in written["hosts"].items()}},
        "all": {"children": ["serving_hosts"]},
        "serving_hosts": {"hosts": list(written["hosts"]), "vars": variables},
    }


def answer_all(key):
    """An answer to each question of a template, the last choice where there are some."""
    found = {}
    for question in survey(TEMPLATES[key]).get("spec", []):
        offered = choices(question)
        value = offered[-1] if offered else ANSWERS[question["type"]]
        found[question["variable"]] = [value] if question["type"] == "multiselect" else value
    return found


@pytest.mark.parametrize("key", TEMPLATES)
def test_every_template_can_begin_with_every_question_answered(key, project, inventory, tmp_path):
    job = start(tmp_path / "job", project, key, inventory, answers=answer_all(key), options="--list-tasks")
    assert (job.status, job.rc) == ("successful", 0), job.stdout
    assert re.search(r"play #1 .*?: ", job.stdout), job.stdout
    warned = re.findall(r"\[WARNING\]: (.*)", job.stdout)
    # Groups that this inventory has not.
    unmatched = {f"Could not match supplied host pattern, ignoring: {group}" for group in ("gateways", "monitoring")}
    assert {text.strip() for text in warned} <= unmatched


def test_a_preflight_that_passes(project, inventory, tmp_path):
    # Facts of another run, in the old form and in the new one, must not be believed.
    poison = {host: {"gpu_host": {"schema": 1, "gpus": []}} for host in inventory["serving_hosts"]["hosts"]}
    job = start(tmp_path / "job", project, "preflight", inventory, options="--limit=!cpu-003", fact_cache=poison)
    assert (job.status, job.rc) == ("successful", 0), job.stdout
    assert "3 hosts" not in job.stdout
    assert "2 hosts: 2 ok, 0 ok after the playbooks have run, 0 refused" in job.stdout
    assert set(job.changed().values()) <= {0}


def test_a_refused_preflight_can_be_read_from_its_events(project, inventory, tmp_path):
    job = start(tmp_path / "job", project, "preflight", inventory)
    assert (job.status, job.rc) == ("failed", 2)
    ((task, message),) = job.failures()
    assert task == "Judge the hosts"
    assert message.startswith("1 of 3 hosts are refused: cpu-003. Needed: ")
    assert "Change: " in message
    # The table and the remedies are told before the failure.
    lines = job.lines()
    row = next(number for number, line in lines if re.match(r"cpu-003 +REFUSED ", line))
    remedy, text = next((number, line) for number, line in lines if line.startswith("REFUSED  cpu-003: plan: "))
    assert "Change: set `model` to a bfloat16 checkpoint." in text
    failed = next(number for number, event in enumerate(job.events) if event["event"] == "runner_on_failed")
    assert row <= remedy < failed


def test_an_image_of_another_commit_is_refused(project, inventory, tmp_path):
    """The package of the job is the one of this checkout; the project has one line more."""
    newer = shutil.copytree(project, tmp_path / "newer", symlinks=True)
    with (newer / "src/metalserve/errors.py").open("a") as file:
        file.write("# later\n")
    job = start(tmp_path / "job", newer, "preflight", inventory)
    assert job.status == "failed"
    ((task, message),) = job.failures()
    assert task == "Refuse a package that is not the one of these playbooks"
    assert "first in errors.py. Needed: the same. Change: build the execution environment again" in message


def test_a_refused_proof_can_be_read_from_its_events(project, inventory, tmp_path):
    job = start(
        tmp_path / "job",
        project,
        "verify",
        inventory,
        answers={"endpoint_gate_checks": ["models"]},
        options="--limit=!cpu-003",
    )
    assert job.status == "failed"
    assert {task for task, _message in job.failures()} == {"Refuse an endpoint that did not pass"}
    results = [event["event_data"]["res"] for event in job.events if event["event"] == "runner_item_on_failed"]
    assert len(results) == 2
    assert all("qwen" in str(result) and "refused" in result["msg"] for result in results)


def test_what_only_looks_changes_nothing(project, inventory, tmp_path):
    job = start(tmp_path / "job", project, "releases", inventory)
    assert (job.status, job.rc) == ("successful", 0), job.stdout
    assert set(job.changed().values()) <= {0}


def test_a_required_answer_that_is_missing_starts_no_job(project, inventory, tmp_path):
    with pytest.raises(ValueError, match="'serving_deployment' value missing"):
        start(tmp_path / "job", project, "rollback", inventory)


def test_a_template_in_an_answer_is_a_text(project, inventory, tmp_path):
    answers = {"serving_deployment": "{{ lookup('pipe', 'touch /tmp/metalserve-was-here') }}"}
    job = start(tmp_path / "job", project, "releases", inventory, answers=answers)
    assert not Path("/tmp/metalserve-was-here").exists()
    assert "{{ lookup(" in job.stdout or job.status == "successful"


def test_secrets_are_nowhere_in_the_artifacts(project, inventory, tmp_path):
    credentials = {"api_key": {"api_key": KEY}, "gateway_tls": {"pem": f"-----BEGIN\n{KEY}\n"}}
    # Refused: there is no place for the key on these hosts, and the refusal must not show it either.
    job = start(tmp_path / "job", project, "secrets", inventory, credentials=credentials, options="-vvv")
    assert job.status == "failed"
    assert "There is no place for the engines' key on this host." in job.stdout
    assert (tmp_path / "job/env/api_key-key").read_text() == f"{KEY}\n"
    assert job.holds(KEY) == []


# ---- what AWX cannot do ----


@pytest.mark.parametrize("key", TEMPLATES)
def test_nothing_asks_or_waits_for_a_person(key):
    for play in plays(TEMPLATES[key]["playbook"]):
        assert "vars_prompt" not in play
        for role in play.get("roles", []):
            for path in (ROOT / "roles" / role["role"]).rglob("*.yml"):
                assert "builtin.pause" not in path.read_text(), path


def test_the_configuration_says_nothing_of_facts_kept():
    text = (ROOT / "ansible.cfg").read_text()
    assert "fact_caching" not in text
    assert "stdout_callback" not in text, "AWX has its own"


def test_nothing_is_found_by_the_current_directory():
    for path in [*(ROOT / "roles").rglob("*.yml"), *(ROOT / "playbooks").rglob("*.yml")]:
        text = path.read_text()
        assert not re.search(r"lookup\('(ansible\.builtin\.)?env', 'PWD'|\bgetcwd\b", text), path


def test_the_collections_that_are_used_are_named_for_awx():
    named = {
        each["name"] for each in yaml.safe_load((ROOT / "collections/requirements.yml").read_text())["collections"]
    }
    used = set()
    for folder in ("roles", "playbooks", "awx"):
        for path in (ROOT / folder).rglob("*.yml"):
            used |= set(re.findall(r"^\s+(?:- )?([a-z_]+\.[a-z_]+)\.[a-z_]+:(?:\s|$)", path.read_text(), re.MULTILINE))
    assert {name for name in used if not name.startswith("ansible.")} == {
        name for name in named if not name.startswith("ansible.")
    }
    for name in ("roles/requirements.yml", "requirements.yml", "requirements.txt"):
        assert not (ROOT / name).exists(), "AWX would install it a second time"
