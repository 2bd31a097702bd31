"""Facts that the module gathered on a real machine with one H200 (driver 580.159.04), UUID zeroed, through the plan."""

import json
from pathlib import Path

import pytest

from metalserve.errors import Refusal
from metalserve.planner import make_plan
from metalserve.verdict.now import require_software

FACTS = json.loads((Path(__file__).parent / "fixtures" / "h200_x1_host_facts.json").read_text(encoding="utf-8"))
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
