"""A host with no way out, served from a bundle; runs under Molecule.

By hand: pytest tests/airgap --hosts=ansible://serving_hosts --ansible-inventory=molecule/airgap/inventory
"""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import yaml
from scenario import play, show_journal


@pytest.fixture(scope="session")
def inventory(pytestconfig):
    return Path(pytestconfig.getoption("ansible_inventory")).resolve()


@pytest.fixture(scope="session")
def run_playbook(inventory):
    """Run a playbook of the project on this inventory with extra variables."""

    return partial(play, inventory, timeout=1200)


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
    show_journal(item, outcome.get_result(), "vllm@*")
