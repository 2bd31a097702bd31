"""Which tensor parallel sizes are valid, and the sentence for those that are not."""

import pytest
from planner_examples import TINY

from metalserve import catalogue
from metalserve.errors import Refusal
from metalserve.planner import tensor_parallel_problems, tensor_parallel_size, valid_tensor_parallel_sizes
from metalserve.planner.shape import read_shape

VALID = {
    "qwen3.6-35b-a3b": [1, 2, 4, 8, 16],
    "qwen3.6-35b-a3b-fp8": [1, 2, 4],
    "qwen3.5-35b-a3b-fp8": [1, 2, 4],
    "qwen3.5-35b-a3b-gptq-int4": [1, 2, 4],
    "qwen3.6-35b-a3b-nvfp4": [1, 2, 4, 8, 16],
    "qwen3.5-27b": [1, 2, 4, 8],
    "qwen3-30b-a3b-fp8": [1, 2],
    "qwen3-235b-a22b-fp8": [1, 2, 4],
    "qwen3-32b-fp8": [1, 2, 4, 8],
    "deepseek-v3": [1, 2, 4, 8, 16],
    "minimax-m2": [1, 2, 4],
}


@pytest.mark.parametrize(("model", "sizes"), VALID.items())
def test_valid_sizes_up_to_16(model, sizes):
    assert valid_tensor_parallel_sizes(read_shape(catalogue.model(model).shape), 16) == sizes


@pytest.mark.parametrize("model", catalogue.models())
def test_one_gpu_is_always_valid(model):
    assert tensor_parallel_problems(read_shape(catalogue.model(model).shape), 1) == []


@pytest.mark.parametrize(
    ("model", "tp", "sentence"),
    [
        ("qwen3.6-35b-a3b", 3, "16 attention heads are not divisible by 3"),
        ("qwen3.6-35b-a3b", 3, "2 KV heads neither divide 3 nor are divisible by it"),
        ("qwen3.6-35b-a3b", 3, "32 linear-attention value heads are not divisible by 3"),
        ("qwen3.6-35b-a3b", 3, "16 linear-attention key heads are not divisible by 3"),
        ("qwen3.6-35b-a3b", 3, "16 vision heads are not divisible by 3"),
        ("qwen3.6-35b-a3b", 3, "the vocabulary, padded to 248320, is not divisible by 3"),
        ("qwen3.6-35b-a3b", 3, "moe_intermediate_size 512 is not divisible by 3"),
        ("qwen3.6-35b-a3b", 3, "the shared experts' size 512 is not divisible by 3"),
        ("qwen3-32b", 7, "intermediate_size 25600 is not divisible by 7"),
        ("qwen3.6-35b-a3b", 512, "512 is more than the 256 experts"),
    ],
)
def test_sentence_of_a_head_rule(model, tp, sentence):
    assert sentence in tensor_parallel_problems(read_shape(catalogue.model(model).shape), tp)


@pytest.mark.parametrize(
    ("model", "tp", "sentence"),
    [
        (
            "qwen3.6-35b-a3b-fp8",
            8,
            "the shared experts' down projection keeps 64 inputs per GPU, not a multiple of the FP8 block of 128",
        ),
        ("qwen3.6-35b-a3b-fp8", 8, "each expert keeps 64 columns per GPU, not a multiple of the FP8 block of 128"),
        (
            "qwen3.5-35b-a3b-gptq-int4",
            8,
            "each expert keeps 64 columns per GPU, not a whole number of groups of 128",
        ),
        (
            "qwen3.5-35b-a3b-gptq-int4",
            8,
            "the shared experts' down projection keeps 64 inputs per GPU, not a whole number of groups of 128",
        ),
    ],
)
def test_sentence_of_an_alignment_rule(model, tp, sentence):
    assert sentence in tensor_parallel_problems(read_shape(catalogue.model(model).shape), tp)


def test_a_group_of_32_allows_more():
    config = {**catalogue.model("qwen3.5-35b-a3b").shape}
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    assert valid_tensor_parallel_sizes(read_shape(config), 16) == [1, 2, 4, 8, 16]
    # SGLang's Marlin needs 128 inputs on each rank, whatever the group.
    assert valid_tensor_parallel_sizes(read_shape(config), 16, engine="sglang") == [1, 2, 4]


def test_expert_parallel_does_not_cure_the_shared_expert():
    problems = tensor_parallel_problems(
        read_shape(catalogue.model("qwen3.6-35b-a3b-fp8").shape), 8, expert_parallel=True
    )
    assert problems == [
        "the shared experts' down projection keeps 64 inputs per GPU, not a multiple of the FP8 block of 128"
    ]


def test_sglang_spreads_experts_evenly():
    shape = read_shape({**TINY, "text_config": {**TINY["text_config"], "num_experts": 5}})
    assert tensor_parallel_problems(shape, 2, engine="sglang", expert_parallel=True) == [
        "5 experts are not divisible by 2 ranks"
    ]
    assert tensor_parallel_problems(shape, 2, expert_parallel=True) == []


def test_text_only_lifts_the_vision_rule():
    config = {**TINY, "vision_config": {"depth": 1, "hidden_size": 64, "num_heads": 1, "intermediate_size": 64}}
    config["vision_config"]["out_hidden_size"] = 128
    assert tensor_parallel_problems(read_shape(config), 2) == ["1 vision heads are not divisible by 2"]
    assert tensor_parallel_problems(read_shape(config), 2, text_only=True) == []


@pytest.mark.parametrize(
    ("model", "gpus", "size"),
    [
        ("qwen3.6-35b-a3b-fp8", 8, 4),
        ("qwen3.6-35b-a3b-fp8", 3, 2),
        ("qwen3.6-35b-a3b", 8, 8),
        ("qwen3.6-35b-a3b", 1, 1),
        ("qwen3-30b-a3b-fp8", 4, 2),
    ],
)
def test_largest_size_for_a_number_of_gpus(model, gpus, size):
    assert tensor_parallel_size(model, gpus) == size


def test_no_gpus_is_refused():
    with pytest.raises(Refusal, match="tensor_parallel_size 0"):
        tensor_parallel_size("qwen3-32b", 0)
