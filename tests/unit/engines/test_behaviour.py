"""Fields of a deployment that say how an engine behaves: each engine's flags, and what an engine cannot do."""

import pytest
from engine_examples import deployment, model, plan

from metalserve.deployments import normalize
from metalserve.engines.behaviour import FIELDS
from metalserve.engines.config import engine_config
from metalserve.engines.environment import engine_environment
from metalserve.errors import Refusal


def config_of(engine, sizes=None, **fields):
    return engine_config(deployment(engine=engine, **fields), model(), plan(**(sizes or {})))


@pytest.mark.parametrize(
    ("engine", "fields", "expected"),
    [
        ("vllm", {"dtype": "float16"}, {"dtype": "float16"}),
        ("sglang", {"dtype": "float16"}, {"dtype": "float16"}),
        ("vllm", {"chunked_prefill": True}, {"enable-chunked-prefill": True}),
        ("vllm", {"structured_output_backend": "xgrammar"}, {"structured-outputs-config": '{"backend": "xgrammar"}'}),
        ("sglang", {"structured_output_backend": "guidance"}, {"grammar-backend": "llguidance"}),
        ("vllm", {"priority_order": "lower_first"}, {"scheduling-policy": "priority"}),
        ("sglang", {"priority_order": "higher_first"}, {"enable-priority-scheduling": True}),
        (
            "sglang",
            {"priority_order": "lower_first"},
            {"enable-priority-scheduling": True, "schedule-low-priority-values-first": True},
        ),
        ("vllm", {"long_prompt_tokens": 4096}, {"long-prefill-token-threshold": 4096}),
        # 64 GiB are 68.7 GB: 34 for each of two GPUs.
        ("vllm", {"kv_offload_gib": 64}, {"kv-offloading-size": 64}),
        ("sglang", {"kv_offload_gib": 64}, {"enable-hierarchical-cache": True, "hicache-size": 34}),
        ("vllm", {"log_level": "error"}, {"uvicorn-log-level": "error"}),
        ("sglang", {"log_level": "error"}, {"log-level": "error"}),
        ("vllm", {"tool_parser": "hermes"}, {"tool-call-parser": "hermes", "reasoning-parser": "qwen3"}),
        ("sglang", {"reasoning_parser": "deepseek-r1"}, {"reasoning-parser": "deepseek-r1"}),
    ],
)
def test_each_field_in_the_engines_flags(engine, fields, expected):
    plain, config = config_of(engine), config_of(engine, **fields)
    assert expected.items() <= config.items()
    assert {name for name in config if config[name] != plain.get(name)} <= set(expected)


def test_none_turns_a_parser_of_the_catalogue_off():
    config = config_of("vllm", tool_parser="none", reasoning_parser="none")
    assert not {"enable-auto-tool-choice", "tool-call-parser", "reasoning-parser"} & set(config)


def test_a_parser_that_is_not_registered_is_refused_here_too():
    with pytest.raises(Refusal, match=r"qwen3_code'?, which is not registered.*nearest is 'qwen3_coder'"):
        config_of("vllm", tool_parser="qwen3_code")


def test_the_level_of_vllms_log_is_a_variable():
    assert engine_environment(deployment(log_level="warning"), plan())["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert "VLLM_LOGGING_LEVEL" not in engine_environment(deployment(), plan())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_whole_prompts_need_steps_that_take_them(engine):
    with pytest.raises(Refusal, match=r"chunked_prefill false with 8192 tokens a step and a context of 131072"):
        config_of(engine, chunked_prefill=False)
    config = config_of(engine, {"max_num_batched_tokens": 131072}, chunked_prefill=False)
    assert engine == "sglang" or config["disable-chunked-prefill"] is True


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_offload_needs_the_prefix_cache(engine):
    with pytest.raises(Refusal, match=r"kv_offload_gib 64 without the prefix cache.*prefix_caching: true"):
        config_of(engine, {"prefix_caching": False}, kv_offload_gib=64)


@pytest.mark.parametrize(
    ("engine", "fields", "words"),
    [
        ("vllm", {"priority_order": "higher_first"}, "always serves the lower value first"),
        ("sglang", {"long_prompt_tokens": 4096}, "a smaller max_batched_tokens"),
        ("sglang", {"kv_offload_gib": 1}, "1 over 2 GPUs with SGLang, which counts in whole GB of each"),
        (
            "sglang",
            {"priority_order": "higher_first", "sglang": {"schedule_policy": "lpm"}},
            "schedule_policy fcfs or lof: SGLang stops on an assertion",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(engine, fields, words):
    with pytest.raises(Refusal, match=words):
        config_of(engine, **fields)


@pytest.mark.parametrize(
    ("field", "value", "needed"),
    [
        ("dtype", "fp8", "one of auto, bfloat16, float16"),
        ("structured_output_backend", "guided", "one of auto, xgrammar, guidance, outlines"),
        ("priority_order", True, "one of lower_first, higher_first"),
        ("log_level", "WARN", "one of debug, info, warning, error"),
        ("long_prompt_tokens", 0, "a whole number from 1 on"),
        ("kv_offload_gib", True, "a whole number from 1 on"),
        ("kv_offload_gib", 1.5, "a whole number from 1 on"),
        ("chunked_prefill", "no", "true or false"),
        ("tool_parser", "", "the engine's name of a parser, or none"),
        ("reasoning_parser", 3, "the engine's name of a parser, or none"),
    ],
)
def test_a_wrong_value_is_refused_with_the_right_ones(field, value, needed):
    with pytest.raises(Refusal, match=needed) as caught:
        normalize([deployment(**{field: value})])
    assert caught.value.change == f"`{field}` of qwen in serving_deployments"


def test_a_field_that_is_not_set_changes_nothing():
    """Releases that were made before a field existed keep their id."""
    (filled,) = normalize([deployment()])
    assert config_of("vllm") == config_of("vllm", **{field: filled[field] for field in FIELDS})
