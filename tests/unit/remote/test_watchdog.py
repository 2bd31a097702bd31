"""An engine that lives but produces nothing is found, started again within a budget, and then left to a person."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from metalserve.remote.host_lock import host_lock
from metalserve.remote.releases import activate_release, stage_release
from metalserve.remote.watchdog import QUESTION, Questions, Sample, Settings, Watchdog, parse_sample

UNIT = "vllm@tiny.service"
# vLLM 0.32.0, shortened.
VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}
vllm:prompt_tokens_total{{engine="0",model_name="m"}} 1200.0
vllm:prompt_tokens_created{{engine="0",model_name="m"}} 1.7e+09
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
vllm:iteration_tokens_total_sum{{engine="0",model_name="m"}} 0.0
"""


class Engine:
    """One deployment and a clock; `look` goes on by a number of seconds."""

    def __init__(self, root, *, alone=True, weights_bytes=0, **settings):
        endpoint = {"unit": UNIT, "engine": "vllm", "url": "http://h", "metrics_route": "/metrics", "model": "m"}
        endpoint.update({"answers_alone": alone, "weights_bytes": weights_bytes})
        stage_release(root, "tiny", "a" * 12, {"endpoint.json": json.dumps(endpoint)}, dry_run=False)
        activate_release(root, "tiny", "a" * 12, dry_run=False)
        self.root, self.now, self.life = root, 0.0, "1"
        self.running, self.waiting, self.tokens, self.silent = 0, 0, 0, False
        self.said, self.restarted, self.asked, self.hangs = [], [], [], False
        self.watchdog = Watchdog(
            root,
            Settings(stall_seconds=60, **settings),
            say=self.said.append,
            life_of=lambda unit: self.life if unit == UNIT else "",
            metrics_of=self.metrics,
            restart=self.restarted.append,
            questions=self,
        )

    def is_open(self, life):
        return self.hangs and life in self.asked

    def ask(self, life, endpoint):
        assert endpoint["model"] == "m"
        self.asked.append(life)
        if not self.hangs:
            self.tokens += 2

    def metrics(self, url):
        assert url == "http://h/metrics"
        if self.silent:
            raise OSError("connection refused")
        return VLLM.format(running=self.running, waiting=self.waiting, tokens=self.tokens)

    def look(self, seconds=0.0):
        self.now += seconds
        self.watchdog.look(self.now)

    def stall(self):
        """Long enough for one restart, if there is budget."""
        self.running = 3
        self.look(1)
        self.look(1)
        self.look(61)


@pytest.fixture
def engine(tmp_path):
    return Engine(tmp_path)


def test_the_samples_of_both_engines():
    assert parse_sample("vllm", VLLM.format(running=2, waiting=1.0, tokens=34)) == Sample(1234, 3)
    sglang = (
        'sglang:num_running_reqs{m="x"} 1\nsglang:num_queue_reqs{m="x"} 4\nsglang:generation_tokens_total{m="x"} 7\n'
    )
    assert parse_sample("sglang", sglang) == Sample(7, 5)
    assert parse_sample("vllm", sglang) is None
    two = 'vllm:generation_tokens_total{engine="0"} 1\nvllm:generation_tokens_total{engine="1"} 2\n'
    assert parse_sample("vllm", two) == Sample(3, 0)


def test_tokens_that_stand_still_while_requests_wait_mean_a_restart(engine):
    engine.running, engine.waiting = 2, 5
    engine.look()
    engine.look(10)
    engine.look(59)
    assert engine.restarted == []
    engine.look(1)
    assert engine.restarted == [UNIT]
    assert engine.said == [f"tiny: 7 request(s) wait and no token was made for 60 s. {UNIT} is started again."]


def test_an_engine_that_works_or_has_nothing_to_do_is_left_alone(engine):
    for _ in range(20):
        engine.running, engine.tokens = 2, engine.tokens + 1
        engine.look(30)
    engine.running = 0
    for _ in range(20):
        engine.look(30)
    assert (engine.restarted, engine.said) == ([], [])


def test_an_idle_engine_is_asked_for_a_token_now_and_then(engine):
    for _ in range(60):
        engine.look(10)
    assert (engine.restarted, engine.said) == ([], [])
    # 600 s: once in the 60 s after the last token, seen at the next look.
    assert 8 <= len(engine.asked) <= 10


