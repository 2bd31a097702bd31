"""A client of the gateway, and the stand-ins behind it. Runs under Molecule (scenario gateway), and after `molecule
converge --scenario-name gateway` by

    pytest tests/gateway --hosts=ansible://gateways --ansible-inventory=molecule/gateway/inventory
"""

import http.client
import json
import os
import ssl
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from stand_in_engine import StandInEngine

PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Answer:
    """Status, headers (names in lower case) and body."""

    status: int
    headers: dict
    text: bytes

    @property
    def json(self):
        return json.loads(self.text)


class Client:
    """Asks the gateway, each time on a connection of its own."""

    def __init__(self, address, port, certificate):
        self.address, self.port = address, port
        self.context = ssl.create_default_context(cadata=certificate)

    def connect(self, timeout=60):
        return http.client.HTTPSConnection(self.address, self.port, timeout=timeout, context=self.context)

    def ask(self, body=None, *, key="sk-first", path="/v1/chat/completions", method="POST", headers=None, raw=None):
        sent = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        data = raw if raw is not None else json.dumps(body).encode() if body is not None else None
        connection = self.connect()
        try:
            connection.request(method, path, data, {**sent, **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()


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
        argv = [str(Path(sys.executable).with_name("ansible-playbook")), str(PROJECT / playbook), "-i", str(inventory)]
        environment = {**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
        if extra:
            argv += ["-e", json.dumps(extra)]
        process = subprocess.run(
            argv, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        return process.returncode, " ".join((process.stdout + process.stderr).replace("''", "'").split())

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


def states(host):
    """Status of each server as the gateway sees it."""
    rows = host.run("echo 'show stat' | socat - /run/haproxy/admin.sock").stdout.splitlines()
    fields = [row.split(",") for row in rows if row.count(",") > 17]
    return {row[1]: row[17] for row in fields if ":" in row[1]}


def wait_for(condition, seconds=60):
    """Wait until something holds, and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"did not come true in {seconds} s")


@pytest.fixture
def gateway(host, hosts, engines):
    """A client, with every stand-in up, in rotation and without memory of what it was asked."""
    wait_for(lambda: all(states(host).get(name) == "UP" for name in engines))
    for engine in engines.values():
        engine.forget()
    address = host.check_output("hostname --all-ip-addresses").split()[0]
    return Client(address, hosts["gateways"]["vars"]["gateway_port"], host.file("/root/gateway.crt").content_string)
