"""The playbook with the real ansible-core over trees of files that stand for hosts (no GPU is touched)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
SPEC = importlib.util.spec_from_file_location("fleet", ROOT / "lab/fleet.py")
assert SPEC
assert SPEC.loader
FLEET = importlib.util.module_from_spec(SPEC)
sys.modules["fleet"] = FLEET
SPEC.loader.exec_module(FLEET)
MODEL = "qwen3.6-35b-a3b-fp8"
VARIABLES = {
    "serving_deployments": [{"name": "qwen", "engine": "vllm", "model": MODEL, "port": 8000}],
    "serving_lock": {
        "images": {"vllm/vllm-openai:v0.33.0": {"digest": "sha256:" + "d" * 64, "compressed_bytes": 1000}},
        "models": {MODEL: {"revision": "0123", "files": [{"path": "a", "size_bytes": 1000, "sha256": "a" * 64}]}},
    },
}


def preflight(folder, *options, hosts=None, path=None):
    """Run the playbook over the fleet in a folder; hosts: further variables of hosts; path: commands before others."""
    inventory = yaml.safe_load((folder / "hosts.yml").read_text())
    for host, variables in (hosts or {}).items():
        inventory["serving_hosts"]["hosts"].setdefault(host, {}).update(variables)
    inventory["serving_hosts"]["vars"].update(VARIABLES)
    (folder / "fleet.yml").write_text(yaml.safe_dump(inventory))
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_LOCAL_TEMP": str(folder / "local"),
        "ANSIBLE_REMOTE_TEMP": str(folder / "remote"),
        "ANSIBLE_NOCOLOR": "true",
        "PATH": os.pathsep.join(filter(None, (str(path or ""), os.environ["PATH"]))),
        "PYTHONPATH": str(ROOT / "src"),
    }
    program = Path(sys.executable).with_name("ansible-playbook")
    command = [program, "-i", folder / "fleet.yml", ROOT / "playbooks/preflight.yml", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A fleet in which hosts are refused for different reasons, and what a run says of it."""
    folder = tmp_path_factory.mktemp("mixed")
    shapes = [FLEET.read_shape(text) for text in ("2x8xH800", "4xL40S@570.195.03", "8xH100@nouveau", "1xcpu")]
    trees = FLEET.build_fleet(folder, shapes)
    hosts = dict(zip(("good", "narrow", "old", "nouveau", "cpu"), trees, strict=True))
    width = trees[hosts["narrow"]] / "usr/bin/nvidia-smi"
    width.write_text(width.read_text().replace("<current_link_width>16x<", "<current_link_width>8x<"))
    run = preflight(
        folder,
        "-e", f"preflight_report_json={folder}/report.json", "-e", f"preflight_report_junit={folder}/report.xml",
        hosts={
            # Nothing listens there, and there is no such program.
            "unreachable": {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 9},
            "no-python": {"ansible_python_interpreter": "/no/such/python"},
            "unreadable": {"gpu_facts_root": str(trees[hosts["good"]]), "nvidia_driver_version": "{{ nobody }}"},
        },
    )  # fmt: skip
    return folder, hosts, run


def test_no_host_hides_another(mixed):
    folder, hosts, run = mixed
    assert run.returncode != 0
    report = json.loads((folder / "report.json").read_text())["hosts"]
    verdicts = {host: verdict["verdict"] for host, verdict in report.items()}
    assert verdicts == {
        hosts["good"]: "ok",
        hosts["narrow"]: "refused",
        hosts["old"]: "ok_after",
        hosts["nouveau"]: "ok_after",
        hosts["cpu"]: "refused",
        "unreachable": "refused",
        "no-python": "refused",
        "unreadable": "refused",
    }
    assert report[hosts["nouveau"]]["action"].startswith("driver install and reboot; ")


def test_the_table_is_printed_once_and_before_the_failure(mixed):
    _folder, hosts, run = mixed
    lines = run.stdout.splitlines()
    heads = [line for line in lines if line.split()[:3] == ["host", "verdict", "host"]]
    assert len(heads) == 1, run.stdout
    assert sum(line.startswith(f"{hosts['good']} ") and " ok " in line and "=" not in line for line in lines) == 1
    assert "8 hosts: 1 ok, 2 ok after the playbooks have run, 5 refused" in lines
    assert run.stdout.index(heads[0]) < run.stdout.index("5 of 8 hosts are refused: ")
    assert run.stdout.count("fatal: ") == 3, "two hosts that give no facts, and one failure for all"


def test_each_refusal_names_its_reason(mixed):
    _folder, hosts, run = mixed
    remarks = {line.split()[1].rstrip(":"): line for line in run.stdout.splitlines() if line.startswith("REFUSED ")}
    assert "pcie_width: GPU 0 (0000:10:00.0) runs x8 of x16" in remarks[hosts["narrow"]]
    assert "16-bit weights on a CPU host" in remarks[hosts["cpu"]]
    assert "the host gave no facts" in remarks["unreachable"]
    assert "/no/such/python" in remarks["no-python"]
    assert "a variable of the host cannot be read" in remarks["unreadable"]


def test_nothing_is_changed(mixed):
    _folder, _hosts, run = mixed
    recap = run.stdout.partition("PLAY RECAP")[2]
    assert "changed=0" in recap
    assert not [line for line in recap.splitlines() if "changed=" in line and "changed=0" not in line]


