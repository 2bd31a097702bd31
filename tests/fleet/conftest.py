"""A client that never stops asking, and rollouts that are started, killed and looked at. Runs under Molecule (scenario
fleet), and after `molecule converge --scenario-name fleet` by

    pytest tests/fleet --hosts=ansible://gateways --ansible-inventory=molecule/fleet/inventory
"""

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gateway"))
from gateway_client import Client, states, wait_for

PROJECT = Path(__file__).resolve().parents[2]
MODEL = "lab-moe-tiny"
HOSTS = [f"metalserve-molecule-fleet-{number}" for number in (1, 2, 3)]


class Caller(threading.Thread):
    """Asks without pause, streaming or not, and notes what was no whole answer."""

    def __init__(self, client, *, stream):
        super().__init__(daemon=True)
        self.client, self.stream = client, stream
        self.failures, self.count, self.ending = [], 0, threading.Event()

    def run(self):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "What is 17 + 25?"}],
            "max_tokens": 16,
            "temperature": 0,
            "stream": self.stream,
        }
        while not self.ending.is_set():
            try:
                answer = self.client.ask(body)
                whole = (
                    answer.text.rstrip().endswith(b"data: [DONE]") if self.stream else b'"finish_reason"' in answer.text
                )
                if answer.status != 200 or not whole:
                    self.failures.append((time.strftime("%H:%M:%S"), answer.status, answer.text[-300:]))
            except OSError as error:
                self.failures.append((time.strftime("%H:%M:%S"), repr(error)))
            self.count += 1


class Watcher(threading.Thread):
    """Looks at the gateway again and again: who was drained in which order, and how many served at the least."""

    def __init__(self, host):
        super().__init__(daemon=True)
        self.host, self.ending = host, threading.Event()
        self.drained, self.least = [], len(HOSTS)

    def run(self):
        while not self.ending.is_set():
            seen = states(self.host)
            for name in sorted(seen):
                host = name.partition(":")[0]
                if seen[name] == "DRAIN" and (not self.drained or self.drained[-1] != host):
                    self.drained.append(host)
            if seen:
                self.least = min(self.least, sum(state.startswith("UP") for state in seen.values()))
            time.sleep(0.5)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.ending.set()
        self.join()


class Run:
    """A playbook in the background; its lines are read as they come."""

    def __init__(self, inventory, playbook, extra, *options):
        argv = [str(Path(sys.executable).with_name("ansible-playbook")), str(PROJECT / playbook), "-i", str(inventory)]
        environment = {**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
        self.process = subprocess.Popen(
            [*argv, "-e", json.dumps(extra), *options],
            cwd=PROJECT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True)
        self._reader.start()

    @property
    def text(self):
        """The output with single blanks: Ansible folds long lines."""
        return " ".join("".join(self.lines).replace("''", "'").split())

    def reach(self, task, host, seconds=600):
        """Wait until a task has begun after `host` was the last host that the play took up."""

        def reached():
            assert self.process.poll() is None, self.text
            text = "".join(self.lines)
            _, found, rest = text.rpartition(f"included: {PROJECT}/roles/rollout/tasks/roll.yml for {host}")
            return found and task in rest

        wait_for(reached, seconds)

    def kill(self):
        """As a power cut would: the controller's process is gone, and nobody tidies up."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self, seconds=1500):
        """Wait for the end, and return the exit status."""
        self.process.wait(timeout=seconds)
        self._reader.join(timeout=30)
        return self.process.returncode


@pytest.fixture(scope="session")
def inventory(pytestconfig):
    return Path(pytestconfig.getoption("ansible_inventory")).resolve()


@pytest.fixture(scope="session")
def variables(inventory):
    folder = inventory / "group_vars" / "all"
    return {
        key: value
        for file in sorted(folder.glob("*.yml"))
        for key, value in yaml.safe_load(file.read_text(encoding="utf-8")).items()
    }


@pytest.fixture
def start(inventory, tmp_path):
    """Start a playbook with extra variables; what still runs at the end of a test is killed."""
    runs = []

    def begin(extra, *options, playbook="playbooks/rollout.yml"):
        run = Run(inventory, playbook, {"rollout_report_dir": str(tmp_path / "reports"), **extra}, *options)
        runs.append(run)
        return run

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.kill()


@pytest.fixture
def report(tmp_path):
    """The newest report, by host."""

    def read():
        newest = max((tmp_path / "reports").glob("*.json"))
        assert newest.with_suffix(".html").is_file()
        return {row["host"]: row for row in json.loads(newest.read_text(encoding="utf-8"))["rows"]}

    return read


@pytest.fixture
def deployments(variables):
    """The deployments with some fields changed."""

    def change(**fields):
        wanted = copy.deepcopy(variables["serving_deployments"])
        wanted[0].update(fields)
        return {"serving_deployments": wanted}

    return change


def on(host, *command):
    """The output of a command on a host of the fleet, which is a container of this machine."""
    done = subprocess.run(["docker", "exec", host, *command], capture_output=True, text=True, check=False, timeout=120)
    return done.stdout.strip()


def current(host):
    """The release that is current on a host, and that its engine runs."""
    label = '{{ index .Config.Labels "metalserve.release" }}'
    link = on(host, "readlink", "/etc/metalserve/tiny/current").rpartition("/")[2]
    running = on(host, "docker", "inspect", "--format", label, "metalserve-tiny")
    assert running == link, f"{host} runs {running}, and current is {link}"
    return link


@pytest.fixture(scope="session")
def callers():
    """The clients, from the first test to the last."""
    found = []
    yield found
    for caller in found:
        caller.ending.set()
    for caller in found:
        caller.join(timeout=120)


@pytest.fixture(autouse=True)
def served(host, callers):
    """Around every test: clients ask, nothing fails, and at the end all engines serve."""
    wait_for(lambda: sum(state.startswith("UP") for state in states(host).values()) == len(HOSTS), 300)
    if not callers:
        address = host.check_output("hostname --all-ip-addresses").split()[0]
        client = Client(address, 8443, host.file("/root/gateway.crt").content_string)
        callers += [Caller(client, stream=stream) for stream in (True, False)]
        for caller in callers:
            caller.start()
    before = [caller.count for caller in callers]
    yield
    assert [failure for caller in callers for failure in caller.failures] == []
    for caller, count in zip(callers, before, strict=True):
        wait_for(lambda caller=caller, count=count: caller.count > count, 120)
    assert {name: state for name, state in states(host).items() if not state.startswith("UP")} == {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A failed test shows the last lines of the gateway's log."""
    outcome = yield
    report = outcome.get_result()
    host = item.funcargs.get("host") if hasattr(item, "funcargs") else None
    if report.when == "call" and report.failed and host is not None:
        report.sections.append(("haproxy", host.run("journalctl -u haproxy -o cat -n 40 --no-pager").stdout))
