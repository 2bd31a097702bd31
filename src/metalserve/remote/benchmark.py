"""Measures a deployment with `vllm bench serve` out of the image that it runs: nothing is installed on the host.

A result is kept with the release that it speaks of: releases/<id>/benchmarks/<time>.json.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

from .capacity import read_metrics
from .files import read_json_object, write_json
from .gate_key import read_api_key
from .releases import active_release, release_directory
from .watchdog import parse_sample

SCHEMA = 1
# Fields of the tool's result that are kept, and whether more of it is better. Times are milliseconds.
MEASURES = {
    "median_ttft_ms": False,
    "p99_ttft_ms": False,
    "median_itl_ms": False,
    "p99_itl_ms": False,
    "median_e2el_ms": False,
    "output_throughput": True,
    "request_throughput": True,
}
_COUNTS = ("completed", "failed", "duration", "total_input_tokens", "total_output_tokens")
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class BenchmarkError(Exception):
    """A benchmark that is not run, or did not come to an end; the text is for a person."""


class OthersUseItError(BenchmarkError):
    """The deployment works on requests of others."""


@dataclass(frozen=True)
class Workload:
    """What is asked: how many requests of how many tokens, so many at a time."""

    input_tokens: int
    output_tokens: int
    prompts: int
    concurrency: int
    # Further fields of each request.
    body: Optional[Mapping[str, Any]] = None

    def fitted(self, context_tokens: int) -> Workload:
        """The same within a context: the prompt is shortened, with room for the chat template."""
        room = max(16, context_tokens - self.output_tokens - 256)
        return replace(self, input_tokens=min(self.input_tokens, room))


WORKLOADS = {
    "chat_short": Workload(input_tokens=256, output_tokens=128, prompts=64, concurrency=8),
    "long_document": Workload(input_tokens=24000, output_tokens=256, prompts=12, concurrency=2),
    "tool_calls": Workload(
        input_tokens=512,
        output_tokens=64,
        prompts=32,
        concurrency=4,
        body={"tools": [_TOOL], "tool_choice": "required"},
    ),
}
Run = Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Settings:
    """How it is measured.

    Args:
        workloads: names of `WORKLOADS`.
        runs: how often each is run after one run for warming up; the median counts.
        prompts: requests of a run, instead of the workload's own.
        concurrency: requests at a time, instead of the workload's own.
        force: also while others use the deployment.
        limit_seconds: of one run.
    """

    workloads: Sequence[str] = tuple(WORKLOADS)
    runs: int = 3
    prompts: Optional[int] = None
    concurrency: Optional[int] = None
    force: bool = False
    limit_seconds: float = 1800.0


def run_quietly(argv: Sequence[str], limit_seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command and keep what it says."""
    return subprocess.run(argv, capture_output=True, text=True, timeout=limit_seconds, check=False)


def benchmark(
    root: Path,
    deployment: str,
    settings: Settings,
    *,
    run: Run = run_quietly,
    metrics_of: Callable[[str], str] = read_metrics,
    now: Optional[datetime.datetime] = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Path, dict[str, Any]]:
    """Measure the current release of a deployment; returns where the result is kept, and the result.

    Raises:
        BenchmarkError: no such deployment, not vLLM, others use it, or the tool failed.
        OSError: the result cannot be written.
    """
    release = active_release(root, deployment)
    directory = release_directory(root, deployment, str(release))
    record, endpoint = read_json_object(directory / "release.json"), read_json_object(directory / "endpoint.json")
    if not record or not endpoint:
        raise BenchmarkError(
            f"{deployment} has no current release on this host. Needed: one that runs. "
            "Change: the name, one of those that `metalserve-host releases` lists."
        )
    if record["engine"] != "vllm":
        raise BenchmarkError(
            f"{deployment} is served by {record['engine']}, whose image has no `vllm bench serve`. "
            "Needed: a deployment of vLLM. Change: the name."
        )
    unknown = [name for name in settings.workloads if name not in WORKLOADS]
    if unknown:
        raise BenchmarkError(
            f"the workload {', '.join(unknown)} does not exist. Needed: of {', '.join(WORKLOADS)}. Change: --workload."
        )
    requests = check_unused(deployment, endpoint, metrics_of, force=settings.force)
    when = (now or datetime.datetime.now(datetime.timezone.utc)).strftime("%Y-%m-%dT%H:%M:%SZ")  # noqa: UP017
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "when": when,
        "deployment": deployment,
        "release": release,
        "host": os.uname().nodename,
        **{field: record.get(field) for field in ("engine", "engine_version", "image", "model", "model_revision")},
        "beside_others": bool(requests),
        "workloads": {},
    }
    for name in settings.workloads:
        asked = WORKLOADS[name].fitted(int(record["plan"]["max_model_len"]))
        asked = replace(
            asked, prompts=settings.prompts or asked.prompts, concurrency=settings.concurrency or asked.concurrency
        )
        runs = []
        for number in range(settings.runs + 1):
            values = _one_run(record, endpoint, asked, number, settings.limit_seconds, run)
            if number:
                runs.append(values)
            say(f"{name}: {f'run {number} of {settings.runs}' if number else 'warm-up'}: {_in_words(values)}")
        result["workloads"][name] = {
            "asked": {key: value for key, value in vars(asked).items() if key != "body"},
            "runs": runs,
            "summary": summary(runs),
        }
    path = directory / "benchmarks" / f"{when.replace(':', '')}.json"
    path.parent.mkdir(mode=0o755, exist_ok=True)
    write_json(path, result)
    return path, result


