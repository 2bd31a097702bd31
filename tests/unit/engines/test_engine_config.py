import os
from pathlib import Path

import pytest
import yaml
from engine_examples import CUDA_PLAN, SGLANG_CPU_PLAN, VLLM_CPU_PLAN, deployment, model, parser_from, plan
from hypothesis import given, settings
from hypothesis import strategies as st

from metalserve import catalogue
from metalserve.adapters import Lora
from metalserve.engines.config import engine_config
from metalserve.engines.flags import flags_for
from metalserve.engines.rendering import cli_arguments, render_config
from metalserve.errors import Refusal
from metalserve.planner import Adapters, read_draft

GOLDEN = Path(__file__).parent / "golden"

# One case with every field for CUDA with two GPUs, one with what goes beside the model, one plain case for the CPU.
FULL = {
    "served_names": ["qwen"],
    "bind_address": "127.0.0.1",
    "text_only": True,
    "speculative_tokens": 2,
    "expert_parallel": True,
    "dtype": "bfloat16",
    "structured_output_backend": "guidance",
    "priority_order": "lower_first",
    "log_level": "warning",
    "kv_offload_gib": 64,
    "tool_parser": "hermes",
    "reasoning_parser": "none",
    "engine_args": {"trust_remote_code": True},
}
VLLM_FULL = {"long_prompt_tokens": 4096, "chunked_prefill": True}
SGLANG_FULL = {
    "tool_parser": "qwen3_coder",
    "sglang": {
        "state_memory_ratio": 2.0,
        "state_dtype": "bfloat16",
        "radix_strategy": "extra_buffer",
        "schedule_policy": "fcfs",
        "schedule_conservativeness": 0.8,
        "max_queued_requests": 512,
        "disaggregation_mode": "prefill",
        "disaggregation_transfer": "nixl",
        "disaggregation_bootstrap_port": 8998,
    },
}
FULL_PLAN = {
    "expert_parallel": True,
    "kv_cache_dtype": "fp8",
    "prefix_caching": True,
    "disable_custom_all_reduce": True,
}
CASES = [
    *(
        (f"vllm-{version}-{device}", "vllm", version, device)
        for version in ("0.17.1", "0.20.2", "0.27.1", "0.32.0", "0.33.0")
        for device in ("cuda-tp2", "beside-tp2", "cpu")
    ),
    *(
        (f"sglang-{version}-{device}", "sglang", version, device)
        for version in ("0.5.10", "0.5.23")
        for device in ("cuda-tp2", "beside-tp2", "cpu")
    ),
]
# Two adapters, one of which runs at a time, and an EAGLE-3 head; as a deployment is once it is planned.
HEAD_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 2048,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "vocab_size": 248320,
    "max_position_embeddings": 4096,
}
BESIDE = {
    "speculative_tokens": 3,
    "draft_model": "head",
    "draft": read_draft("head", HEAD_CONFIG),
    "lora": Lora(
        ({"name": "sql", "key": "sql"}, {"name": "Org/de", "key": "de"}),
        Adapters(rank=32, slots=1, modules=frozenset({"q_proj", "o_proj"})),
    ),
}


def config_of(engine, version, device):
    base = deployment(engine=engine, engine_version=version)
    if device == "cpu":
        return engine_config(base, model(), VLLM_CPU_PLAN if engine == "vllm" else SGLANG_CPU_PLAN)
    if device == "beside-tp2":
        return engine_config(base | BESIDE, model(), CUDA_PLAN)
    full = FULL if version != "0.5.10" else {**FULL, "text_only": False}
    own = VLLM_FULL if engine == "vllm" else SGLANG_FULL
    return engine_config(base | full | own, model(), CUDA_PLAN | FULL_PLAN)


