"""What a user would look at on a host; runs under Molecule and by plain pytest.

By hand: pytest tests/testinfra/default --hosts=ansible://serving_hosts --ansible-inventory=inventories/lab
"""

import json
import os
import subprocess
import sys
import time
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

    @property
    def changed(self):
        return "changed=0" not in self.text


@pytest.fixture(scope="session")
def inventory(pytestconfig):
    return Path(pytestconfig.getoption("ansible_inventory")).resolve()


@pytest.fixture(scope="session")
def variables(inventory):
    """The inventory's variables, unrendered."""
    folder = inventory / "group_vars" / "all"
    return {
        **yaml.safe_load((folder / "main.yml").read_text(encoding="utf-8")),
        **yaml.safe_load((folder / "lock.yml").read_text(encoding="utf-8")),
    }


@pytest.fixture(scope="session")
def run_playbook(inventory):
    """Run a playbook of the project on this inventory with extra variables."""

    def run(playbook, extra=None, *options):
        environment = {**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
        argv = [str(Path(sys.executable).with_name("ansible-playbook")), str(PROJECT / playbook), "-i", str(inventory)]
        if extra:
            argv += ["-e", json.dumps(extra)]
        process = subprocess.run(
            [*argv, *options], cwd=PROJECT, env=environment, capture_output=True, text=True, check=False, timeout=1800
        )
        return Playbook(process)

    return run


@pytest.fixture
def release(host):
    """The current release's record."""
    return json.loads(host.file("/etc/metalserve/tiny/current/release.json").content_string)


@pytest.fixture
def endpoint(host):
    """Ask the endpoint from inside its host; waits until it is ready, as after a reboot."""

    def curl(path, body=None):
        code = (
            "import json,sys,urllib.request,urllib.error\n"
            "path, body = sys.argv[1], (sys.argv[2].encode() if len(sys.argv) > 2 else None)\n"
            "request = urllib.request.Request('http://127.0.0.1:8000' + path, data=body,"
            " headers={'Content-Type': 'application/json'})\n"
            "try:\n    answer = urllib.request.urlopen(request, timeout=120); status = answer.status\n"
            "except urllib.error.HTTPError as error:\n    answer, status = error, error.code\n"
            "except OSError as error:\n    print(json.dumps([0, str(error)])); sys.exit()\n"
            "print(json.dumps([status, answer.read().decode()]))\n"
        )
        arguments = [path] if body is None else [path, json.dumps(body)]
        command = "python3 -c %s" + " %s" * len(arguments)
        status, text = json.loads(host.check_output(command, code, *arguments))
        return status, text

    deadline = time.monotonic() + 600
    while curl("/health")[0] != 200:
        assert time.monotonic() < deadline, "the endpoint did not become ready"
        time.sleep(2)
    return curl


def pytest_configure(config):
    config.addinivalue_line("markers", "restarts_the_host: containers are other ones afterwards")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A failed test shows the engine's journal."""
    outcome = yield
    report = outcome.get_result()
    host = item.funcargs.get("host") if hasattr(item, "funcargs") else None
    if report.when == "call" and report.failed and host is not None:
        journal = host.run("journalctl --unit 'vllm@*' --lines 60 --no-pager --output cat")
        report.sections.append(("journal of the engines", journal.stdout or journal.stderr))
