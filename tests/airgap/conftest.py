"""A host with no way out, served from a bundle; runs under Molecule.

By hand: pytest tests/airgap --hosts=ansible://serving_hosts --ansible-inventory=molecule/airgap/inventory
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).resolve().parents[2]


class Playbook:
    """The result of one ansible-playbook run."""

    def __init__(self, process):
        self.rc = process.returncode
        # Ansible folds long lines: sentences are compared with single blanks.
        self.text = " ".join((process.stdout + process.stderr).replace("''", "'").split())


@pytest.fixture(scope="session")
def inventory(pytestconfig):
    return Path(pytestconfig.getoption("ansible_inventory")).resolve()


@pytest.fixture(scope="session")
def run_playbook(inventory):
    """Run a playbook of the project on this inventory with extra variables."""

    def run(playbook, extra=None, *options):
        environment = {**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
        argv = [str(Path(sys.executable).with_name("ansible-playbook")), str(PROJECT / playbook), "-i", str(inventory)]
        process = subprocess.run(
            [*argv, "-e", json.dumps(extra or {}), *options],
            cwd=PROJECT, env=environment, capture_output=True, text=True, check=False, timeout=1200,
        )  # fmt: skip
        return Playbook(process)

    return run


@pytest.fixture(scope="session")
def cache():
    """Where the lab keeps what it has made."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metalserve" / "lab"


@pytest.fixture(scope="session")
def bundle(cache):
    return cache / "airgap" / "bundle"


@pytest.fixture(scope="session")
def lock(inventory):
    text = (inventory / "group_vars/all/lock.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["serving_lock"]


@pytest.fixture
def release(host):
    """The current release's record."""
    return json.loads(host.file("/etc/metalserve/tiny/current/release.json").content_string)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A failed test shows the engine's journal."""
    outcome = yield
    report = outcome.get_result()
    host = item.funcargs.get("host") if hasattr(item, "funcargs") else None
    if report.when == "call" and report.failed and host is not None:
        journal = host.run("journalctl --unit 'vllm@*' --lines 60 --no-pager --output cat")
        report.sections.append(("journal of the engines", journal.stdout or journal.stderr))
