"""The KV arithmetic against vLLM's own planner, started engines and public server logs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_examples import CAPACITY, FIXTURES, H200, PREDICTED, SHAPES, TINY

from metalserve import catalogue
from metalserve.errors import Refusal
from metalserve.planner import kv_capacity, make_plan
from metalserve.planner.kv import layout
from metalserve.planner.shape import read_shape
from metalserve.planner.versions import behaviour

GIB = 1 << 30
QWEN = catalogue.model("qwen3.6-35b-a3b").shape


def config_of(name):
    return SHAPES.get(name) or catalogue.model(name).shape


@pytest.mark.parametrize(
    "row",
    CAPACITY["rows"],
    ids=lambda r: f"{r['tensor_parallel_size']}-{r['kv_cache_dtype']}-{r['gdn_prefill_backend']}",
)
def test_equal_to_the_engines_own_planner(row):
    found = kv_capacity(
        QWEN,
        tensor_parallel_size=row["tensor_parallel_size"],
        available_bytes=CAPACITY["available_bytes"],
        max_model_len=CAPACITY["max_model_len"],
        kv_cache_dtype=row["kv_cache_dtype"],
        gdn_prefill_backend=row["gdn_prefill_backend"],
        engine_version="0.33.0",
    )
    assert found.block_size_tokens == row["block_size"]
    assert found.block_bytes == 10 * row["page_bytes"]
    assert found.num_blocks == row["num_blocks"]
    assert found.capacity_tokens == row["kv_tokens"]
    assert found.max_concurrency == pytest.approx(row["concurrency"], abs=0.01)


def test_draft_tokens_add_a_layer_and_blocks():
    found = kv_capacity(
        QWEN,
        tensor_parallel_size=1,
        available_bytes=20 * GIB,
        max_model_len=262144,
        gdn_prefill_backend="flashinfer",
        num_speculative_tokens=2,
    )
    assert (found.block_size_tokens, found.num_blocks, found.capacity_tokens) == (1088, 876, 897024)


def test_without_prefix_caching_one_state_block_is_enough():
    found = kv_capacity(
        QWEN, tensor_parallel_size=1, available_bytes=20 * GIB, max_model_len=262144, prefix_caching=False
    )
    assert (found.num_blocks, found.capacity_tokens) == (992, 1031931)


@pytest.mark.parametrize(("available_gib", "tokens", "concurrency"), [(5.98, 567978, 4.33), (6.01, 569878, 4.35)])
def test_public_logs_of_0_24_with_fp8_cache(available_gib, tokens, concurrency):
    # noonghunna/club-3090 issues 612 and 652: NVFP4 weights, FP8 KV, 131072 tokens, prefix caching on.
    found = kv_capacity(
        QWEN,
        tensor_parallel_size=1,
        available_bytes=int(available_gib * GIB),
        max_model_len=131072,
        kv_cache_dtype="fp8",
        engine_version="0.24.0",
    )
    assert found.capacity_tokens == tokens
    assert round(found.max_concurrency, 2) == concurrency


def test_public_log_of_a_27b_on_two_cards():
    found = kv_capacity(
        catalogue.model("qwen3.5-27b").shape,
        tensor_parallel_size=2,
        available_bytes=int(4.99 * GIB),
        max_model_len=131072,
        kv_cache_dtype="fp8",
        engine_version="0.24.0",
    )
    assert found.block_size_tokens == 1568
    assert found.capacity_tokens == 302921
    assert round(found.max_concurrency, 2) == 2.31


@pytest.mark.parametrize("run", H200["runs"] + PREDICTED["runs"], ids=lambda r: r["name"])
def test_equal_to_the_started_engines(run):
    found = kv_capacity(
        config_of(run["model"]),
        tensor_parallel_size=run.get("tensor_parallel_size", 1),
        num_speculative_tokens=run.get("draft_tokens", 0),
        available_bytes=run["available_kv_bytes"],
        max_model_len=run["max_model_len"],
        kv_cache_dtype=run["kv_cache_dtype"],
        prefix_caching=run["prefix_caching"],
        max_num_batched_tokens=run["max_num_batched_tokens"],
        engine_version=H200["vllm"],
    )
    assert found.block_size_tokens == run["block_size"]
    assert found.num_blocks == run["num_blocks"]
    assert found.capacity_tokens == run["kv_tokens"]
    assert round(found.max_concurrency, 2) == run["max_concurrency"]


CPU_STARTS = json.loads((FIXTURES / "vllm_cpu_starts.json").read_text())["rows"]


@pytest.mark.parametrize("row", CPU_STARTS, ids=lambda r: r["name"])
def test_equal_to_the_started_cpu_engine(row):
    plan = make_plan(
        row["config"] or TINY,
        catalogue.host_from_shape("cpu-24GiB"),
        engine_version="0.32.0",
        wishes={
            "kv_cache_memory_bytes": row["kv_cache_memory_bytes"],
            "context_length": row["max_model_len"],
            "max_sequences": row["max_num_seqs"],
            "max_batched_tokens": row["max_num_batched_tokens"],
        },
    )
    assert plan.block_size_tokens == row["block_size"]
    assert plan.kv_cache_tokens == row["kv_tokens"]
    assert plan.max_concurrency == row["max_concurrency"]


def test_sliding_window_counts_one_more_batch_from_0_32_on():
    shape = read_shape(catalogue.model("gemma-3-27b-it").shape)
    old, new = (
        layout(shape, behaviour(version), tensor_parallel_size=1, max_batched_tokens=8192)
        for version in ("0.24", "0.33")
    )
    assert old.window_tokens == 1023 + 8192
    assert new.window_tokens == 1023 + 2 * 8192
    # 10 full layers give groups of ten; 52 sliding ones make six, each with one block more for the window's edge.
    assert [group.kind for group in old.groups] == ["full"] + ["sliding"] * 6
    assert old.blocks_per_request(32768) == 2048 + 6 * (576 + 1)
    assert new.blocks_per_request(32768) == 2048 + 6 * (1088 + 1)


def test_between_known_releases_the_larger_window_is_planned():
    shape = read_shape(catalogue.model("gemma-3-27b-it").shape)
    assert layout(shape, behaviour("0.27.1"), tensor_parallel_size=1).window_tokens == 1023 + 2 * 8192
    assert not behaviour("0.27.1").exact_version


def test_0_17_reports_blocks_over_groups():
    old = kv_capacity(
        QWEN, tensor_parallel_size=1, available_bytes=20 * GIB, max_model_len=262144, engine_version="0.17.1"
    )
    assert old.capacity_tokens == 992 // 4 * 1056


def test_pipeline_stages_hold_their_own_layers():
    one, two = (
        kv_capacity(
            QWEN,
            tensor_parallel_size=1,
            available_bytes=20 * GIB,
            max_model_len=262144,
            pipeline_parallel_size=stages,
        )
        for stages in (1, 2)
    )
    assert two.block_bytes * 2 == one.block_bytes
    assert two.num_blocks in (2 * one.num_blocks, 2 * one.num_blocks + 1)


def test_chunked_attention_keeps_every_token():
    plain = dict(catalogue.model("llama-3.3-70b-instruct").shape)
    kinds = ["chunked_attention"] * 60 + ["full_attention"] * 20
    chunked = plain | {"layer_types": kinds, "attention_chunk_size": 8192}
    full, local = (
        kv_capacity(config, tensor_parallel_size=8, available_bytes=20 * GIB, max_model_len=131072)
        for config in (plain, chunked)
    )
    assert local == full


def test_equal_numbers_of_layers_make_two_groups():
    shape = read_shape(catalogue.model("gpt-oss-20b").shape)
    cut = layout(shape, behaviour("0.33"), tensor_parallel_size=1)
    assert [(group.kind, len(group.layers)) for group in cut.groups] == [("full", 12), ("sliding", 12)]


def test_one_request_too_long_names_the_longest():
    with pytest.raises(Refusal, match="context_length at most 2112,") as caught:
        kv_capacity(QWEN, tensor_parallel_size=1, available_bytes=GIB // 5, max_model_len=262144)
    assert "0.2 GiB for the KV cache on each GPU" in str(caught.value)


def test_the_longest_length_of_the_refusal_fits():
    shape = read_shape(QWEN)
    cut = layout(shape, behaviour("0.33"), tensor_parallel_size=1)
    longest = cut.longest_tokens(3 * GIB, 262144)
    assert cut.request_bytes(longest) <= 3 * GIB < cut.request_bytes(longest + 1)


def test_other_engines_have_no_such_blocks():
    with pytest.raises(Refusal, match="has no blocks of this kind"):
        kv_capacity(QWEN, tensor_parallel_size=1, available_bytes=GIB, max_model_len=1, engine="sglang")


def test_unknown_kv_dtype():
    with pytest.raises(Refusal, match="kv_cache_dtype 'int3'"):
        kv_capacity(QWEN, tensor_parallel_size=1, available_bytes=GIB, max_model_len=1, kv_cache_dtype="int3")


MODELS = st.sampled_from(["qwen3.6-35b-a3b", "qwen3-32b", "gemma-3-27b-it", "deepseek-v3", "gpt-oss-20b"])


def tokens(model, available, length):
    try:
        found = kv_capacity(
            catalogue.model(model).shape, tensor_parallel_size=2, available_bytes=available, max_model_len=length
        )
    except Refusal:
        return 0, 0, 0.0
    return found.num_blocks, found.capacity_tokens, found.max_concurrency


@given(MODELS, st.integers(0, 200 * GIB), st.integers(0, 50 * GIB), st.integers(1, 131072))
def test_more_memory_never_gives_less(model, available, more, length):
    less, greater = tokens(model, available, length), tokens(model, available + more, length)
    assert all(a <= b for a, b in zip(less, greater, strict=True))


@given(MODELS, st.integers(GIB, 200 * GIB), st.integers(1, 65536), st.integers(0, 65536))
def test_longer_context_never_gives_more_concurrency(model, available, length, more):
    assert tokens(model, available, length + more)[2] <= tokens(model, available, length)[2]


@given(MODELS, st.integers(0, 100 * GIB), st.integers(1, 131072))
def test_what_is_reported_fits(model, available, length):
    shape = read_shape(catalogue.model(model).shape)
    cut = layout(shape, behaviour("0.33"), tensor_parallel_size=2)
    blocks, _, _ = tokens(model, available, length)
    assert blocks * cut.block_bytes <= available
    if blocks:
        assert cut.request_bytes(length) <= available


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size 0. Needed: a whole number, at least 1"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size True"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size 0"),
        ({"pipeline_parallel_size": 99}, "pipeline_parallel_size 99 for 4 layers"),
        ({"max_model_len": 0}, "max_model_len 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens 0"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens -1. Needed: a whole number, at least 0"),
        ({"gdn_prefill_backend": "auto"}, "gdn_prefill_backend 'auto'. Needed: one of triton, flashinfer"),
        ({"engine_version": "0.10.0"}, "vllm 0.10.0. Needed: 0.17.0 or newer"),
        ({"engine_version": "latest"}, "engine version 'latest'"),
        ({"config": [1]}, "the config is a list"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(change, message):
    asked = {"config": TINY, "tensor_parallel_size": 1, "available_bytes": 1 << 30, "max_model_len": 4096, **change}
    with pytest.raises(Refusal, match=message):
        kv_capacity(asked.pop("config"), **asked)


def test_the_engines_own_names_of_kv_types_are_taken():
    def capacity(kind):
        return kv_capacity(
            TINY, tensor_parallel_size=1, available_bytes=1 << 30, max_model_len=4096, kv_cache_dtype=kind
        )

    assert capacity("fp8") == capacity("fp8_e4m3") == capacity("fp8_e5m2")
    assert capacity("auto") == capacity("bfloat16") == capacity("float16") != capacity("fp8")
