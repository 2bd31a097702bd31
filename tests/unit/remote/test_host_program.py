"""The programs that a host gets: the same bytes each time, and they run by themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROLES = {"host_program": "serving_unit", "drift_program": "nvidia_driver"}


def install(module: str, path: Path, *options: str) -> str:
    role = ROOT / "roles" / ROLES[module]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    environment |= {
        "ANSIBLE_MODULE_UTILS": str(role / "module_utils"),
        "ANSIBLE_LOCALHOST_WARNING": "false",
        "ANSIBLE_LOCAL_TEMP": str(path.parent / "local"),
        "ANSIBLE_REMOTE_TEMP": str(path.parent / "remote"),
        "ANSIBLE_NOCOLOR": "true",
        "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
    }
    argv = [str(Path(sys.executable).with_name("ansible")), "localhost", "-M", str(role / "library")]
    done = subprocess.run(
        [*argv, "-m", module, "-a", f"path={path}", *options],
        cwd=path.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make(module, folder):
    path = folder / module
    assert "CHANGED" in install(module, path, "--check")
    assert not path.exists()
    assert "CHANGED" in install(module, path)
    return path


@pytest.fixture(scope="module", params=ROLES)
def made(request, tmp_path_factory):
    return request.param, make(request.param, tmp_path_factory.mktemp("bin"))


@pytest.fixture(scope="module")
def host_program(tmp_path_factory):
    return make("host_program", tmp_path_factory.mktemp("bin"))


def test_a_second_run_changes_nothing_and_damage_is_healed(made):
    module, path = made
    before = path.read_bytes()
    assert "SUCCESS" in install(module, path)
    path.write_bytes(before[:-1])
    assert "CHANGED" in install(module, path)
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o755


def test_it_runs_without_the_package(made, tmp_path):
    module, path = made

    def run(*words):
        argv = [sys.executable, "-I", str(path), *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    if module == "drift_program":
        expected = {"version": "1.2", "fabric_manager": False, "manager": "apt", "packages": {}}
        (tmp_path / "driver.json").write_text(json.dumps(expected))
        answer = run(str(tmp_path / "driver.json"))
        assert answer.returncode == 1
        assert "driver drift: the loaded module is missing, not 1.2" in answer.stderr
        return
    root = ("--root", str(tmp_path))
    assert run(*root, "releases").stdout == "no releases here\n"
    assert run(*root, "diagnose").stdout == "no deployment has releases here\n"
    refused = run(*root, "rollback", "tiny")
    assert refused.returncode == 1
    assert "tiny has no release to go back to" in refused.stdout


def test_the_logs_of_a_deployment_are_one_command(host_program, tmp_path):
    """journalctl is played: it says how it was called."""
    (tmp_path / "root/qwen/releases").mkdir(parents=True)
    played = tmp_path / "bin/journalctl"
    played.parent.mkdir()
    played.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    played.chmod(0o755)

    def logs(*words):
        argv = [sys.executable, "-I", str(host_program), "--root", str(tmp_path / "root"), "logs", *words]
        environment = {"PATH": f"{played.parent}:{os.environ['PATH']}"}
        return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)

    said = logs("qwen", "--lines", "7", "--errors").stdout.splitlines()
    assert {"SYSLOG_IDENTIFIER=vllm-qwen", "SYSLOG_IDENTIFIER=sglang-qwen", "--lines=7"} <= set(said)
    assert any(line.startswith("--grep=error|") for line in said)
    refused = logs("other")
    assert refused.returncode == 2
    assert "no deployment is called 'other' here. Needed: one of qwen" in refused.stderr