def test_junit_is_written_too(mixed):
    folder, _hosts, _run = mixed
    assert (folder / "report.xml").read_text().count("<testsuite ") == 8


def test_a_fleet_without_a_refusal_goes_on_also_in_check_mode_and_under_a_limit(tmp_path):
    trees = FLEET.build_fleet(tmp_path, [FLEET.read_shape("3x8xH800")])
    first, second, _third = trees
    run = preflight(tmp_path, "--check", "--limit", f"{first},{second}")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 hosts: 2 ok, 0 ok after the playbooks have run, 0 refused" in run.stdout
    assert f"{first}, {second}:\n  deployment  model" in run.stdout, "one plan for both"


def test_an_accepted_refusal_and_a_report_that_cannot_be_written(tmp_path):
    (host,) = FLEET.build_fleet(tmp_path, [FLEET.read_shape("8xH800")])
    smi = tmp_path / host / "usr/bin/nvidia-smi"
    smi.write_text(smi.read_text().replace("<current_link_width>16x<", "<current_link_width>8x<"))
    accepted = preflight(tmp_path, hosts={host: {"preflight_accept": ["pcie_width"]}})
    assert accepted.returncode == 0, accepted.stdout
    assert "(accepted: preflight_accept)" in accepted.stdout
    run = preflight(
        tmp_path,
        "-e",
        f"preflight_report_json={tmp_path}/none/r.json",
        hosts={host: {"preflight_accept": ["pcie_width"]}},
    )
    assert run.returncode != 0
    assert "none/r.json cannot be written: No such file or directory" in run.stdout
    assert "preflight_report_json" in run.stdout


def test_what_docker_engine_says_against_a_host_is_a_row_of_its_verdict(tmp_path):
    (host,) = FLEET.build_fleet(tmp_path, [FLEET.read_shape("8xH800")])
    (tmp_path / host / "usr/bin/docker").unlink()
    # The step runs on this machine: these commands stand before its own.
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, answer in (("dockerd", "exit 127"), ("docker", "exit 127"), ("systemctl", "echo 'systemd 247 (247.3)'")):
        (commands / name).write_text(f"#!/bin/sh\n{answer}\n")
        (commands / name).chmod(0o755)
    run = preflight(tmp_path, path=commands)
    assert run.returncode != 0
    assert f"REFUSED  {host}: docker: This host has systemd 247 (247.3). Needed: systemd 252 or newer" in run.stdout


def test_headers_that_nobody_offers_are_refused_before_anything_changes(tmp_path):
    (host,) = FLEET.build_fleet(tmp_path, [FLEET.read_shape("8xH800@none")])
    (tmp_path / host / f"lib/modules/{FLEET.KERNEL}/build/Makefile").unlink()
    # The step runs on this machine, whose package sources are to offer nothing.
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("apt-get", "apt-cache"):
        (commands / name).write_text("#!/bin/sh\nexit 0\n")
        (commands / name).chmod(0o755)
    run = preflight(tmp_path, path=commands)
    assert run.returncode != 0
    assert f"REFUSED  {host}: driver: there are no headers of the running kernel {FLEET.KERNEL}" in run.stdout


def test_only_hosts_with_releases_are_asked_about_them(tmp_path):
    known, fresh = FLEET.build_fleet(tmp_path, [FLEET.read_shape("2x8xH800")])
    root = tmp_path / known / "etc/metalserve"
    (root / "qwen/releases/0123456789ab").mkdir(parents=True)
    run = preflight(
        tmp_path, hosts={known: {"serving_unit_root": str(root), "gpu_facts_releases_dir": "/etc/metalserve"}}
    )
    assert run.returncode == 0, run.stdout + run.stderr
    _before, told = run.stdout.split("Read what the host knows about its releases]")
    assert f"ok: [{known}]" in told
    assert f"ok: [{fresh}]" not in told


@pytest.mark.parametrize("place", ["inventory", "command line"])
def test_a_bundle_is_proven_wherever_it_is_named(tmp_path, place):
    with_bundle, without = FLEET.build_fleet(tmp_path, [FLEET.read_shape("2x8xH800")])
    missing = str(tmp_path / "nowhere")
    if place == "inventory":
        run = preflight(tmp_path, hosts={with_bundle: {"serving_bundle": missing}})
        assert f"fatal: [{without}]" not in run.stdout
    else:
        run = preflight(tmp_path, "-e", f"serving_bundle={missing}")
    assert run.returncode != 0
    assert missing in run.stdout + run.stderr


def test_a_fact_cache_does_not_speak_for_a_host_that_is_silent(tmp_path, monkeypatch):
    (host,) = FLEET.build_fleet(tmp_path, [FLEET.read_shape("8xH800")])
    monkeypatch.setenv("ANSIBLE_CACHE_PLUGIN", "ansible.builtin.jsonfile")
    monkeypatch.setenv("ANSIBLE_CACHE_PLUGIN_CONNECTION", str(tmp_path / "cache"))
    assert preflight(tmp_path).returncode == 0
    silent = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 9}
    run = preflight(tmp_path, hosts={host: silent})
    assert run.returncode != 0
    assert f"REFUSED  {host}: facts: the host gave no facts" in run.stdout


def test_a_shape_that_cannot_be_read():
    with pytest.raises(SystemExit, match="'eight H800' is no shape"):
        FLEET.read_shape("eight H800")
