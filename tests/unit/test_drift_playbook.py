"""playbooks/ops/drift.yml over hosts that are a function: it only reads, and tells of all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MODEL = "qwen3.6-35b-a3b-fp8"


def run(folder, *options, **variables):
    """Exit status and output of the playbook over two hosts, one of them lost, and a gateway."""
    deployment = {"name": "qwen", "engine": "vllm", "model": MODEL, "port": 8000}
    files = [{"path": "config.json", "size_bytes": 2, "sha256": "a" * 64}]
    shared = {
        "ansible_connection": "simulated",
        "ansible_python_interpreter": sys.executable,
        "simulated_answers": str(ROOT / "tests/unit/played_drift.py"),
        "simulated_home": str(folder / "home"),
        "serving_lock": {
            "images": {"vllm/vllm-openai:v0.33.0": {"digest": "sha256:" + "d" * 64, "compressed_bytes": 1000}},
            "models": {MODEL: {"revision": "0123", "files": files}},
        },
    }
    groups = {
        "serving_hosts": {"hosts": {"h1": None, "lost": None}, "vars": {"serving_deployments": [deployment]}},
        "gateways": {"hosts": {"g1": None}, "vars": {"gateway_clients": [{"name": "c", "key_sha256": "0" * 64}]}},
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": groups, "vars": shared}}))
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible-playbook")),
            str(ROOT / "playbooks/ops/drift.yml"),
            f"--inventory={folder / 'hosts.yml'}",
            f"--extra-vars={json.dumps(variables)}",
            *options,
        ],
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_CONNECTION_PLUGINS": str(ROOT / "lab/simulated/connection"),
            "ANSIBLE_LOCAL_TEMP": str(folder / "local"),
            "ANSIBLE_NOCOLOR": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("options", [(), ("--check",)], ids=["run", "check run"])
def test_all_are_told_in_one_table_and_nothing_is_changed(tmp_path, options):
    _status, output = run(tmp_path, *options, drift_report_json=str(tmp_path / "drift.json"))
    table = [line.split() for line in output.splitlines()]
    assert ["host", "release", "units", "toolkit", "cdi", "weights", "image", "strays", "gateway"] in table
    assert ["h1", "DRIFT", "DRIFT", "DRIFT", "DRIFT", "ok", "DRIFT", "ok", "-"] in table
    assert ["lost", *"????????"] in table
    assert ["g1", *"-------", "DRIFT"] in table
    assert "lost: could not be looked at: it could not be reached" in output
    assert "h1: units: /etc/systemd/system/vllm@.service is not as it would be written" in output
    assert "g1: gateway: /etc/haproxy/haproxy.cfg is not as it would be written" in output
    assert "g1: gateway: HAProxy runs with another configuration than the inventory asks for" in output
    hosts = json.loads((tmp_path / "drift.json").read_text())["hosts"]
    assert hosts["h1"]["aspects"]["release"] == ["qwen is planned"]
    assert "failed=1" not in output


def test_it_fails_when_that_is_asked_for(tmp_path):
    status, output = run(tmp_path, drift_fail=True)
    assert status == 2
    assert "3 of 3 hosts are not as the inventory wants them, or could not be looked at" in " ".join(output.split())
