"""What the roles of the monitoring refuse, before anything is changed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
TLS = {"certificate": "/tls.pem", "key": "/tls.key"}
IMAGE = {"reference": "registry/grafana:1", "digest": "sha256:" + "0" * 64}
TARGETS = {"monitoring_targets": {"hosts.json": "[]"}}


@pytest.fixture(scope="module")
def refuse(tmp_path_factory):
    """Run a role's step on this machine with variables; its exit status, and what it said with single blanks."""
    folder = tmp_path_factory.mktemp("roles")

    def run(role, step, variables):
        path = folder / "play.yml"
        task = {"name": "Run the step", "ansible.builtin.include_role": {"name": role, "tasks_from": step}}
        play = {"name": "Refuse", "hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": [task]}
        path.write_text(yaml.safe_dump([play]), encoding="utf-8")
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
            "ANSIBLE_FILTER_PLUGINS": str(ROOT / "filter_plugins"),
            "ANSIBLE_LOCAL_TEMP": str(folder / "local"),
            "ANSIBLE_NOCOLOR": "true",
        }
        argv = [str(Path(sys.executable).with_name("ansible-playbook")), str(path), "-i", "localhost,"]
        done = subprocess.run(
            [*argv, "-e", json.dumps(variables)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, " ".join((done.stdout + done.stderr).replace("''", "'").split())

    return run


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"monitoring_listen_address": "0.0.0.0"}, "would listen at 0.0.0.0 without TLS"),
        ({"monitoring_listen_address": "10.0.0.9", "monitoring_tls": TLS}, "would listen at 10.0.0.9 without users"),
        (
            {"monitoring_users": {"ann": "$2b$x"}},
            "monitoring_users names ann, and Prometheus itself has no password to reach Alertmanager",
        ),
        ({"monitoring_grafana_image": IMAGE}, "whose user admin would have the password admin"),
        ({"monitoring_targets": {}}, "monitoring_targets is empty"),
    ],
)
def test_a_monitoring_that_cannot_work_is_refused(refuse, variables, text):
    status, said = refuse("monitoring", "validate", {**TARGETS, **variables})
    assert status != 0
    assert text in said
    assert "changed=0" in said


def test_what_can_work_is_not_refused(refuse):
    wanted = {"monitoring_listen_address": "10.0.0.9", "monitoring_tls": TLS, "monitoring_users": {"ann": "$2b$x"}}
    status, said = refuse("monitoring", "validate", {**TARGETS, **wanted, "monitoring_password_file": "/password"})
    assert status == 0, said


@pytest.mark.parametrize(("address", "fine"), [("10.0.0.1", True), ("fd00::1", True), ("gpu-1", False), ("", False)])
def test_exporters_listen_at_an_address_only(refuse, address, fine):
    status, said = refuse("host_metrics", "validate", {"host_metrics_listen_address": address})
    assert (status == 0) == fine, said
    assert fine or f"would listen at '{address}'. Needed: its IP address" in said


def test_a_benchmark_of_nothing_is_refused(refuse):
    status, said = refuse("benchmark", "main", {})
    assert status != 0
    assert "No deployment was named" in said
