"""What a user would look at on a host; runs under Molecule and by plain pytest.

By hand: pytest tests/testinfra/default --hosts=ansible://serving_hosts --ansible-inventory=inventories/lab
"""

import json
from functools import partial
from pathlib import Path

import pytest
import yaml
from scenario import asker, play, show_journal


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
    return partial(play, inventory)


@pytest.fixture
def release(host):
    """The current release's record."""
    return json.loads(host.file("/etc/metalserve/tiny/current/release.json").content_string)


@pytest.fixture
def endpoint(host):
    """Ask the endpoint from inside its host; waits until it is ready, as after a reboot."""
    return asker(host, "http://127.0.0.1:8000", "/health")


def pytest_configure(config):
    config.addinivalue_line("markers", "restarts_the_host: containers are other ones afterwards")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    show_journal(item, outcome.get_result(), "vllm@*")
