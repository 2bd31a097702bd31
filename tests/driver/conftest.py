"""The driver's stories on the virtual machine of the Molecule scenario `driver`.

By hand, while its machine runs: pytest tests/driver --hosts=ansible://serving_hosts
--ansible-inventory=molecule/driver/inventory
"""

import subprocess
from functools import partial
from pathlib import Path

import pytest
from scenario import PROJECT, play

PLAYBOOK = "molecule/driver/converge.yml"
OLD, NEW = "570.195.03", "580.178.04"


class Machine:
    """The virtual machine, seen from outside."""

    def __call__(self, *arguments):
        script = PROJECT / "lab" / "vm" / "vm"
        process = subprocess.run([script, *arguments], capture_output=True, text=True, check=False, timeout=900)
        assert process.returncode == 0, process.stderr
        return process.stdout


@pytest.fixture(scope="session")
def machine():
    return Machine()


@pytest.fixture(scope="session")
def installed(machine):
    """The name of the state that the scenario has reached: the old driver, proven."""
    machine("save", "installed")
    return "installed"


@pytest.fixture(scope="session")
def run_playbook_file(pytestconfig):
    """Run a playbook of the project, named by its path there, on the machine with extra variables."""
    inventory = Path(pytestconfig.getoption("ansible_inventory")).resolve()
    # An emulated processor takes its time.
    return partial(play, inventory, timeout=3600)


@pytest.fixture
def run_playbook(run_playbook_file):
    """Run the scenario's playbook with extra variables."""

    def run(extra=None, *options):
        return run_playbook_file(PLAYBOOK, extra, *options)

    return run


# A connection to an emulated machine takes seconds: all levels in one command, a line each, empty where there is none.
LEVELS = """
echo "$(cat /sys/module/nvidia/version)"
echo "$(modinfo -F version nvidia)"
echo "$(readlink /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1 | sed 's/.*[.]so[.]//')"
echo "$(nv-fabricmanager --version | sed 's/.* //')"
"""


class Driver:
    """The driver on every level, read without this project's own code."""

    def __init__(self, host):
        self.host = host

    def _output(self, command, *arguments):
        answer = self.host.run(command, *arguments)
        return answer.stdout.strip() if answer.rc == 0 else None

    @property
    def levels(self):
        """Loaded module, module on disk, userland, fabric manager."""
        return tuple(self.host.check_output("sh -c %s", LEVELS + "exit 0").splitlines())

    @property
    def boot(self):
        return self._output("cat /proc/sys/kernel/random/boot_id")

    def cuda_error(self):
        """What cuInit says."""
        return int(self._output("python3 -c %s", "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"))

    def gpus(self):
        text = self._output("nvidia-smi -L")
        return text.splitlines() if text else []


@pytest.fixture
def driver(host):
    return Driver(host)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A failed test shows the end of the machine's journal."""
    outcome = yield
    report = outcome.get_result()
    host = item.funcargs.get("host") if hasattr(item, "funcargs") else None
    if report.when == "call" and report.failed and host is not None:
        with host.sudo():
            journal = host.run("journalctl --boot --lines 60 --no-pager --output short-monotonic")
        report.sections.append(("journal", journal.stdout or journal.stderr))
