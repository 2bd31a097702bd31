"""The report at the end of a run, from what Ansible tells a callback."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from metalserve.rollout.plan import rollout_plan

SOURCE = Path(__file__).resolve().parents[3] / "playbooks/callback_plugins/rollout_report.py"
LOOK = {
    "deployment": "tiny",
    "started": True,
    "active": "old",
    "before": "old",
    "wanted": "new",
    "ok": False,
    "serving": False,
}
DONE = {**LOOK, "active": "new", "ok": True, "serving": True, "seconds": 61.0, "gate": "15 of 15", "capacity": {}}


def result(host, action, **data):
    return SimpleNamespace(
        host=SimpleNamespace(get_name=lambda: host), task=SimpleNamespace(action=action), result=data
    )


def outcomes(host, outcome, *, check=False, state="rolled_out"):
    fact = {"state": state, "check": check, "outcomes": [outcome]}
    return result(host, "serving_rollout", ansible_facts={"serving_rollout": fact})


@pytest.fixture
def shown():
    return []


@pytest.fixture
def callback(shown):
    spec = importlib.util.spec_from_file_location("rollout_report", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plugin = module.CallbackModule()
    plugin._display = SimpleNamespace(display=shown.append, warning=shown.append)
    return plugin


def begin(callback, tmp_path, *, check=False, action="rolled_out", look=LOOK):
    looks = [[{**look, "ok": action != "rolled_out"}]] * 2
    planned = rollout_plan(["h1", "h2"], looks, {}, [], action=action, deployment="tiny")
    plan = {**planned, "check": check, "report_dir": str(tmp_path / "reports")}
    for host in ("h1", "h2"):
        callback.v2_runner_on_ok(outcomes(host, look, check=True, state=action))
    callback.v2_runner_on_ok(result("h1", "ansible.builtin.set_fact", ansible_facts={"rollout_plan": plan}))


def end(callback, *, failures=(), dark=()):
    callback.v2_playbook_on_stats(SimpleNamespace(failures=dict.fromkeys(failures, 1), dark=dict.fromkeys(dark, 1)))


def test_another_playbook_gets_no_report(callback, shown):
    callback.v2_runner_on_ok(outcomes("h1", DONE))
    end(callback)
    assert shown == []


def test_a_rollout_that_is_done_is_told_and_written(callback, shown, tmp_path):
    begin(callback, tmp_path)
    pair = {"__rollout_pair": {"server": "h1:tiny"}}
    callback.v2_runner_on_ok(outcomes("h1", DONE))
    callback.v2_runner_on_ok(result("h1", "endpoint_gate", results=[{**pair, "passed": True, "msg": ""}]))
    verdict = {"ok": True, "text": "40 requests, 0 failed"}
    callback.v2_runner_on_ok(result("h1", "gateway_servers", results=[{**pair, "verdict": verdict}]))
    callback.v2_runner_on_ok(outcomes("h2", DONE))
    end(callback)
    assert "Rollout done: 2 changed" in shown[0]
    (path,) = (tmp_path / "reports").glob("*.json")
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [(row["host"], row["from"], row["to"]) for row in rows] == [("h1", "old", "new"), ("h2", "old", "new")]
    assert (rows[0]["gateway"], rows[0]["watched"]) == ("passed", "40 requests, 0 failed")
    assert path.with_suffix(".html").is_file()


def test_a_lost_host_and_those_behind_it_are_told(callback, shown, tmp_path):
    begin(callback, tmp_path)
    callback.v2_runner_on_unreachable(result("h1", "serving_rollout", msg="no route to host"))
    end(callback, dark=["h1"])
    assert "Rollout stopped: 1 lost, 1 not begun" in shown[0]


def test_the_last_word_of_a_host_is_why_it_stopped(callback, shown, tmp_path):
    begin(callback, tmp_path)
    callback.v2_runner_on_ok(outcomes("h1", {**DONE, "active": "old", "ok": False}))
    callback.v2_runner_on_failed(result("h1", "ansible.builtin.fail", msg="first"))
    callback.v2_runner_on_failed(result("h1", "gateway_servers", results=[{"failed": True, "msg": "too few engines"}]))
    end(callback, failures=["h1"])
    (path,) = (tmp_path / "reports").glob("*.json")
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [(row["state"], row["message"]) for row in rows] == [("back", "too few engines"), ("not begun", None)]


def test_a_restart_is_no_way_back(callback, shown, tmp_path):
    begin(callback, tmp_path, action="restarted", look={**LOOK, "wanted": "old"})
    for host in ("h1", "h2"):
        callback.v2_runner_on_ok(outcomes(host, {**DONE, "active": "old"}, state="restarted"))
    end(callback)
    assert "Restart done: 2 started" in shown[0]


def test_a_check_run_writes_nothing(callback, shown, tmp_path):
    begin(callback, tmp_path, check=True)
    end(callback)
    assert "Check run: 2 would change; nothing was changed" in shown[0]
    assert not (tmp_path / "reports").exists()


def test_what_was_refused_before_anything_began_writes_nothing(callback, shown, tmp_path):
    begin(callback, tmp_path)
    callback.v2_runner_on_failed(result("h1", "ansible.builtin.fail", msg="Another rollout is at work"))
    end(callback, failures=["h1"])
    assert "Rollout stopped: 2 not begun" in shown[0]
    assert not (tmp_path / "reports").exists()
