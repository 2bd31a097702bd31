"""`metalserve run` on the real ansible-runner and ansible-core, over trees of files that stand for hosts."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from metalserve import run_command
from metalserve.errors import Refusal
from metalserve.run_command import Stop, arguments, find_inventory, find_playbook, find_project

ROOT = Path(__file__).resolve().parents[3]


def options(**given):
    return argparse.Namespace(**{"check": False, "diff": False, "limit": None, "extra_vars": [], **given})


def test_the_options_reach_ansible_as_they_were_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = arguments(options(check=True, diff=True, limit="a,!b c", extra_vars=["x=it's", "@more.yml"]))
    assert shlex.split(line) == [
        "--check",
        "--diff",
        "--limit",
        "a,!b c",
        "-e",
        "x=it's",
        "-e",
        f"@{tmp_path}/more.yml",
    ]
    assert arguments(options()) == ""


def test_the_project_is_found_from_below_and_from_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "playbooks/ops")
    assert find_project(None) == ROOT
    monkeypatch.chdir(tmp_path)
    assert find_project(ROOT) == ROOT
    with pytest.raises(Refusal, match=r"no site\.yml in"):
        find_project(tmp_path)
    monkeypatch.setattr(run_command, "__file__", str(tmp_path / "lib/python/metalserve/run_command.py"))
    with pytest.raises(Refusal, match=r"or above\. Needed: a checkout"):
        find_project(None)


def test_playbooks_go_by_their_names():
    assert find_playbook(ROOT, "site") == ROOT / "site.yml"
    assert find_playbook(ROOT, "rollout") == ROOT / "playbooks/rollout.yml"
    assert find_playbook(ROOT, "rollback") == ROOT / "playbooks/ops/rollback.yml"
    with pytest.raises(Refusal, match=r"no playbook 'rolout' .* Needed: one of .*rollout"):
        find_playbook(ROOT, "rolout")


def test_inventories_go_by_path_or_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_inventory(ROOT, "prod") == ROOT / "inventories/prod"
    assert find_inventory(ROOT, "lab") == ROOT / "inventories/lab"
    (tmp_path / "hosts.yml").touch()
    assert find_inventory(ROOT, "hosts.yml") == tmp_path / "hosts.yml"
    assert find_inventory(ROOT, "inventories/prod/hosts.yml") == ROOT / "inventories/prod/hosts.yml"
    with pytest.raises(Refusal, match="no inventory 'nowhere'"):
        find_inventory(ROOT, "nowhere")


def test_without_ansible_runner_it_is_said_what_to_install(monkeypatch, capsys):
    from metalserve.cli import main

    monkeypatch.setitem(sys.modules, "ansible_runner.interface", None)
    assert main(["run", "preflight", "-i", "prod", "--project", str(ROOT)]) == 2
    assert "pip install 'metalserve[ansible,run]'" in capsys.readouterr().err


def test_a_wish_to_end_waits_for_the_next_hosts():
    stop = Stop()
    stop.look({"event": "playbook_on_play_start"})
    assert not stop.now
    stop.asked = True
    stop.look({"event": "runner_on_ok"})
    assert not stop.now
    stop.look({"event": "playbook_on_play_start"})
    assert stop.now


# ---- the real thing ----

PLAY = """
- name: Change
  hosts: all
  gather_facts: false
  serial: 1
  tasks:
    - name: Begin
      ansible.builtin.file: {path: "{{ folder }}/{{ inventory_hostname }}.begun", state: touch, mode: "0600"}
    - name: Take some time
      ansible.builtin.wait_for: {path: "{{ folder }}/go", timeout: 60}
    - name: End
      ansible.builtin.file: {path: "{{ folder }}/{{ inventory_hostname }}.ended", state: touch, mode: "0600"}
    - name: Fail where it is asked for
      ansible.builtin.fail: {msg: "Found a fault. Needed: none. Change: fault."}
      when: fault | default('') == inventory_hostname
"""


@pytest.fixture
def project(tmp_path):
    """A small project of one playbook that changes three hosts one after another."""
    (tmp_path / "playbooks").mkdir()
    (tmp_path / "roles").mkdir()
    (tmp_path / "site.yml").write_text("---\n")
    (tmp_path / "ansible.cfg").write_text("[defaults]\ninject_facts_as_vars = false\n")
    (tmp_path / "playbooks/change.yml").write_text(PLAY)
    variables = {"ansible_connection": "local", "folder": str(tmp_path), "ansible_python_interpreter": sys.executable}
    hosts = {"all": {"hosts": {"h1": {}, "h2": {}, "h3": {}}, "vars": variables}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(hosts))
    return tmp_path


def command(project, *words):
    # Another directory than the project's, and no configuration from the environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    environment["PYTHONPATH"] = str(ROOT / "src")
    argv = [sys.executable, "-m", "metalserve.cli", "run", "change", "--project", str(project)]
    argv += ["-i", str(project / "hosts.yml"), *words]
    return subprocess.Popen(argv, cwd="/", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(path, process):
    end = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.05)


def test_a_run_ends_with_a_line_for_each_host(project):
    (project / "go").touch()
    process = command(project, "--json")
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    told = [json.loads(line) for line in out.splitlines()]
    assert [each["text"] for each in told if each["kind"] == "stage"] == [
        "Change",
        "Change, batch 2",
        "Change, batch 3",
    ]
    assert [(each["host"], each["text"]) for each in told if each["kind"] == "host"] == [
        (host, "done: 3 ok, 2 changed") for host in ("h1", "h2", "h3")
    ]
    assert told[-1]["text"] == "change: successful"


def test_a_host_that_fails_is_told_and_gives_another_status(project):
    (project / "go").touch()
    process = command(project, "-l", "h1", "-e", "fault=h1")
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 1, out
    assert "h1: FAILED: Fail where it is asked for: Found a fault. Needed: none. Change: fault." in out


def test_a_question_of_ssh_does_not_wait_for_ever(project):
    """A stand-in for ssh that asks on the terminal about an unknown host key, as ssh does."""
    asking = project / "ssh"
    asking.write_text(
        "#!/bin/sh\n"
        '[ "$1" = -V ] && exit 0\n'
        "printf 'Are you sure you want to continue connecting (yes/no/[fingerprint])? ' >/dev/tty\n"
        "read -r answer </dev/tty\n"
        'echo "Host key verification failed ($answer)." >&2\n'
        "exit 255\n"
    )
    asking.chmod(0o755)
    process = command(project, "-l", "h1", "-e", "ansible_connection=ssh", "-e", f"ansible_ssh_executable={asking}")
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 1, out
    assert "h1: UNREACHABLE: " in out
    assert "Host key verification failed ()." in out, "ansible-core gives ssh no terminal to ask at"


def test_ansible_that_cannot_begin_is_told_apart(project):
    (project / "playbooks/change.yml").write_text("- hosts: all\n  nonsense: true\n")
    process = command(project)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 3, out
    assert "nonsense" in out


def test_an_interrupt_stops_between_hosts(project):
    process = command(project)
    wait_for(project / "h1.begun", process)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None, "the host that is being changed ends first"
    (project / "go").touch()
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 130, out
    assert "stopping before the next hosts; once more stops at once" in out
    assert (project / "h1.ended").exists()
    assert not (project / "h2.ended").exists()
    assert not (project / "h3.begun").exists()


def test_a_second_interrupt_stops_at_once(project):
    process = command(project)
    wait_for(project / "h1.begun", process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 130, out
    assert "stopping at once" in out
    assert not (project / "h1.ended").exists()
