"""Which scenarios run again: the runner must never leave out one whose inputs changed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("scenarios", PROJECT / "molecule" / "scenarios.py")
scenarios = importlib.util.module_from_spec(_SPEC)
sys.modules["scenarios"] = scenarios
_SPEC.loader.exec_module(scenarios)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with two scenarios, and a `make` that records its calls and fails on demand."""
    root = tmp_path / "project"
    for name in (
        "ansible.cfg",
        "requirements",
        "molecule/common",
        "molecule/scenarios.py",
        "tests/support/x",
        "src/a",
        "src/b",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    for name in ("default", "disk"):
        (root / "molecule" / name).mkdir()
    (root / "molecule/scenarios.yml").write_text(
        "default: {always: true, minutes: 1, inputs: [src/a]}\ndisk: {minutes: 3, inputs: [src/b]}\n"
    )
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    script = [
        "#!/bin/sh",
        "name=${2#test-}",
        f'echo "$name" >> {tmp_path}/calls',
        f"cat {tmp_path}/fail-$name 2>&- || exit 0; exit 1",
    ]
    (programs / "make").write_text("\n".join(script))
    (programs / "make").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(scenarios, "PROJECT", root)
    return root


def calls(project: Path) -> list[str]:
    file = project.parent / "calls"
    names = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return names


def test_unchanged_inputs_are_left_out_and_said(project, capsys):
    assert scenarios.main([]) == 0
    assert calls(project) == ["default", "disk"]
    assert scenarios.main([]) == 0
    assert calls(project) == ["default"]
    assert "disk: left out: passed on" in capsys.readouterr().out


@pytest.mark.parametrize("path", ["src/b", "src/new", "molecule/common", "requirements"])
def test_a_changed_input_runs_the_scenario_again(project, path):
    (project / "molecule/scenarios.yml").write_text(
        "default: {always: true, minutes: 1, inputs: []}\ndisk: {minutes: 3, inputs: [src]}\n"
    )
    scenarios.main([])
    calls(project)
    (project / path).write_text("changed")
    scenarios.main([])
    assert calls(project) == ["default", "disk"]


def test_all_runs_all(project):
    scenarios.main([])
    calls(project)
    assert scenarios.main(["--all"]) == 0
    assert calls(project) == ["default", "disk"]


def test_a_failure_is_not_remembered_as_a_pass(project, capsys):
    (project.parent / "fail-disk").touch()
    assert scenarios.main([]) == 1
    assert "disk: FAILED" in capsys.readouterr().out
    (project.parent / "fail-disk").unlink()
    calls(project)
    assert scenarios.main([]) == 0
    assert calls(project) == ["default", "disk"]


def test_the_end_says_what_failed(project, capsys):
    """Molecule prints a page after the failed test: the end of the log must name it all the same."""
    failure = "\x1b[31mE   AssertionError: 1 == 2\x1b[0m\nFAILED tests/x.py::test_y\n" + "INFO destroying\n" * 100
    (project.parent / "fail-disk").write_text(failure)
    assert scenarios.main([]) == 1
    end = capsys.readouterr().out.partition("\nscenarios:")[2]
    assert end.rstrip().endswith("    E   AssertionError: 1 == 2\n    FAILED tests/x.py::test_y")


def test_a_spent_budget_never_leaves_out_the_default_scenario(project, capsys):
    assert scenarios.main(["--budget-minutes", "0"]) == 0
    assert calls(project) == ["default"]
    assert "disk: LEFT OUT: its 3 minutes would end after the 0 of the budget" in capsys.readouterr().out


@pytest.mark.parametrize(("minutes", "run"), [("2.5", ["default"]), ("3.5", ["default", "disk"])])
def test_a_scenario_begins_only_where_it_would_end_within_the_budget(project, minutes, run):
    assert scenarios.main(["--budget-minutes", minutes]) == 0
    assert calls(project) == run


def test_a_scenario_for_by_hand_is_left_out_with_its_reason_unless_all_are_asked_for(project, capsys):
    (project / "molecule/scenarios.yml").write_text(
        "default: {always: true, minutes: 1, inputs: []}\ndisk: {minutes: 3, by_hand: its disk is slow, inputs: []}\n"
    )
    assert scenarios.main([]) == 0
    assert calls(project) == ["default"]
    assert "disk: LEFT OUT: its disk is slow; make test-disk runs it" in capsys.readouterr().out
    assert scenarios.main(["--all"]) == 0
    assert calls(project) == ["default", "disk"]
