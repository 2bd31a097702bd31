"""The load test against a server of known capacity, and what is made of its steps."""

import asyncio
import json
import resource
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from stand_in import StandIn

from metalserve import load_command
from metalserve.cli import main
from metalserve.errors import Refusal
from metalserve.load import client, ladder
from metalserve.load.ladder import Answer


def climb(server, steps, seconds, **settings):
    async def run():
        async with server.running() as url:
            return await client.climb(client.Target(url, "m", limit_seconds=20, **settings), steps, seconds)

    return asyncio.run(run())


# ---- against a server ----


@pytest.mark.parametrize("slots", [2, 4])
def test_queueing_starts_where_the_server_has_no_place_left(slots):
    steps = climb(StandIn(slots), [1, 2, 4, 8, 16], 0.8)
    assert ladder.knee(steps) == slots
    assert [each["errors"] for each in steps] == [{}] * 5
    by_size = {each["concurrency"]: each for each in steps}
    # Whoever waits for a place of so many waits for the others' answers first: an answer takes 40 ms.
    assert by_size[16]["ttft_ms"]["median"] > 40 * (16 / slots - 1)
    assert by_size[1]["itl_ms"]["median"] >= 5


def test_a_ladder_that_ends_too_early_sees_no_queueing():
    steps = climb(StandIn(64), [1, 4], 0.5)
    assert ladder.knee(steps) is None
    assert ladder.judged(steps)[0].startswith("No queueing seen up to 4 at a time")


def test_who_is_turned_away_is_counted_by_status():
    steps = climb(StandIn(1, turn_away=True), [1, 6], 0.6)
    assert steps[0]["errors"] == {}
    assert set(steps[1]["errors"]) == {"429"}
    assert ladder.knee(steps) is None
    assert "From 6 at a time on requests fail" in " ".join(ladder.judged(steps))


def test_tokens_are_the_servers_own_count_and_else_the_pieces():
    (step,) = climb(StandIn(usage=80), [1], 0.5)
    (plain,) = climb(StandIn(), [1], 0.5)
    assert step["tokens_per_second"] / step["answers_per_second"] == pytest.approx(80, rel=0.3)
    assert plain["tokens_per_second"] / plain["answers_per_second"] == pytest.approx(8, rel=0.3)


def test_a_thousand_connections_are_held_at_once():
    server = StandIn(2000, tokens=2, token_seconds=1.5)
    client.allow_connections(1000)
    (step,) = climb(server, [1000], 2.0)
    assert server.most_open == 1000
    assert step["errors"] == {}


def test_no_two_prompts_are_the_same_and_the_key_is_sent():
    server = StandIn()
    climb(server, [2], 0.3, api_key="sk-1", prompt_words=5, answer_tokens=7)
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(prompts)) == len(prompts) > 3
    assert set(server.keys) == {"Bearer sk-1"}
    assert all(body["max_tokens"] == 7 and body["ignore_eos"] is True for body in server.bodies)
    climb(server, [1], 0.1, ignore_eos=False)
    assert "ignore_eos" not in server.bodies[-1]


@pytest.mark.parametrize(
    ("server", "words"),
    [(StandIn(status=401), "401 not today"), (StandIn(fail_after=1), "engine died"), (StandIn(tokens=0), "empty")],
)
def test_a_server_that_does_not_stream_is_refused_before_the_ladder(server, words):
    with pytest.raises(Refusal, match=f"gives no streamed answer to a first request: .*{words}.* Change: the URL"):
        climb(server, [1], 0.2)
    assert len(server.bodies) == 1


def test_a_request_without_an_end_is_a_timeout():
    async def run():
        async with StandIn(tokens=50, token_seconds=0.1).running() as url:
            target = client.Target(url, "m", limit_seconds=0.3)
            return await client.climb(target, [1], 0.2)

    with pytest.raises(Refusal, match="first request: timeout"):
        asyncio.run(run())


# ---- numbers of a step ----


def test_times_are_of_what_was_sent_in_the_step_and_throughput_of_what_arrived_in_it():
    answers = [
        Answer(0.5, "200", (1.0, 1.5, 2.5), 6),  # sent before it counts: two of its tokens a piece
        Answer(1.0, "200", (1.2, 1.4, 9.0), 3),  # its end is waited for
        Answer(1.5, "500"),
        Answer(3.5, "200", (4.0,), 1),
    ]
    step = ladder.step(2, answers, 1.0, 3.0)
    assert (step["requests"], step["answered"], step["errors"]) == (2, 1, {"500": 1})
    assert step["ttft_ms"] == {"median": 200.0, "p95": 200.0}
    assert step["itl_ms"]["median"] == 3900.0
    assert step["tokens_per_second"] == (6 + 2) / 2
    assert step["answers_per_second"] == 0.5


