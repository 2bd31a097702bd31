"""A client of the gateway, and the stand-ins behind it. Runs under Molecule (scenario gateway), and after `molecule
converge --scenario-name gateway` by

    pytest tests/gateway --hosts=ansible://gateways --ansible-inventory=molecule/gateway/inventory
"""

import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from gateway_client import Client, states, wait_for
from scenario import play
from stand_in_engine import StandInEngine


@pytest.fixture(scope="session")
def inventory(pytestconfig):
    return Path(pytestconfig.getoption("ansible_inventory")).resolve()


@pytest.fixture(scope="session")
def hosts(inventory):
    """The stand-ins' entries of the inventory."""
    return yaml.safe_load((inventory / "main.yml").read_text(encoding="utf-8"))


@pytest.fixture
def run_playbook(inventory):
    """Run a playbook of the project on this inventory with extra variables; its output with single blanks."""

    def run(playbook, extra=None):
        result = play(inventory, playbook, extra, timeout=600)
        return result.rc, result.text

    return run


@pytest.fixture(scope="session")
def engines(hosts):
    """The stand-ins by their server's name in the gateway."""
    group = hosts["serving_hosts"]
    address = group["vars"]["ansible_host"]
    started = {
        f"{host}:{item['name']}": StandInEngine(f"{host}:{item['name']}", address, item["port"])
        for host, entry in group["hosts"].items()
        for item in entry["serving_deployments"]
    }
    yield started
    for engine in started.values():
        engine.close()


@pytest.fixture
def gateway(host, hosts, engines):
    """A client, with every stand-in up, in rotation and without memory of what it was asked."""
    wait_for(lambda: all(states(host).get(name) == "UP" for name in engines))
    for engine in engines.values():
        engine.forget()
    address = host.check_output("hostname --all-ip-addresses").split()[0]
    return Client(address, hosts["gateways"]["vars"]["gateway_port"], host.file("/root/gateway.crt").content_string)