def summary(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Median, least and greatest of each measure over the runs."""
    return {
        name: {
            "median": round(statistics.median(values), 3),
            "least": round(min(values), 3),
            "greatest": round(max(values), 3),
        }
        for name in MEASURES
        for values in [[float(each[name]) for each in runs if each.get(name) is not None]]
        if values
    }


def check_unused(
    deployment: str, endpoint: Mapping[str, Any], metrics_of: Callable[[str], str] = read_metrics, *, force: bool
) -> float:
    """How many requests of others an engine works on; with `force` they are no reason to stop.

    Raises:
        OthersUseItError: there are some.
        BenchmarkError: the engine does not answer.
    """
    requests = _requests(endpoint, metrics_of)
    if requests and not force:
        raise OthersUseItError(
            f"{deployment} works on {requests:.0f} request(s) of others, which a benchmark would slow down. "
            "Needed: none. Change: drain the host first (playbooks/ops/drain.yml), or --force."
        )
    return requests


def _requests(endpoint: Mapping[str, Any], metrics_of: Callable[[str], str]) -> float:
    url = f"{endpoint['url']}{endpoint['metrics_route']}"
    try:
        sample = parse_sample("vllm", metrics_of(url))
    except OSError as error:
        raise BenchmarkError(
            f"{url} does not answer: {error}. Needed: an engine that serves. Change: see `metalserve-host diagnose`."
        ) from error
    return sample.requests if sample else 0.0


def _one_run(
    record: Mapping[str, Any],
    endpoint: Mapping[str, Any],
    asked: Workload,
    number: int,
    limit_seconds: float,
    run: Run,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="metalserve-bench-") as work:
        try:
            key = read_api_key(endpoint["api_key_file"]) if endpoint.get("api_key_file") else None
        except ValueError as error:
            raise BenchmarkError(
                f"{error}. Needed: the key on one line. Change: api_key_file of the deployment."
            ) from error
        secret = Path(work) / "secret.env"
        secret.touch(mode=0o600)
        secret.write_text(f"OPENAI_API_KEY={key}\n" if key else "", encoding="utf-8")
        done = run(_command(record, endpoint, asked, number, work), limit_seconds)
        values = read_json_object(Path(work) / "result.json")
    if done.returncode or not values:
        last = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()][-5:]
        raise BenchmarkError(
            f"`vllm bench serve` ended with status {done.returncode}: {' / '.join(last) or 'no word'}. "
            "Needed: a run to its end. Change: see the engine's journal at that time."
        )
    if values.get("failed"):
        raise BenchmarkError(
            f"{values['failed']} of {asked.prompts} requests failed, so the times say nothing. Needed: none. "
            "Change: see the engine's journal at that time."
        )
    return {name: values.get(name) for name in (*MEASURES, *_COUNTS)}


def _command(
    record: Mapping[str, Any], endpoint: Mapping[str, Any], asked: Workload, number: int, work: str
) -> list[str]:
    model = f"/models/{record['model']}"
    directory = f"{record['models_dir']}/{record['model']}/{record['model_revision']}"
    body = ["--extra-body", json.dumps(asked.body)] if asked.body else ["--ignore-eos"]
    return [
        *("docker", "run", "--rm", "--pull=never", "--runtime=runc", "--network=host", "--log-driver=none"),
        f"--env-file={work}/secret.env",
        *("--env=HF_HUB_OFFLINE=1", "--env=VLLM_NO_USAGE_STATS=1"),
        f"--mount=type=bind,source={directory},target={model},readonly",
        f"--mount=type=bind,source={work},target=/result",
        *("--entrypoint=vllm", record["image"], "bench", "serve", "--backend", "openai-chat"),
        *("--endpoint", "/v1/chat/completions", "--base-url", endpoint["url"]),
        *("--model", endpoint["model"], "--tokenizer", model, "--dataset-name", "random"),
        # Another seed each time, or the second run would find its prompts in the prefix cache.
        *("--seed", str(number), "--temperature", "0"),
        *("--random-input-len", str(asked.input_tokens), "--random-output-len", str(asked.output_tokens)),
        *("--num-prompts", str(asked.prompts), "--max-concurrency", str(asked.concurrency)),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "99", *body),
        *("--disable-tqdm", "--save-result", "--result-dir", "/result", "--result-filename", "result.json"),
    ]


def _in_words(values: Mapping[str, Any]) -> str:
    return (
        f"{values['median_ttft_ms']:.0f} ms to the first token, {values['median_itl_ms']:.1f} ms between two, "
        f"{values['output_throughput']:.0f} tokens/s"
    )
