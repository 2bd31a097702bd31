"""What is read off the events of a run, and how it is shown; the events are in the form of ansible-runner."""

from __future__ import annotations

import io
import json

import pytest

from metalserve.run_board import DONE, FAILED, RUNNING, UNREACHABLE, Board, HostLine, Notice
from metalserve.run_view import JsonView, LiveView, PlainView, choose


def event(name, host=None, stdout="", **data):
    return {"event": name, "stdout": stdout, "event_data": {**({"host": host} if host else {}), **data}}


def start(board, host="gpu-1", task="service | Bring the releases up", role="serving_unit", seconds=0.0):
    board.take(event("playbook_on_play_start", play="Roll out"), seconds)
    return board.take(event("runner_on_start", host, task=task, role=role), seconds)


def test_a_host_is_where_its_last_task_is():
    board = Board()
    start(board, seconds=7.0)
    assert board.hosts["gpu-1"] == HostLine("Roll out", "serving_unit: service | Bring the releases up", RUNNING, 7.0)


def test_a_batch_of_the_same_play_is_counted():
    board = Board()
    told = [board.take(event("playbook_on_play_start", play=play), 0)[0].text for play in ("A", "A", "A", "B")]
    assert told == ["A", "A, batch 2", "A, batch 3", "B"]


def test_weights_are_read_from_what_the_role_prints():
    board = Board()
    start(board)
    # Three places for the share, as progress_line writes it.
    line = "gpu-1: qwen3.6-35b-a3b-fp8@0123456789ab:  45 %, 16.2 GB of 36.0 GB, 1.1 GB/s, 18 s left"
    (notice,) = board.take(event("verbose", stdout=f"\x1b[0;34m{line}\x1b[0m\r\n"), 1)
    assert notice == Notice(
        "progress", line.removeprefix("gpu-1: ").replace(":  ", ": ").replace(": ", ": ", 1), "gpu-1", "Roll out"
    )
    assert board.hosts["gpu-1"].progress == "45 %, 16.2 GB of 36.0 GB, 1.1 GB/s, 18 s left"


def test_other_text_is_told_as_it_is():
    board = Board()
    start(board)
    text = "host   verdict\ngpu-1  ok\nnobody: model@0123: 5 %"
    assert board.take(event("verbose", stdout=text), 1) == [Notice("message", text, stage="Roll out")]
    assert board.take(event("verbose", stdout="  \n"), 1) == []


def test_the_gate_of_a_rollout_is_on_the_host_s_line():
    board = Board()
    start(board)
    outcomes = [{"deployment": "chat", "ok": True}, {"deployment": "code", "ok": False}]
    told = board.take(
        event("runner_on_ok", "gpu-1", res={"changed": True, "outcomes": outcomes}, task="t", role="r"), 1
    )
    assert [(notice.kind, notice.text) for notice in told] == [
        ("gate", "chat passed"),
        ("gate", "code refused"),
        ("changed", "r: t"),
    ]
    assert board.hosts["gpu-1"].gate == "code refused"


def test_the_gate_of_verify_comes_an_endpoint_each():
    board = Board()
    start(board)
    result = {"passed": True, "table": ["..."], "__endpoint_gate_item": {"name": "qwen"}}
    (notice,) = board.take(event("runner_item_on_ok", "gpu-1", res=result), 1)
    assert (notice.kind, notice.text) == ("gate", "qwen passed")


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"msg": "Found this. Needed: that."}, "r: t: Found this. Needed: that."),
        (
            {"results": [{"failed": True, "msg": "one"}, {"msg": "fine"}, {"failed": True, "msg": "two"}]},
            "r: t: one\ntwo",
        ),
        ({"censored": "the output has been hidden"}, "r: t: the output has been hidden"),
        ({}, "r: t: no reason was given"),
    ],
)
def test_a_failure_says_why(result, words):
    board = Board()
    start(board)
    (notice,) = board.take(event("runner_on_failed", "gpu-1", res=result, task="t", role="r"), 1)
    assert (notice.kind, notice.text) == ("failed", words)
    assert board.hosts["gpu-1"].state == FAILED


def test_an_ignored_failure_is_none():
    board = Board()
    start(board)
    assert board.take(event("runner_on_failed", "gpu-1", res={"msg": "x"}, ignore_errors=True), 1) == []
    assert board.hosts["gpu-1"].state == RUNNING


