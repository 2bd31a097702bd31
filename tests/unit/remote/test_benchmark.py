"""A benchmark on a host: what is run, what is refused, and where the result lies. Docker and the engine are played."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path

import pytest

from metalserve.remote.benchmark import MEASURES, WORKLOADS, BenchmarkError, Settings, benchmark
from metalserve.remote.host_command import main
from metalserve.remote.releases import activate_release, stage_release

ID = "a" * 12
NOW = datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.UTC)
IDLE = 'vllm:num_requests_running{engine="0"} 0.0\nvllm:generation_tokens_total{engine="0"} 5.0\n'
BUSY = IDLE.replace("} 0.0", "} 3.0")
RECORD = {
    "engine": "vllm",
    "engine_version": "0.33.0",
    "image": "registry/vllm@sha256:ab",
    "model": "m",
    "model_revision": "r1",
    "models_dir": "/models",
    "plan": {"max_model_len": 4096},
}


class Tool:
    """`vllm bench serve` in Docker: notes what it was asked, and gives each run another number."""

    def __init__(self, status=0, **values):
        self.status, self.values, self.calls, self.keys = status, values, [], []

    def __call__(self, argv, limit_seconds):
        self.calls.append(list(argv))
        (work,) = (each.split("source=")[1].split(",")[0] for each in argv if each.endswith("target=/result"))
        secret = Path(work) / "secret.env"
        self.keys.append((secret.read_text(encoding="utf-8"), secret.stat().st_mode & 0o777))
        if self.status == 0:
            found = {**dict.fromkeys(MEASURES, 10.0 * len(self.calls)), "completed": 4, "failed": 0, **self.values}
            (Path(work) / "result.json").write_text(json.dumps(found), encoding="utf-8")
        return subprocess.CompletedProcess(argv, self.status, "", "first\nTraceback\nno such model\n")

    def options(self, number):
        words = self.calls[number]
        return {words[place]: words[place + 1] for place in range(len(words) - 1) if words[place].startswith("--")}


@pytest.fixture
def root(tmp_path):
    return deploy(tmp_path)


def deploy(root, **changes):
    endpoint = {"url": "http://h:1", "metrics_route": "/metrics", "model": "served", "api_key_file": None, **changes}
    record = {**RECORD, **{key: value for key, value in changes.items() if key in RECORD}}
    files = {"release.json": json.dumps(record), "endpoint.json": json.dumps(endpoint)}
    stage_release(root, "qwen", ID, files, dry_run=False)
    activate_release(root, "qwen", ID, dry_run=False)
    return root


def measure(root, tool, metrics=IDLE, **settings):
    return benchmark(root, "qwen", Settings(**settings), run=tool, metrics_of=lambda url: metrics, now=NOW)


def test_the_result_lies_with_the_release_and_leaves_out_the_warm_up(root):
    tool = Tool()
    path, result = measure(root, tool, workloads=["chat_short"], runs=3)
    assert path == root / "qwen/releases" / ID / "benchmarks/2026-11-30T120000Z.json"
    assert json.loads(path.read_text(encoding="utf-8")) == result
    assert (result["release"], result["image"], result["beside_others"]) == (ID, RECORD["image"], False)
    assert len(tool.calls) == 4
    found = result["workloads"]["chat_short"]["summary"]["median_ttft_ms"]
    assert found == {"median": 30.0, "least": 20.0, "greatest": 40.0}


def test_it_comes_out_of_the_pinned_image_with_the_releases_own_model(root):
    tool = Tool()
    measure(root, tool, workloads=["chat_short"], runs=1)
    words = tool.calls[0]
    assert words[:2] == ["docker", "run"]
    place = words.index(RECORD["image"])
    assert words[place - 1] == "--entrypoint=vllm"
    assert words[place + 1 : place + 3] == ["bench", "serve"]
    assert "--pull=never" in words[:place]
    assert "--mount=type=bind,source=/models/m/r1,target=/models/m,readonly" in words[:place]
    assert (tool.options(0)["--model"], tool.options(0)["--tokenizer"]) == ("served", "/models/m")
    # No run finds its prompts in the cache that the one before has filled.
    assert [tool.options(number)["--seed"] for number in (0, 1)] == ["0", "1"]


def test_a_workload_asks_what_its_name_says(root):
    tool = Tool()
    _, result = measure(root, tool, runs=1)
    assert list(result["workloads"]) == list(WORKLOADS)
    chat, document, tools = (tool.options(number) for number in (1, 3, 5))
    assert (chat["--random-input-len"], chat["--max-concurrency"]) == ("256", "8")
    # 24 000 tokens do not fit into this model's 4096.
    assert document["--random-input-len"] == str(4096 - 256 - 256)
    assert json.loads(tools["--extra-body"])["tool_choice"] == "required"
    assert "--ignore-eos" not in tool.calls[5]
    assert "--ignore-eos" in tool.calls[1]


def test_the_key_is_in_a_file_of_its_own(root, tmp_path):
    key = tmp_path / "key"
    key.write_text("sk-1\n", encoding="utf-8")
    stage_release(root, "qwen", "b" * 12, {}, dry_run=False)
    endpoint = {"url": "http://h:1", "metrics_route": "/metrics", "model": "served", "api_key_file": str(key)}
    (root / "qwen/releases" / ID / "endpoint.json").write_text(json.dumps(endpoint), encoding="utf-8")
    tool = Tool()
    measure(root, tool, workloads=["chat_short"], runs=1)
    assert tool.keys[0] == ("OPENAI_API_KEY=sk-1\n", 0o600)
    assert not any("sk-1" in word for words in tool.calls for word in words)
    key.write_text("two words\n", encoding="utf-8")
    with pytest.raises(BenchmarkError, match="more than one word"):
        measure(root, Tool(), workloads=["chat_short"], runs=1)


def test_others_are_not_disturbed_unless_it_is_told_to(root):
    tool = Tool()
    with pytest.raises(BenchmarkError, match=r"qwen works on 3 request\(s\) of others.*Change: drain the host first"):
        measure(root, tool, BUSY)
    assert tool.calls == []
    _, result = measure(root, tool, BUSY, workloads=["chat_short"], runs=1, force=True)
    assert result["beside_others"]


@pytest.mark.parametrize(
    ("tool", "settings", "text"),
    [
        (Tool(status=1), {}, "ended with status 1: first / Traceback / no such model"),
        (Tool(failed=2), {"prompts": 4}, "2 of 4 requests failed"),
        (Tool(), {"workloads": ["chat_long"]}, "the workload chat_long does not exist"),
    ],
)
def test_what_says_nothing_is_refused(root, tool, settings, text):
    with pytest.raises(BenchmarkError, match=text):
        measure(root, tool, **settings)
    assert not (root / "qwen/releases" / ID / "benchmarks").exists()


def test_another_engine_and_an_unknown_deployment_are_refused(tmp_path):
    with pytest.raises(BenchmarkError, match="qwen has no current release on this host"):
        measure(tmp_path, Tool())
    deploy(tmp_path, engine="sglang")
    with pytest.raises(BenchmarkError, match="served by sglang"):
        measure(tmp_path, Tool())


def test_an_engine_that_does_not_answer_is_said(root):
    def silent(url):
        raise OSError("refused")

    with pytest.raises(BenchmarkError, match="http://h:1/metrics does not answer: refused"):
        benchmark(root, "qwen", Settings(), run=Tool(), metrics_of=silent)


def test_the_command_says_why_not(tmp_path, capsys):
    assert main(["--root", str(tmp_path), "bench", "qwen"]) == 2
    assert "qwen has no current release" in capsys.readouterr().err
