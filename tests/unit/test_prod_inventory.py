"""The example inventory works as typed: `-i prod`. Without hosts it can be read, listed and planned, not run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from metalserve.catalogue import host_from_shape
from metalserve.deployments import Inputs, serving_releases

ROOT = Path(__file__).resolve().parents[2]
GROUPS = {"a100": "8xA100-SXM4-80GB", "h800": "8xH800"}
FILE = {"path": "model.safetensors", "size_bytes": 1, "sha256": "a" * 64}


def ansible(command, *options):
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    argv = [str(Path(sys.executable).with_name(command)), *options]
    process = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def hosts():
    return json.loads(ansible("ansible-inventory", "-i", "prod", "--list"))["_meta"]["hostvars"]


def test_every_host_has_deployments_and_the_shared_variables(hosts):
    assert len(hosts) == 4
    for variables in hosts.values():
        assert [item["engine"] for item in variables["serving_deployments"]]


def test_the_playbooks_can_be_checked_and_listed():
    ansible("ansible-playbook", "site.yml", "-i", "prod", "--syntax-check")
    tasks = ansible("ansible-playbook", "site.yml", "-i", "prod", "--list-tasks")
    for role in ("gpu_facts", "serving_plan", "docker_engine", "engine_image", "model_weights", "rollout"):
        assert f"{role} : " in tasks
    # Stages are chosen by their playbook: no tag but Ansible's own for argument specs.
    tags = ansible("ansible-playbook", "site.yml", "-i", "prod", "--list-tags")
    assert set(re.findall(r"TAGS: \[(.*?)\]", tags)) <= {"", "always"}


@pytest.mark.parametrize(("group", "shape"), GROUPS.items())
def test_the_deployments_of_a_group_fit_its_hosts_as_simulated(group, shape):
    deployments = yaml.safe_load((ROOT / f"inventories/prod/group_vars/{group}/main.yml").read_text(encoding="utf-8"))
    items = deployments["serving_deployments"]
    lock = {
        "images": {"vllm/vllm-openai:v0.33.0": {"digest": "sha256:" + "b" * 64}},
        "models": {item["model"]: {"revision": "0123abc", "files": [FILE]} for item in items},
    }
    releases = serving_releases(items, host_from_shape(shape), Inputs({}, {}, lock, {}, "/var/lib/metalserve/models"))
    used = [gpu for release in releases for gpu in release["plan"]["gpus_used"]]
    assert sorted(used) == sorted(set(used))
    assert len({release["port"] for release in releases}) == len(releases)
