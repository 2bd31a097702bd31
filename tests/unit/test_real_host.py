"""Facts that the module gathered on a real machine with one H200 (driver 580.159.04), UUID zeroed, through the plan."""

import json
from pathlib import Path

import pytest

from metalserve.errors import Refusal
from metalserve.health.probe import check_probes
from metalserve.planner import make_plan
from metalserve.verdict.now import require_software

FACTS = json.loads((Path(__file__).parent / "fixtures" / "h200_x1_host_facts.json").read_text(encoding="utf-8"))
# Answers of remote/cuda_probe.py on that machine, UUID zeroed: as it is, and with its devices hidden.
PROBES = json.loads((Path(__file__).parent / "fixtures" / "h200_x1_cuda_probe.json").read_text(encoding="utf-8"))
# What cudaMemGetInfo says on that machine.
CUDA_TOTAL_BYTES = 150_109_880_320


def test_usable_memory_is_what_cuda_reports():
    (gpu,) = FACTS["gpus"]
    assert gpu["memory_usable_bytes"] == CUDA_TOTAL_BYTES


def test_a_plan_follows_from_the_real_facts():
    plan = make_plan("qwen3.6-35b-a3b", FACTS, "vllm", "0.33.0", {})
    assert plan.tensor_parallel_size == 1
    assert plan.gpu_memory_bytes == CUDA_TOTAL_BYTES
    assert plan.max_model_len == 262_144


def test_a_host_without_the_container_toolkit_is_refused():
    with pytest.raises(Refusal, match="no NVIDIA container toolkit"):
        require_software(FACTS)


@pytest.mark.parametrize(
    ("later", "state", "text"),
    [
        ("works", "ok", "CUDA works on 1 GPUs, also after a daemon-reload"),
        ("hidden_devices", "fail", "cuInit returned 100 (CUDA_ERROR_NO_DEVICE): the container lost its GPUs"),
    ],
)
def test_what_the_probe_answered_there_is_judged(later, state, text):
    assert PROBES["works"]["devices"][0]["memory_total_bytes"] == CUDA_TOTAL_BYTES
    steps = [{"when": "start", "answer": PROBES["works"]}, {"when": "daemon_reload", "answer": PROBES[later]}]
    (row,) = check_probes(FACTS, [{"image": "engine", "steps": steps}])
    assert row.state == state
    assert text in row.found
