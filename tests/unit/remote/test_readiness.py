"""The wait for an engine: ready, dead at once, or given up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from metalserve.remote.readiness import Readiness, answers, run_command, wait_until_ready

UNIT = "vllm@tiny.service"
URL = "http://127.0.0.1:8000/health"
RUNNING = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "InvocationID": "1",
    "NRestarts": "0",
    "Result": "success",
    "ExecMainStatus": "0",
}
FAILED = {**RUNNING, "ActiveState": "failed", "SubState": "failed", "Result": "exit-code", "ExecMainStatus": "1"}
# What systemd says about a name that it has never heard.
UNKNOWN = {
    **RUNNING,
    "LoadState": "not-found",
    "ActiveState": "inactive",
    "SubState": "dead",
    "InvocationID": "",
}
JOURNAL = "RuntimeError: Engine core initialization failed.\nCUDA out of memory\n"


class Machine:
    """systemctl and journalctl with the given states, one a look; the last one stays."""

    def __init__(self, *states: dict[str, str]) -> None:
        self.states = list(states)
        self.looks = 0
        self.asked: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> str:
        self.asked.append(list(argv))
        if argv[0] == "journalctl":
            return JOURNAL
        state = self.states[min(self.looks, len(self.states) - 1)]
        self.looks += 1
        return "".join(f"{name}={value}\n" for name, value in state.items())


class Port:
    """A readiness route that gives these answers, the last one for ever."""

    def __init__(self, *replies: bool) -> None:
        self.replies = list(replies)
        self.asked = 0

    def __call__(self, url: str) -> bool:
        assert url == URL
        self.asked += 1
        return self.replies[min(self.asked, len(self.replies)) - 1]


def wait(machine: Machine, port: Callable[[str], bool], timeout_seconds: float = 5, lines: int = 40) -> Readiness:
    return wait_until_ready(
        UNIT, URL, timeout_seconds, run=machine, probe=port, pause_seconds=0.001, journal_lines=lines
    )


def test_an_engine_that_answers_is_ready():
    machine = Machine(RUNNING)
    outcome = wait(machine, Port(False, False, True))
    assert outcome.ready is True
    assert outcome.message == f"{UNIT} answers after 0 s"
    assert outcome.journal == ()
    assert 0 < outcome.seconds < 5
    assert [argv[0] for argv in machine.asked] == ["systemctl"] * 4


def test_a_failed_unit_ends_the_wait_at_once_with_its_journal():
    machine, port = Machine(RUNNING, FAILED), Port(False)
    outcome = wait(machine, port)
    assert outcome.ready is False
    assert outcome.message == f"{UNIT} died: result exit-code, exit status 1"
    assert outcome.journal == ("RuntimeError: Engine core initialization failed.", "CUDA out of memory")
    assert port.asked == 1


def test_the_journal_is_asked_for_this_unit_and_so_many_lines():
    machine = Machine(FAILED)
    wait(machine, Port(False), lines=7)
    assert machine.asked[-1][:5] == ["journalctl", "--unit", UNIT, "--lines", "600"]


def test_a_unit_that_ended_without_an_error_is_dead_too():
    outcome = wait(Machine({**RUNNING, "ActiveState": "inactive", "SubState": "dead"}), Port(False))
    assert outcome.message == f"{UNIT} died: result success, exit status 0"


@pytest.mark.parametrize("sub_state", ["auto-restart", "auto-restart-queued"])
def test_a_unit_that_waits_for_its_next_start_is_dead(sub_state):
    waiting = {**FAILED, "ActiveState": "activating", "SubState": sub_state}
    outcome = wait(Machine(RUNNING, waiting), Port(False))
    assert outcome.ready is False
    assert outcome.message == (f"{UNIT} died: result exit-code, exit status 1, systemd is about to start it again")


@pytest.mark.parametrize("change", [{"InvocationID": "2"}, {"NRestarts": "1"}], ids=["invocation", "restarts"])
def test_a_unit_that_was_started_again_between_two_looks(change):
    outcome = wait(Machine(RUNNING, {**RUNNING, **change}), Port(False))
    assert outcome.ready is False
    assert outcome.message == f"{UNIT} died: systemd has started it again (result success, exit status 0)"
    assert outcome.journal


def test_a_living_but_silent_unit_is_given_up():
    outcome = wait(Machine(RUNNING), Port(False), timeout_seconds=0.05)
    assert outcome.ready is False
    assert outcome.message == f"{UNIT} lives but {URL} does not answer after 0 s"
    assert outcome.seconds > 0.05
    assert outcome.journal


def test_a_restart_counter_from_before_the_wait_does_not_count():
    assert wait(Machine({**RUNNING, "NRestarts": "3"}), Port(False, True)).ready is True


@pytest.mark.parametrize("state", [UNKNOWN, {}], ids=["not found", "no answer"])
def test_a_unit_that_systemd_does_not_know(state):
    port = Port(True)
    outcome = wait(Machine(state), port)
    assert outcome.ready is False
    assert outcome.message == f"{UNIT} died: systemd does not know it"
    assert port.asked == 0


def test_somebody_else_on_the_port_of_a_dead_unit_is_not_the_engine():
    port = Port(True)
    outcome = wait(Machine(FAILED), port)
    assert outcome.ready is False
    assert port.asked == 0


def test_a_unit_that_dies_while_somebody_else_answers():
    outcome = wait(Machine(RUNNING, FAILED), Port(True))
    assert outcome.ready is False
    assert outcome.message == f"{UNIT} died: result exit-code, exit status 1"


def test_a_unit_that_is_started_again_while_somebody_else_answers():
    outcome = wait(Machine(RUNNING, {**RUNNING, "InvocationID": "2"}), Port(True))
    assert outcome.ready is False


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.close_connection = True
            if self.path == "/garbage":
                self.wfile.write(b"SSH-2.0-OpenSSH_9.2p1\r\n")
                return
            self.send_response(int(self.path.strip("/")))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = Thread(target=lambda: listening.serve_forever(poll_interval=0.02), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("route", "ready"), [("/200", True), ("/204", False), ("/404", False), ("/503", False), ("/garbage", False)]
)
def test_only_200_is_an_answer(server, route, ready):
    assert answers(server + route) is ready


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/health", "http://127.0.0.1:none/", "no url"])
def test_where_nothing_can_be_asked_nothing_answers(url):
    assert answers(url) is False


def test_the_output_of_a_command():
    assert run_command([sys.executable, "-c", "print('x'); raise SystemExit(3)"]) == "x\n"
    assert run_command(["no-such-command"]) == ""
