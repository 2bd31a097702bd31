"""AWX's templates on a lab host, in the order of a first day; each test goes on where the one before it ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from awx_job import environment, export, start

HOST = "metalserve-molecule-awx"
TOKEN = "hf_this-token-must-not-be-seen"
HUB = {"hub": {"huggingface_token": TOKEN, "modelscope_token": ""}}
KEY = "sk-this-key-must-not-be-seen"
KEY_FILE = "/etc/metalserve-keys/engine"


class World:
    """The host, its inventory as AWX has it, and a project that was checked out."""

    def __init__(self, folder, inventory):
        self.folder = folder
        self.project = export(folder / "project")
        self.source = inventory
        with environment(folder, self.project):
            argv = [Path(sys.executable).with_name("ansible-inventory"), "-i", inventory, "--list"]
            listed = subprocess.run(argv, capture_output=True, text=True, check=True)
        self.inventory = json.loads(listed.stdout)
        # What the whole gate asks is the matter of other scenarios.
        self.inventory["_meta"]["hostvars"][HOST]["endpoint_gate_checks"] = ["models", "chat"]
        self.jobs = 0

    def run(self, key, *, variables=None, **options):
        """Run a template, with more variables of the host."""
        self.jobs += 1
        inventory = json.loads(json.dumps(self.inventory))
        inventory["_meta"]["hostvars"][HOST].update(variables or {})
        return start(self.folder / f"job-{self.jobs}", self.project, key, inventory, **options)


@pytest.fixture(scope="module")
def world(tmp_path_factory, pytestconfig):
    return World(tmp_path_factory.mktemp("awx"), Path(pytestconfig.getoption("ansible_inventory")).resolve())


def good(job):
    assert (job.status, job.rc) == ("successful", 0), job.stdout
    return job


def current(host):
    return Path(host.check_output("readlink /etc/metalserve/tiny/current")).name


def smaller(world):
    """The deployment with fewer sequences: another release."""
    (deployment,) = world.inventory["_meta"]["hostvars"][HOST]["serving_deployments"]
    return {"serving_deployments": [{**deployment, "max_sequences": 8}]}


def test_preflight_of_a_bare_host(world):
    job = good(world.run("preflight"))
    assert set(job.changed().values()) <= {0}


def test_prepare(world):
    good(world.run("prepare", answers={"docker_engine_restart_allowed": "false"}))


def test_stage_with_a_token(world, host):
    job = good(world.run("stage", answers={"model_weights_hosts_at_once": 1}, credentials=HUB, options="-vvv"))
    with host.sudo():
        path = "/etc/metalserve/model_weights_tokens.json"
        assert json.loads(host.file(path).content_string) == {"huggingface.co": TOKEN}
        assert host.file(path).mode == 0o600
    assert job.holds(TOKEN) == []
    assert "no_log: true" in job.stdout


def test_rollout_and_verify(world, host):
    job = good(
        world.run(
            "rollout", answers={"endpoint_gate_checks": ["models", "chat"], "serving_unit_retry_refused": "false"}
        )
    )
    assert "artifact_data" not in job.stats() or not job.stats()["artifact_data"], "there was nothing to replace"
    assert current(host)
    job = good(world.run("verify", answers={"endpoint_gate_checks": ["chat"]}))
    assert set(job.changed().values()) <= {0}
    assert "answered 42" in job.stdout


def test_a_second_rollout_changes_nothing(world):
    assert set(good(world.run("rollout")).changed().values()) <= {0}


def test_what_a_rollout_took_up_is_taken_back(world, host):
    before = current(host)
    # On a host where this test has run before, the release is remembered as taken back.
    job = good(world.run("rollout", variables=smaller(world), answers={"serving_unit_retry_refused": "true"}))
    left = job.stats()["artifact_data"]
    assert left == {"serving_taken_up": {HOST: {"tiny": before}}}
    assert current(host) != before
    job = good(world.run("take back", artifacts=left))
    assert f"tiny is back on the release {before}" in job.stdout
    assert current(host) == before


def test_a_host_that_was_not_changed_is_left_alone(world, host):
    started = host.check_output("systemctl show vllm@tiny --property=ActiveEnterTimestamp")
    job = good(world.run("take back", artifacts={"serving_taken_up": {"another-host": {"tiny": "0" * 12}}}))
    assert "The rollout took nothing up on these hosts." in job.stdout
    assert host.check_output("systemctl show vllm@tiny --property=ActiveEnterTimestamp") == started


def test_the_drift_of_a_host_as_it_should_be_is_none(world):
    # With the credential of the stage: without it the token would be removed.
    job = good(world.run("drift", credentials=HUB))
    assert set(job.changed().values()) <= {0}, job.stdout


def test_a_key_comes_by_its_credential(world, host):
    variables = {"endpoint_gate_api_key_file": KEY_FILE}
    credentials = {"api_key": {"api_key": KEY}}
    job = good(world.run("secrets", variables=variables, credentials=credentials, options="-vvv"))
    with host.sudo():
        file = host.file(KEY_FILE)
        assert (file.content_string, file.mode, file.user) == (f"{KEY}\n", 0o600, "root")
        assert host.file(str(Path(KEY_FILE).parent)).mode == 0o700
    assert job.holds(KEY) == []
    again = good(world.run("secrets", variables=variables, credentials=credentials))
    assert set(again.changed().values()) <= {0}


def test_who_looks_gets_an_answer(world, host):
    assert current(host) in good(world.run("releases")).stdout
    assert "tiny" in good(world.run("diagnose", answers={"serving_deployment": "tiny"})).stdout


def test_an_unknown_deployment_is_refused_with_its_reason_in_the_events(world):
    job = world.run("rollback", answers={"serving_deployment": "nobody"})
    assert job.status == "failed"
    ((_task, message),) = job.failures()
    assert "none of these hosts has a deployment nobody" in message


def test_the_command_of_people_without_awx(world):
    argv = [sys.executable, "-m", "metalserve.cli", "run", "verify", "--project", str(world.project)]
    argv += ["-i", str(world.source), "-e", '{"endpoint_gate_checks": ["models", "chat"]}']
    with environment(world.folder, world.project):
        run = subprocess.run([*argv, "--json"], capture_output=True, text=True, check=False, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    told = [json.loads(line) for line in run.stdout.splitlines()]
    assert {"kind": "gate", "text": "tiny passed", "host": HOST} in [
        {name: each[name] for name in ("kind", "text", "host")} for each in told if each["kind"] == "gate"
    ]
    assert told[-1]["text"] == "verify: successful"
