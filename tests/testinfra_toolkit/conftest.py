"""Run the roles again on the scenario's host with other variables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SCENARIO = PROJECT / "molecule" / "toolkit"


class Playbook:
    """The result of one ansible-playbook run."""

    def __init__(self, process):
        self.rc = process.returncode
        # Ansible folds long lines: sentences are compared with single blanks.
        self.text = " ".join((process.stdout + process.stderr).replace("''", "'").split())

    @property
    def changed(self):
        return "changed=0" not in self.text


@pytest.fixture(scope="session")
def run(pytestconfig):
    """Run one of the scenario's playbooks with extra variables; by default the role alone."""

    def play(extra=None, *options, playbook="role.yml"):
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
        }
        argv = [
            str(Path(sys.executable).with_name("ansible-playbook")),
            str(SCENARIO / playbook),
            "-i",
            str(Path(pytestconfig.getoption("ansible_inventory")).resolve()),
        ]
        if extra:
            argv += ["-e", json.dumps(extra)]
        process = subprocess.run(
            [*argv, *options], cwd=PROJECT, env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        return Playbook(process)

    return play
