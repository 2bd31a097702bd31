"""playbooks/ops/support_bundle.yml over this machine and over a host that is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_one_archive_a_host_and_a_lost_host_is_named(tmp_path):
    lost = {
        "ansible_connection": "simulated",
        "simulated_answers": str(tmp_path / "answers.py"),
        "simulated_home": str(tmp_path / "home"),
    }
    (tmp_path / "answers.py").write_text("def answer(host, module, arguments):\n    return None\n")
    hosts = {"here": {"ansible_connection": "local", "serving_deployments": []}, "lost": lost}
    shared = {"ansible_python_interpreter": sys.executable, "gpu_facts_models_dir": str(tmp_path)}
    groups = {"serving_hosts": {"hosts": hosts, "vars": shared}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": groups}}))
    left_before = set(Path("/var/tmp").glob("metalserve-support-*"))
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible-playbook")),
            str(ROOT / "playbooks/ops/support_bundle.yml"),
            f"--inventory={tmp_path / 'hosts.yml'}",
            f"--extra-vars={json.dumps({'support_bundle_dir': str(tmp_path / 'support')})}",
        ],
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_CONNECTION_PLUGINS": str(ROOT / "lab/simulated/connection"),
            "ANSIBLE_LOCAL_TEMP": str(tmp_path / "local"),
            "ANSIBLE_NOCOLOR": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    output = " ".join((done.stdout + done.stderr).split())
    assert "lost: NOTHING: it could not be reached" in output
    assert f"items in {tmp_path / 'support'}/here.tar.gz" in output
    assert [path.name for path in (tmp_path / "support").iterdir()] == ["here.tar.gz"]
    with tarfile.open(tmp_path / "support/here.tar.gz") as archive:
        names = archive.getnames()
        assert {"facts.json", "verdict.json", "commands/kernel.txt", "CONTENTS.txt"} <= set(names)
        assert "verdict" in json.load(archive.extractfile("verdict.json"))
    assert set(Path("/var/tmp").glob("metalserve-support-*")) == left_before