@pytest.mark.parametrize(("name", "engine", "version", "device"), CASES, ids=[case[0] for case in CASES])
def test_golden_files(name, engine, version, device):
    text = render_config(engine, config_of(engine, version, device))
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("METALSERVE_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "engine", "version", "device"), CASES, ids=[case[0] for case in CASES])
def test_the_file_is_taken_by_the_parser_of_its_version(name, engine, version, device):
    config = yaml.safe_load((GOLDEN / f"{name}.yaml").read_text(encoding="utf-8"))
    table = flags_for(engine, version)
    parsed = vars(parser_from(table).parse_args(cli_arguments(engine, version, config)))
    assert parsed["port"] == "8000"
    assert (parsed.get("model") or parsed.get("model_path")) == "/models/qwen3.6-35b-a3b-fp8"
    parallel = parsed[table.find("tensor-parallel-size").dest]
    assert parallel == ("1" if device == "cpu" else "2")


def test_there_is_no_golden_file_without_a_case():
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == {case[0] for case in CASES}


def test_the_wrong_version_refuses_the_file():
    """The parser made from a table is strict enough to notice a flag of another version."""
    config = engine_config(deployment(engine_version="0.33.0"), model(), plan(prefix_caching=False))
    words = cli_arguments("vllm", "0.33.0", config)
    with pytest.raises(Exception, match=r"unrecognized arguments: .*--disable-prefix-caching"):
        parser_from(flags_for("vllm", "0.17.1")).parse_args(words)


def test_parsers_come_from_the_catalogue_and_only_when_it_names_them():
    bare = engine_config(deployment(), model(parsers={"vllm": {"tool_call": None, "reasoning": None}}), plan())
    assert not {"enable-auto-tool-choice", "tool-call-parser", "reasoning-parser"} & set(bare)
    assert not {"tool-call-parser", "reasoning-parser"} & set(
        engine_config(deployment(engine="sglang"), model(parsers={}), plan())
    )
    tool_only = engine_config(deployment(), model(parsers={"vllm": {"tool": "hermes"}}), plan())
    assert tool_only["tool-call-parser"] == "hermes"
    assert tool_only["enable-auto-tool-choice"] is True
    assert "reasoning-parser" not in tool_only


@pytest.mark.parametrize("key", sorted(catalogue.models()))
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_parser_of_the_catalogue_is_registered_in_the_pinned_version(engine, key):
    entry = {"key": key, **catalogue.models()[key].as_dict()}
    config = engine_config(deployment(engine=engine, model=key), entry, plan())
    assert config.get("tool-call-parser") == entry["parsers"].get(engine, {}).get("tool_call")


def test_a_parser_of_the_catalogue_that_the_version_lacks_is_refused():
    with pytest.raises(Refusal, match=r"'tool-call-parser: muse'.*not registered in vllm 0.32.0"):
        engine_config(deployment(engine_version="0.32.0"), model(parsers={"vllm": {"tool": "muse"}}), plan())


@pytest.mark.parametrize("version", ["0.17.1", "0.33.0"])
def test_engine_args_replace_what_the_plan_says_in_either_spelling(version):
    args = {"enable-prefix-caching": True, "tool-call-parser": "hermes"}
    config = engine_config(deployment(engine_version=version, engine_args=args), model(), plan(prefix_caching=False))
    assert config["enable-prefix-caching"] is True
    assert config["tool-call-parser"] == "hermes"
    assert not {"no-enable-prefix-caching", "disable-prefix-caching"} & set(config)


def test_both_bounds_of_memory_are_written_for_vllm():
    config = engine_config(deployment(), model(), plan(kv_cache_memory_bytes=2**30))
    assert (config["gpu-memory-utilization"], config["kv-cache-memory-bytes"]) == (0.9, 2**30)


def test_the_drain_is_only_written_where_the_version_has_it():
    assert "shutdown-timeout" not in engine_config(deployment(engine_version="0.17.1"), model(), plan())
    assert engine_config(deployment(engine_version="0.20.2"), model(), plan())["shutdown-timeout"] == 60


def test_parallel_sizes_above_one_are_written():
    sizes = plan(pipeline_parallel_size=2, data_parallel_size=4)
    vllm = engine_config(deployment(), model(), sizes)
    assert (vllm["pipeline-parallel-size"], vllm["data-parallel-size"]) == (2, 4)
    sglang = engine_config(deployment(engine="sglang"), model(), sizes)
    assert (sglang["pp-size"], sglang["dp-size"]) == (2, 4)


def test_a_version_without_its_own_table_is_served_by_the_one_below():
    assert "no-enable-prefix-caching" in engine_config(
        deployment(engine_version="0.32.9"), model(), plan(prefix_caching=False)
    )


def test_text_only_without_a_vision_part_is_refused():
    with pytest.raises(Refusal, match=r"text_only for the model qwen3.6-35b-a3b-fp8.*remove text_only"):
        engine_config(deployment(text_only=True), model(shape={}), plan())
    with pytest.raises(Refusal, match=r"text_only"):
        engine_config(deployment(text_only=True), model(text_only_supported=False), plan())


def test_a_plan_without_a_bound_of_memory_is_refused():
    with pytest.raises(Refusal, match=r"bounds neither.*memory_share or kv_cache_memory_bytes"):
        engine_config(deployment(), model(), plan(gpu_memory_utilization=None))


def test_a_kv_cache_dtype_the_version_lacks_is_refused():
    with pytest.raises(Refusal, match=r"'kv-cache-dtype: nvfp4'.*vllm 0\.17\.1 does not take"):
        engine_config(deployment(engine_version="0.17.1"), model(), plan(kv_cache_dtype="nvfp4"))


def test_sglang_refuses_several_names():
    with pytest.raises(Refusal, match=r"2 served names \(a, b\) with SGLang.*served_names"):
        engine_config(deployment(engine="sglang", served_names=["a", "b"]), model(), plan())


def test_sglang_refuses_a_colon_in_the_name():
    with pytest.raises(Refusal, match=r"the served name 'a:b' with SGLang.*without ':'"):
        engine_config(deployment(engine="sglang", served_names=["a:b"]), model(), plan())


def test_sglang_refuses_a_kv_cache_in_bytes():
    with pytest.raises(Refusal, match=r"fixed at 1024 bytes with SGLang 0.5.23.*memory_share"):
        engine_config(deployment(engine="sglang"), model(), plan(kv_cache_memory_bytes=1024))


def test_eager_turns_both_graph_kinds_of_sglang_off():
    config = engine_config(deployment(engine="sglang"), model(), plan(enforce_eager=True))
    assert config["cuda-graph-backend-decode"] == config["cuda-graph-backend-prefill"] == "disabled"
    assert "device" not in config


@pytest.mark.parametrize("value", [False, None])
def test_rendering_refuses_false_and_null(value):
    with pytest.raises(Refusal, match=r"'x: (false|null)' in an engine configuration.*vLLM drops a false silently"):
        render_config("vllm", {"x": value})
    with pytest.raises(Refusal, match=r"no false and no null"):
        render_config("vllm", {"x": ["a", value]})


def test_rendering_refuses_a_mapping():
    with pytest.raises(Refusal, match=r"a mapping under 'x'.*JSON text"):
        render_config("vllm", {"x": {"a": 1}})


def test_the_text_does_not_depend_on_the_order():
    config = config_of("vllm", "0.33.0", "cuda-tp2")
    assert render_config("vllm", config) == render_config("vllm", dict(reversed(config.items())))


def test_the_words_of_a_file_follow_each_engine():
    mixed = {"enable-prefix-caching": True, "x": False, "served-model-name": ["a", "b"], "y": {"k": 1}, "e": []}
    assert cli_arguments("vllm", "0.33.0", mixed) == [
        "--enable-prefix-caching",
        *("--served-model-name", "a", "b"),
        *("--y", '{"k": 1}'),
    ]
    assert cli_arguments("sglang", "0.5.23", {"enable-metrics": True, "device": True, "enable-lora": False}) == [
        "--enable-metrics",
        *("--device", "true"),
    ]


plans = st.fixed_dictionaries(
    {
        "device": st.sampled_from(["cuda", "cpu"]),
        "tensor_parallel_size": st.sampled_from([1, 2, 4]),
        "pipeline_parallel_size": st.sampled_from([1, 2]),
        "data_parallel_size": st.sampled_from([1, 2]),
        "expert_parallel": st.booleans(),
        "gpu_memory_utilization": st.floats(0.05, 0.95),
        "kv_cache_memory_bytes": st.none(),
        "max_model_len": st.integers(1, 2**20),
        "max_num_seqs": st.integers(1, 1024),
        "max_num_batched_tokens": st.integers(1, 65536),
        "kv_cache_tokens": st.integers(1, 2**24),
        "kv_cache_dtype": st.sampled_from(["auto", "bfloat16", "fp8"]),
        "prefix_caching": st.sampled_from([True, False, None]),
        "disable_custom_all_reduce": st.booleans(),
        "enforce_eager": st.booleans(),
    }
)
fields = st.fixed_dictionaries(
    {
        "served_names": st.lists(
            st.text(min_size=1).filter(lambda text: ":" not in text and text[0] != "-" and text.isprintable()),
            max_size=1,
        ),
        "text_only": st.booleans(),
        "speculative_tokens": st.integers(0, 4),
        "engine_args": st.sampled_from(
            [{}, {"chat_template": "null"}, {"chat-template": "1e3"}, {"trust_remote_code": True}]
        ),
    }
)


@settings(max_examples=60, deadline=None)
@given(engine_and_version=st.sampled_from([case[1:3] for case in CASES]), sizes=plans, own=fields)
def test_the_file_reads_back_as_the_same_mapping_without_false_or_null(engine_and_version, sizes, own):
    engine, version = engine_and_version
    if version == "0.5.10":
        own["text_only"] = False
    config = engine_config(deployment(engine=engine, engine_version=version) | own, model(), sizes)
    read = yaml.safe_load(render_config(engine, config))
    assert read == config
    values = [item for value in read.values() for item in (value if isinstance(value, list) else [value])]
    assert not any(value is False or value is None for value in values)
    words = cli_arguments(engine, version, read)
    assert words == cli_arguments(engine, version, {name: config[name] for name in read})
    parser_from(flags_for(engine, version)).parse_args(words)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [("vllm", {"enforce-eager": True}), ("sglang", {"cuda-graph-backend-decode": "disabled"})],
)
def test_eager_of_the_deployment_counts_when_the_plan_does_not_say(engine, expected):
    sizes = {name: value for name, value in CUDA_PLAN.items() if name != "enforce_eager"}
    assert expected.items() <= engine_config(deployment(engine=engine, eager=True), model(), sizes).items()
    assert not expected.items() <= engine_config(deployment(engine=engine), model(), sizes).items()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"radix_strategy": "no_buffer"},
            {"mamba-radix-cache-strategy": "no_buffer", "disable-overlap-schedule": True, "page-size": 1},
        ),
    ],
)
def test_options_of_sglang(options, expected):
    config = engine_config(deployment(engine="sglang", sglang=options), model(), plan())
    assert expected.items() <= config.items()


def test_sglang_before_language_model_only():
    with pytest.raises(Refusal, match=r"text_only with SGLang 0\.5\.10"):
        engine_config(deployment(engine="sglang", engine_version="0.5.10", text_only=True), model(), plan())


def test_the_older_sglang_turns_graphs_off_with_its_own_switches():
    config = engine_config(
        deployment(engine="sglang", engine_version="0.5.10", eager=True), model(), plan(enforce_eager=True)
    )
    assert config["disable-cuda-graph"] is True
    assert config["disable-piecewise-cuda-graph"] is True


@pytest.mark.parametrize("parser", ["qwen", "qwen25"])
def test_the_parser_of_another_form_is_refused(parser):
    own = {"tool_call_parser": parser}
    with pytest.raises(Refusal, match=r"qwen3_coder, the parser of the form that this model writes"):
        engine_config(deployment(engine="sglang", engine_args=own), model(), plan())
    older = model(parsers={"sglang": {"tool_call": "qwen", "reasoning": "qwen3"}})
    assert engine_config(deployment(engine="sglang", engine_args=own), older, plan())["tool-call-parser"] == parser
