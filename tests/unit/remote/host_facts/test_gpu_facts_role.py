"""The role with the real ansible-core on this machine, looking at a tree of files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from host_machines import bare_machine

ROLE = Path(__file__).parents[4] / "roles/gpu_facts"


def play(tmp_path, variables, *options):
    playbook = [
        {
            "hosts": "localhost",
            "connection": "local",
            "gather_facts": False,
            "vars": {"ansible_python_interpreter": sys.executable, **variables},
            "roles": ["gpu_facts"],
        }
    ]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(playbook))
    (tmp_path / "ansible.cfg").touch()
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"),
        "ANSIBLE_ROLES_PATH": str(ROLE.parent),
        "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
        "ANSIBLE_LOCAL_TEMP": str(tmp_path / "local"),
        "ANSIBLE_REMOTE_TEMP": str(tmp_path / "remote"),
        "ANSIBLE_INJECT_FACT_VARS": "false",
    }
    command = [sys.executable, "-m", "ansible", "playbook", "-i", "localhost,", str(tmp_path / "play.yml"), *options]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert answer.stdout, answer.stderr
    report = json.loads(answer.stdout)
    return answer.returncode, report["plays"][0]["tasks"][-1]["hosts"]["localhost"]


@pytest.fixture
def tree(tmp_path):
    machine = bare_machine(tmp_path / "tree")
    machine.pci("0000:3b:00.0", "nouveau", vendor="0x10de", device="0x2330", class_="0x030200")
    return machine.root


@pytest.mark.parametrize("options", [(), ("--check",)], ids=["run", "check"])
def test_facts_reach_the_play(tmp_path, tree, options):
    code, result = play(tmp_path, {"gpu_facts_root": str(tree)}, *options)
    assert code == 0, result
    facts = result["ansible_facts"]["gpu_host"]
    assert result["changed"] is False
    assert facts["driver"]["state"] == "nouveau"
    assert [gpu["pci_id"] for gpu in facts["gpus"]] == ["10de:2330"]
    assert [disk["path"] for disk in facts["disks"]] == [
        "/",
        "/var/lib/docker",
        "/var/lib/metalserve/models",
        "/var/cache/metalserve",
    ]
    assert result["invocation"]["module_args"]["pynvml"] == "VALUE_SPECIFIED_IN_NO_LOG_PARAMETER"


def test_simulated_devices_on_this_machine(tmp_path, tree):
    code, result = play(tmp_path, {"gpu_facts_device_root": str(tree), "gpu_facts_disk_paths": []})
    assert code == 0, result
    facts = result["ansible_facts"]["gpu_host"]
    assert len(facts["gpus"]) == 1
    assert facts["kernel"] == os.uname().release
    assert facts["disks"] == []


def test_relative_disk_path_is_refused(tmp_path, tree):
    code, result = play(tmp_path, {"gpu_facts_root": str(tree), "gpu_facts_disk_paths": ["/", "models"]})
    assert code != 0
    assert result["msg"] == ("disk_paths contains 'models'. Needed: absolute paths. Change: gpu_facts_disk_paths.")


def test_specification_and_defaults_agree():
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    options = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    assert {name: option["default"] for name, option in options.items()} == defaults
