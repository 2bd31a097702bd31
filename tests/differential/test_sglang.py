"""The planner's SGLang part against SGLang 0.5.23's own resolver and pool configurators, in SGLang's image.

    METALSERVE_REQUIRE_ENGINE=1 pytest tests/differential/test_sglang.py

Runs without a GPU: the GPUs are pretended (see sglang_resolver.py). flashinfer is not in the image, so the attention
backend it would choose is not compared. With METALSERVE_REQUIRE_ENGINE=1 a missing image is a failure.
"""

import pytest
from sglang_cases import GPUS, ask_sglang

from metalserve import catalogue
from metalserve.planner import valid_tensor_parallel_sizes
from metalserve.planner.sglang_rules import MULTIMODAL_BYTES, Serving, default_fraction, pools, sees_pictures, tier
from metalserve.planner.shape import read_shape

GIB = 1 << 30
CONFIGS = {key: entry.as_dict()["shape"] for key, entry in catalogue.models().items()}
SHAPES = {key: read_shape(config) for key, config in CONFIGS.items()}
# GPTQ's Marlin types live in the compiled kernels, which the image does not have; neither the fraction nor the pools
# depend on the format of the weights.
CONFIGS["qwen3.5-35b-a3b-gptq-int4"].pop("quantization_config")
# Free memory before and after loading (bytes): what a start measures, chosen here.
MEMORY = ((78 * GIB + 4321, 50 * GIB + 12345), (138 * GIB, 90 * GIB + 1), (44 * GIB, 12 * GIB + 98765))


def argument_cases():
    """Every model x valid tensor parallel size up to 8, the GPUs in turn, as the engine is started without any size."""
    for place, (name, shape) in enumerate(SHAPES.items()):
        for turn, tp in enumerate(valid_tensor_parallel_sizes(shape, 8, engine="sglang")):
            gpu = list(GPUS)[(place + turn) % len(GPUS)]
            yield {"name": name, "gpu": gpu, "tp": tp, "arguments": ["--tp-size", str(tp)]}


VARIANTS = (
    {},
    {"kv_cache_dtype": "fp8_e4m3"},
    {"disable_radix_cache": True, "max_running_requests": 24},
    {"max_running_requests": 7},
    {"context_length": 8192, "mem_fraction_static": 0.9},
    {
        "mamba_full_memory_ratio": 2.5,
        "mamba_ssm_dtype": "bfloat16",
        "mamba_radix_cache_strategy": "extra_buffer_lazy",
    },
    {"speculative_num_steps": 2},
)
# One of each kind gets every variant, the others two in turn.
EVERY_VARIANT = ("qwen3.6-35b-a3b-fp8", "qwen3-32b", "deepseek-v3", "gpt-oss-120b", "mistral-small-3.1-24b-instruct")


def pool_cases():
    """Every model x memory, with KV type, radix cache, state type, ratio, drafts and wishes in turn."""
    for turn, (name, shape) in enumerate(SHAPES.items()):
        usable = [
            variant
            for variant in VARIANTS
            if (shape.draft_layers or "speculative_num_steps" not in variant)
            and (shape.hybrid or "mamba_ssm_dtype" not in variant)
        ]
        if name not in EVERY_VARIANT:
            usable = [usable[turn % len(usable)], usable[(turn + 1) % len(usable)]]
        sizes = valid_tensor_parallel_sizes(shape, 8, engine="sglang")
        for place, variant in enumerate(usable):
            before, after = MEMORY[(turn + place) % len(MEMORY)]
            tp = sizes[(turn + place) % len(sizes)]
            arguments = ["--tp-size", str(tp)]
            for key, value in variant.items():
                arguments += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
            if "speculative_num_steps" in variant:
                steps = variant["speculative_num_steps"]
                arguments += ["--speculative-algorithm", "NEXTN", "--speculative-eagle-topk", "1"]
                arguments += ["--speculative-num-draft-tokens", str(steps + 1)]
            yield {
                "name": name,
                "gpu": "H100",
                "tp": tp,
                "variant": variant,
                "arguments": arguments,
                "free_before": before,
                "free_after": after,
            }


@pytest.fixture(scope="module")
def answers(sglang_image):
    return ask_sglang(sglang_image, CONFIGS, [*argument_cases(), *pool_cases()])


def test_everything_was_answered(answers):
    refused = {case["name"]: answer["refused"] for case, answer in answers if "refused" in answer}
    assert not refused
    assert len(answers) > 150


def planned_arguments(case):
    shape = SHAPES[case["name"]]
    total_mib = GPUS[case["gpu"]]["memory_mib"]
    chunk, batch = tier(total_mib, case["tp"])
    fraction = default_fraction(shape, total_mib, tensor_parallel_size=case["tp"])
    return {"fraction": fraction, "chunk": chunk, "decode_batch": batch}


@pytest.mark.parametrize("name", CONFIGS)
def test_default_arguments_are_sglangs_own(answers, name):
    rows = [(case, answer) for case, answer in answers if case["name"] == name and "variant" not in case]
    assert rows
    for case, answer in rows:
        planned = planned_arguments(case)
        assert planned == {key: answer[key] for key in planned}, case
        # The planner counts on these.
        assert (answer["page"], answer["overlap"]) == (1, True), case
        assert answer["strategy"] == ("extra_buffer" if SHAPES[name].hybrid else "auto"), case


def planned_pools(case, fraction):
    variant = case["variant"]
    shape = SHAPES[case["name"]]
    steps = variant.get("speculative_num_steps")
    serving = Serving(
        context_tokens=variant.get("context_length", shape.max_position_tokens),
        kv_element_bytes=1 if "kv_cache_dtype" in variant else 2,
        radix_cache="disable_radix_cache" not in variant,
        strategy=variant.get("mamba_radix_cache_strategy", "extra_buffer"),
        state_ratio=variant.get("mamba_full_memory_ratio", 0.9),
        state_dtype=variant.get("mamba_ssm_dtype"),
        draft_tokens=steps + 1 if steps else 0,
        max_running=variant.get("max_running_requests"),
    )
    pictures = MULTIMODAL_BYTES if sees_pictures(shape) else 0
    budget = case["free_after"] - case["free_before"] * (1 - fraction) - pictures
    found = pools(shape, budget, case["tp"], serving)
    return found and {
        "tokens": found.tokens,
        "running": found.max_running,
        "sliding_tokens": found.sliding_tokens or None,
        "slots": found.slots if shape.hybrid else None,
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_pools_are_sglangs_own_to_the_token(answers, name):
    rows = [(case, answer) for case, answer in answers if case["name"] == name and "variant" in case]
    assert len(rows) >= 2
    for case, answer in rows:
        assert planned_pools(case, answer["fraction"]) == answer["pools"], case