def test_an_engine_that_hung_while_idle_is_found_by_its_silence(engine):
    """vLLM's core counts requests: when it hangs with none, the gauges stay at 0 whatever comes."""
    engine.look()
    engine.hangs = True
    for _ in range(13):
        engine.look(10)
    assert engine.restarted == [UNIT]
    assert engine.said == [f"tiny: 1 request(s) wait and no token was made for 60 s. {UNIT} is started again."]


def test_a_question_that_is_refused_is_not_repeated_at_every_look(engine):
    engine.ask = lambda life, endpoint: engine.asked.append(life)
    for _ in range(60):
        engine.look(10)
    assert 8 <= len(engine.asked) <= 10
    assert engine.restarted == []


def test_half_of_a_pair_is_not_asked(tmp_path):
    engine = Engine(tmp_path, alone=False)
    for _ in range(60):
        engine.look(10)
    assert engine.asked == []


def test_the_question_is_one_token_with_the_key_and_ends_at_its_deadline(tmp_path):
    (tmp_path / "key").write_text("sk-1\n")
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.path, self.headers["Authorization"], json.loads(body)))
            answered.wait(10)

        def log_message(self, *_):
            pass

    answered = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = {
            "url": f"http://127.0.0.1:{server.server_port}",
            "model": "m",
            "api_key_file": str(tmp_path / "key"),
        }
        questions = Questions(1.0)
        questions.ask("life", endpoint)
        questions.ask("life", endpoint)
        assert questions.is_open("life")
        assert not questions.is_open("other")
        deadline = time.monotonic() + 30
        while questions.is_open("life"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        answered.set()
        server.shutdown()
    assert seen == [("/v1/completions", "Bearer sk-1", {"model": "m", "prompt": QUESTION, "max_tokens": 1})]
    # More than one token with any tokenizer: one alone kills an engine (see QUESTION).
    assert len(QUESTION.split()) > 1


def test_a_pause_shorter_than_the_limit_starts_the_clock_anew(engine):
    engine.running = 1
    for _ in range(5):
        engine.look(1)
        engine.look(50)
        engine.tokens += 1
        engine.look(1)
    assert engine.restarted == []


def test_an_engine_that_loads_has_the_time_of_a_start(tmp_path):
    """SGLang was seen to hang before its worker reported: its unit runs, and no port ever opens."""
    engine = Engine(tmp_path, ready_timeout_seconds=600, slowest_read_bytes_per_second=1e6, weights_bytes=60_000_000)
    engine.silent = True
    for _ in range(12):
        engine.look(60)
    assert engine.restarted == [UNIT]
    assert engine.said == [f"tiny: it has not become ready for 660 s. {UNIT} is started again."]


def test_metrics_that_fall_silent_mean_a_restart(engine):
    engine.look()
    engine.silent = True
    engine.look(10)
    engine.look(60)
    assert engine.restarted == [UNIT]
    assert "its metrics do not answer for 60 s" in engine.said[0]


def test_a_new_life_of_the_unit_starts_the_clock_anew(engine):
    engine.running = 1
    engine.look()
    engine.look(50)
    engine.life = "2"
    engine.silent = True
    engine.look(50)
    assert engine.restarted == []


def test_a_unit_that_does_not_run_is_none_of_its_matter(engine):
    engine.life = ""
    engine.stall()
    assert engine.restarted == []


def test_the_budget_ends_and_is_told_once(engine):
    for _ in range(4):
        engine.stall()
    assert engine.restarted == [UNIT, UNIT]
    assert len(engine.said) == 3
    assert "has been started again 2 times within 60 min and is left alone now. Needed: a person." in engine.said[-1]
    engine.look(3600)
    assert engine.restarted == [UNIT] * 3


def test_a_rollout_at_work_is_not_disturbed(engine):
    with host_lock(engine.root, "ann", 0):
        engine.stall()
        assert engine.restarted == []
    engine.look(1)
    assert engine.restarted == [UNIT]


def test_it_ends_when_its_program_has_changed(engine, tmp_path):
    program = tmp_path / "program"
    program.write_text("1")
    engine.life = ""
    looks = []

    def look(now):
        looks.append(now)
        program.unlink()

    engine.watchdog.look = look
    engine.watchdog._settings = Settings(pause_seconds=0)
    engine.watchdog.run([program])
    assert len(looks) == 1
    assert "has changed" in engine.said[-1]
