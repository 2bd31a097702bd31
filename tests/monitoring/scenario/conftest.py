"""A Prometheus to ask, a gateway to send requests through, and the hosts behind. Runs under Molecule (scenario
monitoring), and after `molecule converge --scenario-name monitoring` by

    pytest tests/monitoring/scenario --hosts=ansible://monitoring --ansible-inventory=molecule/monitoring/inventory
"""

import json
import shlex
import time
from pathlib import Path

import pytest
from scenario import play

import testinfra

# Asks a URL from the host itself: nothing is installed there for it.
GET = """
import sys, urllib.request
print(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[1], timeout=30).read().decode())
"""
# A request through the gateway, by its key and over TLS.
POST = """
import json, ssl, sys, urllib.request
address, words = sys.argv[1], int(sys.argv[2])
context = ssl.create_default_context(cafile="/root/gateway.crt")
messages = [{"role": "user", "content": "What is 17 + 25?"}]
body = {"model": "lab-moe-tiny", "messages": messages, "max_tokens": words, "ignore_eos": True}
request = urllib.request.Request(
    f"https://{address}:8443/v1/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer sk-first", "Content-Type": "application/json"},
)
print(urllib.request.urlopen(request, timeout=600, context=context).status)
"""


def wait_for(condition, seconds=300, what=""):
    """Wait until something holds, and return it; what was seen last is told otherwise."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"did not come true in {seconds} s: {what() if callable(what) else what}"
        time.sleep(1)


class Prometheus:
    """The real one on the monitoring's host."""

    def __init__(self, host):
        self.host = host

    def get(self, path, port=9090, **parameters):
        from urllib.parse import urlencode

        url = f"http://127.0.0.1:{port}{path}?{urlencode(parameters)}"
        return json.loads(self.host.check_output("python3 -c %s %s", GET, url))

    def query(self, expression):
        """Labels and value of each sample."""
        answer = self.get("/api/v1/query", query=expression)
        return [(row["metric"], float(row["value"][1])) for row in answer["data"]["result"]]

    def alerts(self):
        """Names of the alerts that fire."""
        return {
            alert["labels"]["alertname"]: alert
            for alert in self.get("/api/v1/alerts")["data"]["alerts"]
            if alert["state"] == "firing"
        }

    def wait_for_alert(self, name, seconds=300):
        wait_for(lambda: name in self.alerts(), seconds, lambda: f"{name}; fires: {sorted(self.alerts())}")
        return self.alerts()[name]

    def wait_until_silent(self, name, seconds=300):
        wait_for(lambda: name not in self.alerts(), seconds, f"{name} still fires")


@pytest.fixture
def prometheus(host):
    return Prometheus(host)


@pytest.fixture(scope="session")
def inventory(pytestconfig):
    return Path(pytestconfig.getoption("ansible_inventory")).resolve()


@pytest.fixture(scope="session")
def serving(inventory):
    """The host that serves."""
    (found,) = testinfra.get_hosts(["ansible://serving_hosts"], ansible_inventory=str(inventory))
    return found


@pytest.fixture(scope="session")
def run_playbook(inventory):
    """Run a playbook of the project on this inventory; its exit status, and its output with single blanks."""

    def run(playbook, extra=None):
        result = play(inventory, playbook, extra, timeout=900)
        return result.rc, result.text

    return run


@pytest.fixture
def ask(host):
    """Send a request through the gateway: waited for, or in a unit of its own (`behind` is its name)."""
    address = host.check_output("hostname --all-ip-addresses").split()[0]

    def send(words=8, behind=None):
        if behind is None:
            return host.check_output("python3 -c %s %s %s", POST, address, str(words))
        argv = ["systemd-run", "--collect", f"--unit={behind}", "python3", "-c", POST, address, str(words)]
        return host.check_output(shlex.join(argv).replace("%", "%%"))

    return send
