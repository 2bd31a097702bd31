"""A deployment, a model, plans and a strict parser that the engine tests share."""

from __future__ import annotations

import argparse
from typing import Any

from metalserve.engines.flags import FlagTable

MODEL: dict[str, Any] = {
    "key": "qwen3.6-35b-a3b-fp8",
    "parsers": {
        "vllm": {"tool_call": "qwen3_coder", "reasoning": "qwen3"},
        "sglang": {"tool_call": "qwen3_coder", "reasoning": "qwen3"},
    },
    "shape": {"vision_config": {"depth": 27}},
}

DEPLOYMENT: dict[str, Any] = {
    "name": "qwen",
    "engine": "vllm",
    "model": "qwen3.6-35b-a3b-fp8",
    "port": 8000,
}

CUDA_PLAN: dict[str, Any] = {
    "device": "cuda",
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "expert_parallel": False,
    "gpu_memory_utilization": 0.9,
    "kv_cache_memory_bytes": None,
    "max_model_len": 131072,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 8192,
    "kv_cache_dtype": "auto",
    "prefix_caching": True,
    "disable_custom_all_reduce": False,
    "enforce_eager": False,
}

VLLM_CPU_PLAN: dict[str, Any] = CUDA_PLAN | {
    "device": "cpu",
    "tensor_parallel_size": 1,
    "gpu_memory_utilization": None,
    "kv_cache_memory_bytes": 67108864,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "enforce_eager": True,
}

SGLANG_CPU_PLAN: dict[str, Any] = VLLM_CPU_PLAN | {
    "gpu_memory_utilization": 0.9,
    "kv_cache_memory_bytes": None,
    "kv_cache_tokens": 65536,
}


def deployment(**changes: Any) -> dict[str, Any]:
    return DEPLOYMENT | changes


def model(**changes: Any) -> dict[str, Any]:
    return MODEL | changes


def plan(**changes: Any) -> dict[str, Any]:
    return CUDA_PLAN | changes


class ParserError(Exception):
    """What argparse would print before it exits."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ParserError(message)


def parser_from(table: FlagTable) -> argparse.ArgumentParser:
    """The engine's parser as its table describes it: unknown flags, counts and choices are refused."""
    parser = _Parser(allow_abbrev=False)
    for flag in {id(item): item for item in table.flags.values()}.values():
        names = [f"--{name}" for name in flag.names]
        if flag.action in ("switch", "boolean"):
            parser.add_argument(*names, dest=flag.dest, action="store_true")
        else:
            parser.add_argument(*names, dest=flag.dest, nargs=flag.nargs, choices=flag.choices or None)
    return parser
