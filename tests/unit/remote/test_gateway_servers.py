"""Taking servers out of a gateway and back, with a played HAProxy behind a real socket."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from metalserve.remote.gateway_servers import Gateway, GatewayRefusalError, judge
from metalserve.remote.haproxy import Haproxy, HaproxyError, Server, first_byte_ms_between

HEADER = "# pxname,svname,scur,stot,status,econ,eresp,hrsp_5xx,rtime,type,"


class PlayedHaproxy(threading.Thread):
    """Answers on a runtime socket as HAProxy 2.6 does, for the servers of one pool."""

    def __init__(self, path, names):
        super().__init__(daemon=True)
        self.rows: dict[str, dict[str, Any]] = {
            name: {"status": "UP", "admin": 0, "running": 0, "requests": 0} for name in names
        }
        self.commands: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.start()

    def run(self):
        while True:
            connection, _ = self._listener.accept()
            with connection:
                connection.sendall(self.answer(connection.recv(1000).decode().strip()).encode())

    def answer(self, command):
        if command == "show stat":
            rows = [f"m,{n},{r['running']},{r['requests']},{r['status']},0,0,0,0,2," for n, r in self.rows.items()]
            return "\n".join([HEADER, "clients,FRONTEND,0,0,OPEN,,,,,0,", *rows, "m,BACKEND,0,0,UP,0,0,0,0,1,", "", ""])
        if command == "show servers state":
            return "1\n# be_id be_name ...\n" + "".join(
                f"3 m {number} {name} 10.0.0.1 2 {row['admin']} 1 1 5\n"
                for number, (name, row) in enumerate(self.rows.items())
            )
        self.commands.append(command)
        words = command.split()
        if words[0] == "shutdown":
            self.rows[words[-1].partition("/")[2]]["running"] = 0
        elif words[2].partition("/")[2] not in self.rows:
            return "No such server.\n"
        else:
            drain = words[-1] == "drain"
            self.rows[words[2].partition("/")[2]].update(admin=8 if drain else 0, status="DRAIN" if drain else "UP")
        return "\n"


@pytest.fixture
def played(tmp_path):
    return PlayedHaproxy(tmp_path / "s", ["h1:a", "h2:a", "h3:a"])


@pytest.fixture
def gateway(tmp_path, played):
    return Gateway(Haproxy(tmp_path / "s"), tmp_path / "state", None)


def drained_by(gateway):
    return {row["name"]: row["drained_by"] for row in gateway.look()}


def test_a_rollout_drains_and_puts_back(gateway, played):
    assert gateway.drain(["h1:a"], "rollout", {"m": 2})
    assert drained_by(gateway) == {"h1:a": "rollout", "h2:a": None, "h3:a": None}
    assert not gateway.drain(["h1:a"], "rollout", {"m": 2})
    assert gateway.undrain(["h1:a"], "rollout", 5)
    assert not gateway.undrain(["h1:a"], "rollout")
    assert played.commands == ["set server m/h1:a state drain", "set server m/h1:a state ready"]


def test_enough_stay_up(gateway, played):
    gateway.drain(["h1:a"], "rollout", {"m": 2})
    with pytest.raises(GatewayRefusalError, match="Without h2:a only 1 of 3 engines would serve m"):
        gateway.drain(["h2:a"], "rollout", {"m": 2})
    played.rows["h2:a"]["status"] = "DOWN"
    # It serves nobody: nothing is taken away.
    assert gateway.drain(["h2:a"], "rollout", {"m": 2})
    assert played.rows["h3:a"]["status"] == "UP"


def test_what_a_person_drained_is_not_put_back_by_a_rollout(gateway):
    gateway.drain(["h1:a"], "operator", {})
    assert not gateway.drain(["h1:a"], "rollout", {})
    assert not gateway.undrain(["h1:a"], "rollout")
    assert drained_by(gateway)["h1:a"] == "operator"
    assert gateway.undrain(["h1:a"], "operator")


def test_a_person_takes_a_drain_over_from_a_rollout(gateway):
    gateway.drain(["h1:a"], "rollout", {})
    assert gateway.drain(["h1:a"], "operator", {})
    assert drained_by(gateway)["h1:a"] == "operator"
    assert not gateway.undrain(["h1:a"], "rollout")


def test_a_check_run_changes_nothing(gateway, played, tmp_path):
    assert gateway.drain(["h1:a"], "rollout", {}, dry_run=True)
    assert played.commands == []
    assert not (tmp_path / "state").exists()


def test_a_killed_run_leaves_a_note_before_it_drains(gateway, played, tmp_path, monkeypatch):
    monkeypatch.setattr(Haproxy, "tell", lambda *_: (_ for _ in ()).throw(HaproxyError("killed")))
    with pytest.raises(HaproxyError):
        gateway.drain(["h1:a"], "rollout", {})
    assert json.loads((tmp_path / "state/drained.json").read_text()) == {"h1:a": "rollout"}
    # Not drained, so nobody is told that it is.
    assert drained_by(gateway)["h1:a"] is None


def test_requests_are_waited_for_and_named(gateway, played):
    played.rows["h1:a"]["running"] = 2
    assert gateway.wait_idle(["h1:a"], 0) == {"h1:a": 2}
    threading.Timer(0.3, lambda: played.rows["h1:a"].update(running=0)).start()
    assert gateway.wait_idle(["h1:a"], 10) == {}


def test_requests_are_ended_when_told(gateway, played):
    played.rows["h1:a"]["running"] = 2
    gateway.end_sessions(["h1:a", "h2:a"])
    assert played.commands == ["shutdown sessions server m/h1:a"]


def test_an_engine_that_the_gateway_does_not_reach_is_refused(gateway, played):
    played.rows["h1:a"]["status"] = "DOWN"
    with pytest.raises(GatewayRefusalError, match=r"does not find them well: m/h1:a DOWN.*serving_address"):
        gateway.wait_healthy(["h1:a"], 0)
    played.rows["h1:a"]["status"] = "DRAIN"
    gateway.wait_healthy(["h1:a"], 0)


def test_a_haproxy_that_is_not_there_is_named(tmp_path):
    with pytest.raises(HaproxyError, match=r"Change: run playbooks/gateway.yml"):
        Haproxy(tmp_path / "none").servers()


def test_a_command_that_haproxy_refuses_is_an_error(gateway, tmp_path):
    with pytest.raises(HaproxyError, match="No such server"):
        Haproxy(tmp_path / "s").tell(Server("m", "nobody", "UP", 0, 0, 0, 0, 0), "drain")


# ---- what was served ----


LIMITS = {"errors_percent": 1, "latency_factor": 3, "min_requests": 20}


def server(name, requests, errors=0, first_byte_ms=100):
    return Server("m", name, "UP", 0, 0, requests, errors, first_byte_ms)


def judged(mine, other, limits=LIMITS):
    before = [server("h1:a", 1000), server("h2:a", 1000)]
    return judge(["h1:a"], before, [mine, other], limits)


def test_served_as_before_is_well():
    verdict = judged(server("h1:a", 1050), server("h2:a", 1050))
    assert (verdict["ok"], verdict["requests"], verdict["errors"]) == (True, 50, 0)
    assert verdict["first_byte_ms"] == pytest.approx(100, abs=1)


def test_failed_requests_are_counted_from_the_first_moment():
    assert judged(server("h1:a", 1100, errors=1), server("h2:a", 1100))["ok"]
    verdict = judged(server("h1:a", 1100, errors=2), server("h2:a", 1100))
    assert not verdict["ok"]
    assert "100 requests, 2 failed" in verdict["text"]
    assert "more than 1 % of them failed" in verdict["text"]


def test_slow_answers_are_seen_behind_haproxys_long_average():
    # 50 requests of 1000 ms among 512 move the average from 100 to 184 ms.
    kept = (1 - 1 / 512) ** 50
    slow = round(100 * kept + 1000 * (1 - kept))
    verdict = judged(server("h1:a", 1050, first_byte_ms=slow), server("h2:a", 1050))
    assert verdict["first_byte_ms"] == pytest.approx(1000, abs=10)
    assert not verdict["ok"]
    assert "more than 3 times the 100 ms of the other engines" in verdict["text"]
    assert judged(server("h1:a", 1050, first_byte_ms=slow), server("h2:a", 1050), {**LIMITS, "latency_factor": 0})["ok"]


def test_few_requests_judge_no_time():
    verdict = judged(server("h1:a", 1010, first_byte_ms=500), server("h2:a", 1010))
    assert (verdict["ok"], verdict["first_byte_ms"]) == (True, None)


def test_counters_that_began_again_are_not_taken_for_news():
    assert judged(server("h1:a", 5, errors=3), server("h2:a", 5)) == {
        "ok": True,
        "requests": 0,
        "errors": 0,
        "first_byte_ms": None,
        "others_first_byte_ms": None,
        "text": "0 requests, 0 failed",
    }


def test_no_requests_have_no_mean():
    assert first_byte_ms_between(server("h1:a", 7), server("h1:a", 7)) is None
