"""One test for each sentence with which the planner refuses."""

import json

import pytest
from planner_examples import TINY

from metalserve import catalogue
from metalserve.errors import Refusal
from metalserve.planner import make_plan

GIB = 1 << 30


def host_with(shape, **changes):
    host = catalogue.host_from_shape(shape)
    host["gpus"][0].update(changes)
    return host


def cpu_with(instructions):
    host = catalogue.host_from_shape("cpu-24GiB")
    host["cpu"]["instruction_sets"] = instructions
    return host


def tiny(**text):
    return {**TINY, "text_config": {**TINY["text_config"], **text}}


H100 = catalogue.host_from_shape("1xH100")
CPU = catalogue.host_from_shape("cpu-24GiB")
FP8 = "qwen3.6-35b-a3b-fp8"

CASES = {
    "unknown model": (("qwen3.6-35b", H100), {}, r"the closest are .*qwen3.6-35b-a3b"),
    "unknown engine": ((FP8, H100, "tgi"), {}, "engine 'tgi'. Needed: vllm or sglang"),
    "no version": ((FP8, H100, "vllm", "latest"), {}, "engine version 'latest'"),
    "version too old": ((FP8, H100, "vllm", "0.8.2"), {}, "vllm 0.8.2. Needed: 0.17.0 or newer"),
    "version too old for the model": (
        ("qwen3.6-35b-a3b-nvfp4", H100, "vllm", "0.20.2"),
        {},
        "vllm 0.20.2 cannot load qwen3.6-35b-a3b-nvfp4. Needed: vllm 0.24.0",
    ),
    "unknown wish": ((FP8, H100), {"context": 1}, "the wish 'context' is not known. Needed: one of context_length"),
    "not a number": (
        (FP8, H100),
        {"max_sequences": "many"},
        "max_sequences 'many'. Needed: a whole number, at least 1",
    ),
    "not a switch": ((FP8, H100), {"text_only": "yes"}, "text_only 'yes'. Needed: true or false"),
    "share out of range": ((FP8, H100), {"memory_share": 1.5}, "memory_share 1.5. Needed: a number above 0"),
    "share and pool": (
        (FP8, H100),
        {"memory_share": 0.5, "kv_cache_memory_bytes": GIB},
        "memory_share 0.5 and kv_cache_memory_bytes 1073741824 together",
    ),
    "kv dtype": ((FP8, H100), {"kv_cache_dtype": "int4"}, "kv_cache_dtype 'int4'. Needed: one of auto, bfloat16, fp8"),
    "batch below sequences": (
        (FP8, H100),
        {"max_batched_tokens": 8, "max_sequences": 16},
        "max_batched_tokens 8 is below max_sequences 16",
    ),
    "gpus twice": (
        (FP8, H100),
        {"gpus": [0, 0]},
        r"gpus \[0, 0\]. Needed: `all`, a number of GPUs, or a list of different GPU indexes",
    ),
    "no such gpu": ((FP8, H100), {"gpus": [3]}, "GPU 3 is wished for, the host has 1"),
    "mig": ((FP8, host_with("1xH100", mig_enabled=True)), {}, r"GPU 0 \(NVIDIA H100 80GB HBM3\) has MIG enabled"),
    "memory unknown": (
        (FP8, host_with("1xH100", memory_usable_bytes=None, pci_id="10de:ffff")),
        {},
        "the memory of GPU 0 .* is not known",
    ),
    "tensor parallel size invalid": (
        (FP8, catalogue.host_from_shape("8xH100")),
        {"tensor_parallel_size": 8},
        "tensor_parallel_size 8 for qwen3.6-35b-a3b-fp8: .*FP8 block of 128. Needed: one of 1, 2, 4",
    ),
    "too few gpus": ((FP8, H100), {"tensor_parallel_size": 2}, "tensor_parallel_size 2 .* on 1 GPU. Needed: 2 GPUs"),
    "too many replicas": ((FP8, H100), {"data_parallel_size": 2}, "1 x 1 x 2 GPUs .* on 1. Needed: 2 GPUs"),
    "too many stages": ((TINY, H100), {"pipeline_parallel_size": 9}, "pipeline_parallel_size 9 for 4 layers"),
    "weights too large": (
        ("qwen3.6-35b-a3b", catalogue.host_from_shape("1xL40S")),
        {},
        r"needs 65.4 GiB of weights, one NVIDIA L40S gives 40.8 GiB. Needed: .* Change: "
        r"use the FP8 revision \(qwen3.6-35b-a3b-fp8\), or tensor_parallel_size 2",
    ),
    "context above the model's": (
        (FP8, H100),
        {"context_length": 300000},
        "context_length 300000, qwen3.6-35b-a3b-fp8 was trained for 262144 tokens",
    ),
    "context does not fit": (
        ("qwen3.6-35b-a3b", H100),
        {"context_length": 262144},
        r"one request of 262144 tokens takes 5.\d GiB. Needed: .* more. Change: context_length at most \d+",
    ),
    "sequences above the state blocks": (
        ("qwen3.6-35b-a3b", H100),
        {"max_sequences": 512, "context_length": 4096},
        r"max_sequences 512, but only \d+ state blocks fit",
    ),
    "share below the runtime": ((FP8, H100), {"memory_share": 0.01}, "memory_share 0.01 of .* Needed: more than the"),
    "fixed pool too large": ((FP8, H100), {"kv_cache_memory_bytes": 60 * GIB}, "kv_cache_memory_bytes is 60.0 GiB"),
    "old gpu for the format": (
        ("gpt-oss-20b", host_with("1xA100", compute_capability="7.5")),
        {},
        "has compute capability 7.5. Needed: 8.0 for mxfp4 weights under vllm",
    ),
    "old gpu for sglang": (
        ("qwen3-32b", host_with("1xA100", compute_capability="7.5"), "sglang"),
        {},
        "has compute capability 7.5. Needed: 8.0 for 16-bit weights under sglang",
    ),
    "old gpu for bfloat16": (
        ("qwen3-32b", host_with("1xA100", compute_capability="7.5")),
        {},
        "has compute capability 7.5, the checkpoint is bfloat16. Needed: 8.0 for bfloat16",
    ),
    "old gpu for an fp8 cache": (
        (FP8, host_with("1xA100", compute_capability="7.5")),
        {"kv_cache_dtype": "fp8"},
        "has compute capability 7.5. Needed: 8.0 for an FP8 KV cache",
    ),
    "no draft layers": (("qwen3-32b", H100), {"speculative_tokens": 2}, "qwen3-32b has no MTP layers"),
    "no experts": (("qwen3-32b", H100), {"expert_parallel": True}, "qwen3-32b has no experts"),
    "sglang on a cpu": ((TINY, CPU, "sglang"), {}, "SGLang on a host without GPUs"),
    "sglang with a pool": (
        (FP8, H100, "sglang"),
        {"kv_cache_memory_bytes": GIB},
        "kv_cache_memory_bytes with SGLang. Needed: a share of memory",
    ),
    "sglang weights too large": (
        ("qwen3.6-35b-a3b", catalogue.host_from_shape("1xL40S"), "sglang"),
        {},
        "needs 65.4 GiB of weights on each GPU; with a static fraction",
    ),
    "sglang tensor parallel size": (
        (FP8, catalogue.host_from_shape("8xH100"), "sglang"),
        {"tensor_parallel_size": 8},
        "tensor_parallel_size 8 for qwen3.6-35b-a3b-fp8",
    ),
    "sglang sequences": (
        (FP8, H100, "sglang"),
        {"max_sequences": 200},
        r"max_sequences 200, but the pools hold \d+ running requests",
    ),
    "sglang context": (
        ("qwen3.6-35b-a3b", H100, "sglang"),
        {"context_length": 262144},
        r"the KV pool holds \d+ tokens, context_length is 262144",
    ),
    "gpus on a cpu": ((TINY, CPU), {"gpus": [0]}, r"gpus \[0\] on a host without GPUs"),
    "ranks on a cpu": ((TINY, CPU), {"tensor_parallel_size": 2}, "more than one rank on a CPU host"),
    "old cpu": ((TINY, cpu_with(["sse4_2"])), {}, "the CPU has sse4_2. Needed: avx2"),
    "quantised on a cpu": ((FP8, CPU), {}, "has fp8 weights. Needed: 16-bit weights on a CPU host"),
    "fp8 cache on a cpu": ((TINY, cpu_with(["avx2"])), {"kv_cache_dtype": "fp8"}, "without AVX-512 or AMX"),
    "head size on a cpu": ((tiny(head_dim=48), CPU), {}, "has attention heads of 48"),
    "draft on a cpu": ((TINY, CPU), {"speculative_tokens": 1}, "model has no MTP layers"),
    "cpu memory unknown": ((TINY, {"memory": {}}), {}, "the host's memory is not known"),
    "cpu memory too small": (("qwen3-32b", CPU), {}, "61.0 GiB of weights, 4.0 GiB of KV cache"),
    "cpu pool too small": (
        (TINY, CPU),
        {"kv_cache_memory_bytes": 131072, "context_length": 4096},
        "one request of 4096 tokens takes",
    ),
    "text_config of another kind": (
        ({**TINY, "text_config": [1]}, H100),
        {},
        "text_config is not a mapping. Needed: a mapping",
    ),
    "field missing": ((tiny(hidden_size=None), H100), {}, "the model's shape has hidden_size None"),
    "layers do not add up": ((tiny(num_hidden_layers=5), H100), {}, "layer_types names 4 layers. Needed: 5"),
    "unknown layer": (
        (tiny(layer_types=["retention"] * 4), H100),
        {},
        "layer_types has layers of kind 'retention'.*full_attention layers only",
    ),
    "other state-space layers": (
        ({**TINY, "text_config": {"mamba_d_state": 16}}, H100),
        {},
        r"has state-space layers of another kind \(mamba_d_state\)",
    ),
    "experts without a size": (
        (tiny(moe_intermediate_size=None), H100),
        {},
        "the shape has experts without moe_intermediate_size",
    ),
    "unknown quantisation": (
        ({**TINY, "quantization_config": {"quant_method": "exl9"}}, H100),
        {},
        "the quantisation method exl9 is not known",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refusal(name):
    arguments, wishes, message = CASES[name]
    with pytest.raises(Refusal, match=message) as caught:
        make_plan(*arguments, wishes=wishes)
    assert caught.value.change


def test_gguf_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(Refusal, match="is a GGUF file"):
        make_plan(str(tmp_path), H100)


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(Refusal, match="nothing does not exist"):
        make_plan(str(tmp_path / "nothing"), H100)


def test_a_config_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("hidden_size: 1")
    with pytest.raises(Refusal, match="cannot be read as JSON"):
        make_plan(tmp_path, H100)


def test_a_config_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(Refusal, match=r"holds a list\. Needed: a JSON object"):
        make_plan(tmp_path, H100)


def test_quantisation_in_a_side_file_is_found(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "quant_config.json").write_text(json.dumps({"w_bit": 4, "q_group_size": 128, "zero_point": True}))
    with pytest.raises(Refusal, match="has awq weights"):
        make_plan(tmp_path, CPU)