def seen(*steps):
    return [
        {
            "concurrency": concurrency,
            "tokens_per_second": tokens,
            "ttft_ms": None if ttft is None else {"median": ttft, "p95": ttft},
            "errors": {},
            "requests": 9,
            "client_late_ms": 0.0,
        }
        for concurrency, tokens, ttft in steps
    ]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(1, 100, 10), (2, 200, 10), (4, 205, 30), (8, 204, 70)], 2),
        # A batch that grows: later first tokens, and still more throughput.
        ([(1, 100, 10), (2, 150, 20), (4, 220, 40), (8, 300, 80)], None),
        # No more throughput, but nobody waits: what limits is the client, or the ladder of a rate limiter.
        ([(1, 100, 10), (2, 101, 10), (4, 99, 11)], None),
        # A dip that a later step makes good is noise.
        ([(1, 100, 10), (2, 100, 15), (4, 300, 16), (8, 290, 60)], 4),
        # Past its best a server may give less.
        ([(1, 100, 10), (2, 180, 11), (4, 90, 300)], 2),
        ([(1, 100, 10), (2, 190, 10), (4, 0, None)], None),
        ([(1, 100, 10)], None),
    ],
)
def test_the_rule_for_where_queueing_starts(steps, expected):
    assert ladder.knee(seen(*steps)) == expected


def test_a_step_that_is_too_short_for_its_answers_is_said():
    steps = climb(StandIn(1, tokens=4, token_seconds=0.1), [1, 3], 0.4)
    assert [each["requests"] for each in steps] == [0, 0]
    assert "At 1 at a time nobody had an answer in time to ask again" in ladder.judged(steps)[1]


def test_a_client_that_is_itself_late_is_said():
    steps = seen((1, 100, 10), (2, 200, 10))
    steps[1]["client_late_ms"] = 80.0
    assert "From 2 at a time on this client was itself late by 80.0 ms" in ladder.judged(steps)[1]


# ---- the command ----


def result():
    path = Path(__file__).resolve().parents[1] / "fixtures/pages/load.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_command_measures_and_shows(tmp_path, capsys):
    page = tmp_path / "load.html"

    async def run():
        async with StandIn(2).running() as url:
            words = ["load", url, "--ladder", "1,2", "--seconds", "0.3", "--page", str(page)]
            first = await asyncio.to_thread(main, words)
            return first, capsys.readouterr(), await asyncio.to_thread(main, [*words, "--json"]), url

    first, shown, second, url = asyncio.run(run())
    assert (first, second) == (0, 0)
    lines = shown.out.splitlines()
    assert lines[0].startswith(f"m at {url}, 20")
    assert lines[1].split()[:3] == ["at", "a", "time"]
    assert [line.split()[0] for line in lines[2:4]] == ["1", "2"]
    assert shown.err.startswith("1 at a time: ")
    found = json.loads(capsys.readouterr().out)
    assert [each["concurrency"] for each in found["steps"]] == [1, 2]
    assert page.read_text(encoding="utf-8") == ladder.page(found)


def test_a_step_without_an_answer_is_another_exit_status(monkeypatch, capsys):
    async def nothing(_client, _options, _steps, _key):
        return {**result(), "steps": [{**result()["steps"][0], "answered": 0}]}

    monkeypatch.setattr(load_command, "_measure", nothing)
    assert main(["load", "http://h:1", "--ladder", "1"]) == load_command.EXIT_NO_ANSWER


def test_the_page_has_a_bar_for_each_step_and_measure():
    recorded = result()
    text = ladder.page(recorded)
    assert text.count('<rect class="n0" x=') == 4 * len(recorded["steps"])
    assert recorded["judged"][0].replace("&", "&amp;") in text
    assert "src=" not in text


@pytest.mark.parametrize("text", ["", "0,1", "1,x", "4,2", "2,2", "1,,2"])
def test_a_ladder_that_does_not_rise_is_refused(text, capsys):
    assert main(["load", "http://h:1", "--ladder", text]) == 2
    assert f"the ladder {text!r}. Needed: rising whole numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ftp://h"], "is not of the form http://host:port"),
        (["http+unix://%2Frun%2Fx"], "is a Unix socket. Needed: a base URL of http or https"),
        (["http://h:1", "--seconds", "0"], "0.0. Needed: more than 0. Change: --seconds"),
        (["http://h:1", "--api-key-file", "/nowhere"], "cannot be read"),
        (["http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models lists no model"),
        (["http://127.0.0.1:9", "--model", "m"], "to a first request: broken ClientConnectorError"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, said, capsys):
    assert main(["load", *words]) == 2
    assert said in capsys.readouterr().err


def test_too_many_connections_for_this_machine_are_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1000))
    with pytest.raises(Refusal, match=r"a limit of 1000 open files. Needed: 2064 for 2000 connections"):
        client.allow_connections(2000)
    raised = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: raised.append(limits))
    client.allow_connections(500)
    assert raised == [(564, 1000)]


def test_without_its_client_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "metalserve.load.client", None)
    monkeypatch.delattr("metalserve.load.client", raising=False)
    assert main(["load", "http://h:1"]) == 2
    assert "pip install 'metalserve[load]'" in capsys.readouterr().err