def test_the_end_counts_what_ansible_counts():
    board = Board()
    start(board, "gpu-1")
    start(board, "gpu-2")
    board.take(event("runner_on_unreachable", "gpu-2", res={"msg": "no route"}), 1)
    stats = {"processed": {"gpu-1": 1, "gpu-2": 1}, "ok": {"gpu-1": 4}, "changed": {"gpu-1": 2}, "dark": {"gpu-2": 1}}
    told = board.take(event("playbook_on_stats", **stats), 9)
    assert [notice.text for notice in told] == ["done: 4 ok, 2 changed", "unreachable: 0 ok, 0 changed"]
    assert [line.state for line in board.hosts.values()] == [DONE, UNREACHABLE]


def test_a_rescued_failure_is_forgotten_when_the_host_goes_on():
    board = Board()
    start(board)
    board.take(event("runner_on_failed", "gpu-1", res={"msg": "x"}), 1)
    start(board, task="rescue")
    assert board.hosts["gpu-1"].state == RUNNING


def test_ansible_s_own_task_of_each_role_is_not_told():
    board = Board()
    name = "Validating arguments against arg spec 'main' - Something"
    assert board.take(event("playbook_on_task_start", task=name, role="preflight"), 0) == []
    assert board.take(event("playbook_on_task_start", task="Judge", role="preflight"), 0)


# ---- views ----


def test_lines_are_plain_text():
    out = io.StringIO()
    with PlainView(out) as view:
        view.show(
            Board(),
            [Notice("stage", "Stage"), Notice("failed", "a\nb", "gpu-1"), Notice("gate", "q passed", "h")],
            3661,
        )
    assert out.getvalue() == "01:01:01 == Stage\n01:01:01 gpu-1: FAILED: a\n         b\n01:01:01 h: gate: q passed\n"


def test_json_is_an_object_a_line():
    out = io.StringIO()
    with JsonView(out) as view:
        view.show(Board(), [Notice("failed", "a\nb", "gpu-1", "Stage"), Notice("end", "done")], 1.26)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"seconds": 1.3, "kind": "failed", "text": "a\nb", "host": "gpu-1", "stage": "Stage"},
        {"seconds": 1.3, "kind": "end", "text": "done"},
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def live(board, notices, lines="20", monkeypatch=None):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("LINES", lines)
    monkeypatch.setenv("TERM", "dumb")
    out, now = Terminal(), [100.0]
    with LiveView(out, lambda: now[0]) as view:
        view.show(board, notices, 61)
        # No event, and the table goes on all the same.
        now[0] += 1
    return out.getvalue()


def test_the_table_has_a_row_a_host(monkeypatch):
    board = Board()
    start(board, seconds=60.0)
    board.hosts["gpu-1"].progress = "45 %, 16.2 GB of 36.0 GB"
    shown = live(board, [Notice("message", "[red]as it is[/red]"), Notice("step", "quiet")], monkeypatch=monkeypatch)
    assert "[red]as it is[/red]" in shown
    assert "quiet" not in shown
    row = next(line for line in shown.splitlines() if line.startswith("gpu-1"))
    cells = [cell for cell in row.split("  ") if cell.strip()]
    step = "serving_unit: service | Bring the releases up"
    assert [cell.strip() for cell in cells] == [
        "gpu-1",
        "running",
        "Roll out",
        step,
        "00:00:02",
        "45 %, 16.2 GB of 36.0 GB",
    ]


def test_failed_hosts_stand_first_and_a_small_terminal_says_how_many_are_left_out(monkeypatch):
    board = Board()
    for number in range(30):
        start(board, f"gpu-{number:02d}")
    board.hosts["gpu-29"].state = FAILED
    shown = live(board, [], "12", monkeypatch)
    rows = [line.split()[0] for line in shown.splitlines() if line.startswith("gpu-")]
    assert rows[:2] == ["gpu-29", "gpu-00"]
    assert "and 24 more" in shown


def test_the_view_follows_the_output(monkeypatch):
    assert type(choose(io.StringIO(), as_json=False, plain=False)) is PlainView
    assert type(choose(Terminal(), as_json=False, plain=True)) is PlainView
    assert type(choose(Terminal(), as_json=False, plain=False)) is LiveView
    assert type(choose(Terminal(), as_json=True, plain=False)) is JsonView


def test_without_rich_there_are_lines_and_a_word(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    out = Terminal()
    assert type(choose(out, as_json=False, plain=False)) is PlainView
    assert "pip install 'metalserve[run]'" in out.getvalue()
