"""SGLang on a lab host, as a user would look at it; runs under Molecule.

By hand: pytest tests/sglang --hosts=ansible://serving_hosts --ansible-inventory=molecule/sglang/inventory
"""

import json

import pytest
from scenario import asker, show_journal

URL = "http://127.0.0.1:30000"
UNIT = "sglang@dense.service"


@pytest.fixture
def release(host):
    """The current release's record."""
    return json.loads(host.file("/etc/metalserve/dense/current/release.json").content_string)


@pytest.fixture
def endpoint(host):
    """Ask the endpoint from inside its host; waits until it is ready, as after a reboot."""
    return asker(host, URL, "/ready")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    show_journal(item, outcome.get_result(), "sglang@*")
