"""What is collected about a deployment that does not serve."""

from __future__ import annotations

import json

import pytest

from metalserve.remote.diagnose import diagnose, http_status
from metalserve.remote.releases import Refused, activate_release, mark_good, refuse, stage_release

A, B = "aaaaaaaaaaaa", "bbbbbbbbbbbb"
ENDPOINT = {"unit": "vllm@tiny.service", "url": "http://127.0.0.1:9", "ready_route": "/health"}
GATE = {
    "passed": False,
    "when": "2027-01-01T00:00:00Z",
    "rows": [
        {"name": "chat", "ok": True, "detail": "answered 42"},
        {"name": "tool_auto", "ok": False, "detail": "no tool call"},
    ],
}


class Machine:
    def __init__(self, state="active"):
        self.asked = []
        self.texts = {
            "systemctl": f"ActiveState={state}\nSubState=running\n",
            "docker": f"{A} since 2027-01-01\n",
            "journalctl": "INFO fine\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\nbye\n",
            "nvidia-smi": "0, NVIDIA H800, 79000 MiB, 81559 MiB\n",
        }

    def __call__(self, argv):
        self.asked.append(list(argv))
        return self.texts[argv[0]]


@pytest.fixture
def root(tmp_path):
    for release_id in (A, B):
        files = {"release.json": "{}", "endpoint.json": json.dumps(ENDPOINT), "gate.json": json.dumps(GATE)}
        stage_release(tmp_path, "tiny", release_id, files, dry_run=False)
    activate_release(tmp_path, "tiny", A, dry_run=False)
    mark_good(tmp_path, "tiny", A)
    refuse(tmp_path, "tiny", B, Refused("2027-01-02T03:04:05Z", "start", "no GPU", {}))
    return tmp_path


def test_a_deployment_that_fails_is_told_with_cause_and_remedy(root):
    found = diagnose(root, "tiny", run=Machine("failed"), status_of=lambda url: f"refused at {url}")
    text = "\n".join(found["lines"])
    assert found["healthy"] is False
    assert [failure["name"] for failure in found["failures"]] == ["out_of_memory"]
    for words in (
        "tiny: does not serve as it should",
        "ActiveState=failed",
        f"{A} since 2027-01-01",
        "refused at http://127.0.0.1:9/health",
        "no tool call",
        f"refused {B}",
        "no GPU",
        "NVIDIA H800, 79000 MiB",
        "Remedy: lower `memory_share`",
        "    bye",
    ):
        assert words in text
    assert "answered 42" not in text


def test_a_healthy_deployment_needs_no_journal(root):
    gate = root / "tiny" / "releases" / A / "gate.json"
    gate.write_text(json.dumps({**GATE, "passed": True, "rows": []}))
    machine = Machine()
    found = diagnose(root, "tiny", run=machine, status_of=lambda _: "HTTP 200")
    assert (found["healthy"], found["failures"]) == (True, [])
    assert "journalctl" not in [argv[0] for argv in machine.asked]


def test_a_deployment_without_a_release(root):
    found = diagnose(root, "none", run=Machine())
    assert found["healthy"] is False
    assert found["lines"] == ["none: no release is current on this host (releases here: none)"]


def test_a_port_where_nobody_listens_is_said_in_words():
    assert "refused" in http_status("http://127.0.0.1:1/health")
