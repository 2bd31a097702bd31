"""The playbooks rollback, restart and retire over a played fleet: what is asked of whom, in which order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
HOSTS = ("h1", "h2", "h3")


class Fleet:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = {
            "hosts": {name: {"current": "bbbb", "previous": "aaaa"} for name in HOSTS},
            "gateways": {name: {"drained": {}} for name in ("g1", "g2")},
            "asked": [],
        }
        deployment = {"name": "tiny", "engine": "vllm", "model": "qwen3-0.6b", "port": 8000, "served_names": ["m"]}
        simulated = {
            "ansible_connection": "simulated",
            "ansible_python_interpreter": sys.executable,
            "simulated_answers": str(ROOT / "tests/unit/rollout/played_fleet.py"),
            "simulated_home": str(folder / "home"),
        }
        groups = {
            "serving_hosts": {"hosts": dict.fromkeys(HOSTS), "vars": {"serving_deployments": [deployment]}},
            "gateways": {"hosts": {"g1": None, "g2": None}},
        }
        (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": groups, "vars": simulated}}))

    def run(self, playbook: str, *options: str, **variables: object) -> str:
        """The output with single blanks; `self.asked` has what was asked, `self.rc` how it ended."""
        (self.folder / "state.json").write_text(json.dumps(self.state))
        given = {"serving_deployment": "tiny", "rollout_report_dir": str(self.folder / "reports"), **variables}
        done = subprocess.run(
            [
                str(Path(sys.executable).with_name("ansible-playbook")),
                str(ROOT / "playbooks/ops" / f"{playbook}.yml"),
                f"--inventory={self.folder / 'hosts.yml'}",
                f"--extra-vars={json.dumps(given)}",
                *options,
            ],
            env={
                **os.environ,
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_CONNECTION_PLUGINS": str(ROOT / "lab/simulated/connection"),
                "ANSIBLE_LOCAL_TEMP": str(self.folder / "local"),
                "ANSIBLE_NOCOLOR": "1",
                "PLAYED_FLEET": str(self.folder / "state.json"),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        self.rc = done.returncode
        self.state = json.loads((self.folder / "state.json").read_text())
        self.asked, self.state["asked"] = self.state["asked"], []
        return " ".join((done.stdout + done.stderr).replace("''", "'").split())

    def drained(self) -> dict[str, list[str]]:
        return {name: sorted(gateway["drained"]) for name, gateway in self.state["gateways"].items()}

    def of(self, host: str) -> list[str]:
        """What was asked for the sake of one host once the plan was made."""
        begin = self.asked.index("rollout_lock g2 held") + 1
        words = (f" {host}", f" {host}:tiny")
        return [each for each in self.asked[begin:] if any(f"{each} ".find(f"{word} ") >= 0 for word in words)]


@pytest.fixture
def fleet(tmp_path):
    return Fleet(tmp_path)


def through(host: str, action: str) -> list[str]:
    """What a host is taken through; the gate is asked of the gateways in its name."""
    server = f"{host}:tiny"
    both = [(f"gateway_servers {gateway} {{}} {server}") for gateway in ("g1", "g2")]
    return [
        *(each.format("drained") for each in both),
        *(each.format("idle") for each in both),
        f"serving_rollout {host} {action}",
        *(each.format("healthy") for each in both),
        *(each.format("undrained") for each in both),
        *(each.format("watched") for each in both),
    ]


def test_a_restart_takes_one_host_after_another_through_drain_and_proof(fleet):
    output = fleet.run("restart")
    assert fleet.rc == 0, output
    for host in HOSTS:
        assert fleet.of(host) == through(host, "restarted")
    order = [each for each in fleet.asked if each.startswith("serving_rollout") and not each.endswith("check")]
    assert order == [f"serving_rollout {host} restarted" for host in HOSTS]
    assert fleet.asked.count("endpoint_gate g1") == fleet.asked.count("endpoint_gate g2") == 3
    assert fleet.asked[-2:] == ["rollout_lock g1 released", "rollout_lock g2 released"]
    assert "Restart done: 3 started" in output
    assert fleet.drained() == {"g1": [], "g2": []}


def test_a_rollback_goes_the_same_way(fleet):
    output = fleet.run("rollback", "--limit=h2")
    assert fleet.rc == 0, output
    assert fleet.of("h2") == through("h2", "rolled_back")
    assert "1. h2: tiny bbbb -> aaaa" in output
    assert {name: host["current"] for name, host in fleet.state["hosts"].items()} == {
        "h1": "bbbb", "h2": "aaaa", "h3": "bbbb",
    }  # fmt: skip


def test_what_a_rollout_took_up_is_taken_back_the_same_way_and_nowhere_else(fleet):
    output = fleet.run("take_back", serving_taken_up={"h2": {"tiny": "aaaa"}, "gone": {"tiny": "cccc"}})
    assert fleet.rc == 0, output
    assert fleet.of("h2") == through("h2", "taken_back")
    assert fleet.of("h1") == fleet.of("h3") == []
    assert "1. h2: tiny bbbb -> aaaa" in output
    assert "Taking back done: 1 changed" in output
    assert {name: host["current"] for name, host in fleet.state["hosts"].items()} == {
        "h1": "bbbb", "h2": "aaaa", "h3": "bbbb",
    }  # fmt: skip
    assert fleet.drained() == {"g1": [], "g2": []}


def test_where_a_rollout_took_nothing_up_nothing_is_done(fleet):
    output = fleet.run("take_back", serving_taken_up={"gone": {"tiny": "cccc"}})
    assert fleet.rc == 0, output
    assert "The rollout took nothing up on these hosts." in output
    looks = [f"serving_rollout {host} taken_back check" for host in HOSTS]
    assert sorted(fleet.asked) == ["gateway_servers g1 looked", "gateway_servers g2 looked", *looks]
    assert {host["current"] for host in fleet.state["hosts"].values()} == {"bbbb"}


def test_what_is_retired_stays_out(fleet):
    output = fleet.run("retire", "--limit=h1")
    assert fleet.rc == 0, output
    assert fleet.of("h1") == through("h1", "retired")[:5]
    assert "Retirement done: 1 stopped" in output
    assert fleet.drained() == {"g1": ["h1:tiny"], "g2": ["h1:tiny"]}


def test_what_left_the_inventory_is_retired_everywhere(fleet):
    output = fleet.run("retire", serving_deployments=[])
    assert fleet.rc == 0, output
    assert "Retirement done: 3 stopped" in output


def test_what_is_still_in_the_inventory_is_not_retired_everywhere(fleet):
    output = fleet.run("retire")
    assert fleet.rc != 0
    assert "without h1:tiny, h2:tiny, h3:tiny, which would go, 0 would be left. Needed: 1" in output
    assert [each for each in fleet.asked if "looked" not in each and not each.endswith("check")] == []


def test_too_few_that_serve_are_refused_before_anything_is_touched(fleet):
    fleet.state["gateways"]["g1"]["drained"] = {"h2:tiny": "operator", "h3:tiny": "operator"}
    output = fleet.run("restart", "--limit=h1")
    assert fleet.rc != 0
    assert "without h1:tiny, which changes, 0 would be left. Needed: 1 that serve at any time" in output
    assert [each for each in fleet.asked if "looked" not in each and not each.endswith("check")] == []


def test_no_deployment_is_refused_by_name(fleet):
    output = fleet.run("restart", serving_deployment="")
    assert fleet.rc != 0
    assert "No deployment was named. Needed: one of those" in output
    assert fleet.asked == []


@pytest.mark.parametrize(("choice", "ends"), [("abort", False), ("force", True)])
def test_requests_that_do_not_end_are_waited_for_or_ended(fleet, choice, ends):
    fleet.state["gateways"]["g2"]["busy"] = True
    output = fleet.run("restart", "--limit=h1", rollout_drain_on_timeout=choice, rollout_drain_seconds=0)
    assert (fleet.rc == 0) == ends, output
    assert ("serving_rollout h1 restarted" in fleet.asked) == ends
    assert ("requests still run on h1:tiny. Nothing was changed there" in output) != ends
    assert fleet.drained() == {"g1": [], "g2": []}


def test_a_host_that_fails_stays_out_and_the_next_run_heals_it(fleet):
    fleet.state["hosts"]["h2"]["fails"] = True
    output = fleet.run("restart")
    assert fleet.rc != 0
    assert "tiny: the engine is dead" in output
    assert "Restart stopped: 1 started, 1 failed, 1 not begun" in output
    assert fleet.drained() == {"g1": ["h2:tiny"], "g2": ["h2:tiny"]}
    assert fleet.asked[-2:] == ["rollout_lock g1 released", "rollout_lock g2 released"]
    fleet.state["hosts"]["h2"]["fails"] = False
    output = fleet.run("restart")
    assert fleet.rc == 0, output
    # What is out already comes first.
    order = [each for each in fleet.asked if each.startswith("serving_rollout") and not each.endswith("check")]
    assert order[0] == "serving_rollout h2 restarted"
    assert fleet.drained() == {"g1": [], "g2": []}


# ---- a gateway that is lost is not the host's loss ----


@pytest.mark.parametrize("moment", ["drained", "healthy"])
def test_a_gateway_that_is_lost_on_the_way_is_told_by_its_name(fleet, moment):
    fleet.state["gateways"]["g2"]["lost_at"] = f"gateway_servers {moment}"
    output = fleet.run("restart")
    assert fleet.rc != 0
    assert "The gateway g2 could not be reached: no route to host. h1 itself is not lost. Needed: " in output
    assert "Restart stopped: 1 gateway lost, 2 not begun. The gateway g2 could not be reached" in output
    assert "unreachable=1" not in output
    # The other gateway has the host back, and nobody holds its lock.
    assert fleet.drained()["g1"] == []
    assert fleet.asked[-2:] == ["rollout_lock g1 released", "rollout_lock g2 released"]
    assert [each for each in fleet.asked if each.startswith("serving_rollout h2") and not each.endswith("check")] == []


def test_a_gateway_that_is_lost_at_the_beginning_is_told_before_anything_is_touched(fleet):
    fleet.state["gateways"]["g1"]["lost"] = True
    output = fleet.run("restart")
    assert fleet.rc != 0
    assert "The gateway g1 could not be reached: no route to host. h1 itself is not lost." in output
    assert [each for each in fleet.asked if "looked" not in each and not each.endswith("check")] == []


def test_a_gateway_that_is_lost_while_it_is_asked_refuses_no_release(fleet):
    fleet.state["gateways"]["g2"]["lost_at"] = "endpoint_gate None"
    output = fleet.run("restart", "--limit=h1")
    assert fleet.rc != 0
    assert "Restart stopped: 1 gateway lost. The gateway g2 could not be reached" in output
    assert fleet.drained()["g1"] == []


def test_a_lost_host_is_the_host_s_loss(fleet):
    fleet.state["hosts"]["h1"]["lost_at"] = "serving_rollout restarted"
    output = fleet.run("restart")
    assert fleet.rc != 0
    assert "The host could not be reached any more while its engines were at work: no route to host" in output
    assert "The gateway" not in output
    assert fleet.drained() == {"g1": ["h1:tiny"], "g2": ["h1:tiny"]}
