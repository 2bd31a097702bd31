"""SGLang on a lab host, as a user would look at it; runs under Molecule.

By hand: pytest tests/sglang --hosts=ansible://serving_hosts --ansible-inventory=molecule/sglang/inventory
"""

import json
import time

import pytest

URL = "http://127.0.0.1:30000"
UNIT = "sglang@dense.service"
ASK = """
import json, sys, urllib.error, urllib.request
url, body = sys.argv[1], (sys.argv[2].encode() if len(sys.argv) > 2 else None)
request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
try:
    answer = urllib.request.urlopen(request, timeout=120)
    status = answer.status
except urllib.error.HTTPError as error:
    answer, status = error, error.code
except OSError as error:
    print(json.dumps([0, str(error)]))
    sys.exit()
print(json.dumps([status, answer.read().decode()]))
"""


@pytest.fixture
def release(host):
    """The current release's record."""
    return json.loads(host.file("/etc/metalserve/dense/current/release.json").content_string)


@pytest.fixture
def endpoint(host):
    """Ask the endpoint from inside its host; waits until it is ready, as after a reboot."""

    def ask(path, body=None):
        arguments = [f"{URL}{path}"] if body is None else [f"{URL}{path}", json.dumps(body)]
        status, text = json.loads(host.check_output("python3 -c %s" + " %s" * len(arguments), ASK, *arguments))
        return status, text

    deadline = time.monotonic() + 420
    while ask("/ready")[0] != 200:
        assert time.monotonic() < deadline, "SGLang did not become ready"
        time.sleep(2)
    return ask


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A failed test shows the engine's journal."""
    outcome = yield
    report = outcome.get_result()
    host = item.funcargs.get("host") if hasattr(item, "funcargs") else None
    if report.when == "call" and report.failed and host is not None:
        journal = host.run("journalctl --unit 'sglang@*' --lines 60 --no-pager --output cat | cut -c1-400")
        report.sections.append(("journal of the engine", journal.stdout or journal.stderr))
