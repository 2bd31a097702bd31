"""`metalserve plan`: the table as a golden file, JSON, and the exit status."""

import json
import os
from pathlib import Path

import pytest

from metalserve import catalogue
from metalserve.cli import main
from metalserve.planner import make_plan

GOLDEN = Path(__file__).parent / "golden"

CASES = {
    "fp8_8xh800": ["--model", "qwen3.6-35b-a3b-fp8", "--gpus", "8xH800"],
    "bf16_2xl40s": ["--model", "qwen3.6-35b-a3b", "--gpus", "2xL40S", "--text-only"],
    "sglang_1xh100": ["--model", "qwen3.6-35b-a3b-fp8", "--gpus", "1xH100", "--engine", "sglang"],
    "dense_1xh200_024": ["--model", "qwen3-32b", "--gpus", "1xH200", "--engine-version", "0.24.0"],
}


@pytest.mark.parametrize("name", CASES)
def test_table(name, capsys):
    assert main(["plan", *CASES[name]]) == 0
    printed = capsys.readouterr().out
    golden = GOLDEN / f"{name}.txt"
    # METALSERVE_GOLDEN=1 pytest tests/unit/planner/test_plan_command.py writes them anew.
    if os.environ.get("METALSERVE_GOLDEN"):
        golden.write_text(printed)
    assert printed == golden.read_text()


def test_json_is_the_plan(capsys):
    assert main(["plan", *CASES["fp8_8xh800"], "--json"]) == 0
    expected = make_plan("qwen3.6-35b-a3b-fp8", catalogue.host_from_shape("8xH800"))
    assert json.loads(capsys.readouterr().out) == expected.as_dict()


def test_wishes_reach_the_plan(capsys):
    arguments = ["--context-length", "32768", "--max-sequences", "64", "--kv-cache-dtype", "fp8", "--json"]
    arguments += ["--tensor-parallel-size", "2", "--memory-share", "0.5", "--speculative-tokens", "1"]
    assert main(["plan", "--model", "qwen3.6-35b-a3b", "--gpus", "2xH200", *arguments]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["max_model_len"], printed["max_num_seqs"], printed["kv_cache_dtype"]) == (32768, 64, "fp8")
    assert printed["gpu_memory_utilization"] < 0.5


def test_what_does_not_fit_goes_to_stderr_with_status_2(capsys):
    assert main(["plan", "--model", "qwen3.6-35b-a3b", "--gpus", "1xL40S"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "needs 65.4 GiB of weights, one NVIDIA L40S gives 40.8 GiB" in captured.err
