"""Run the roles again on the scenario's host with other variables."""

from pathlib import Path

import pytest
from scenario import PROJECT, play

SCENARIO = PROJECT / "molecule" / "toolkit"


@pytest.fixture(scope="session")
def run(pytestconfig):
    """Run one of the scenario's playbooks with extra variables; by default the role alone."""
    inventory = Path(pytestconfig.getoption("ansible_inventory")).resolve()

    def run(extra=None, *options, playbook="role.yml"):
        return play(inventory, SCENARIO / playbook, extra, *options)

    return run
