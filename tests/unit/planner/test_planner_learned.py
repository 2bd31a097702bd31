"""Learning: what a start measured replaces the estimate in the next plan of the same sizes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_examples import H200, SHAPES

from metalserve import catalogue
from metalserve.errors import Refusal
from metalserve.planner import make_plan, measured_start, read_measured

GIB = 1 << 30
MODEL, VERSION = "qwen3.6-35b-a3b-fp8", "0.33.0"
NAME = "NVIDIA L40S"
HOST = catalogue.host_from_shape("1xL40S")


def planned(records=None, host=HOST, image=None, version=VERSION, **wishes):
    return make_plan(MODEL, host, "vllm", version, wishes, measured=records, image=image)


def start(plan, blocks, **more):
    reported = {"num_gpu_blocks": str(blocks), "block_size": str(plan.block_size_tokens)}
    return measured_start(plan, model=MODEL, gpu_name=NAME, reported=reported, **more)


def test_more_than_predicted_is_used_in_the_next_plan():
    first = planned()
    record = start(first, first.num_blocks + 10)
    second = planned([json.loads(json.dumps(record))])
    assert second.num_blocks == first.num_blocks + 10
    # The margin of 1 GiB is gone as well, so the context grows by more than the ten blocks.
    assert second.max_model_len > first.max_model_len
    assert "measured at an earlier start" in second.reasons["predicted_bytes"]
    assert "measured" not in first.reasons["predicted_bytes"]


def test_less_than_predicted_is_used_too():
    first = planned()
    second = planned([start(first, first.num_blocks - 20)])
    assert second.num_blocks == first.num_blocks - 20


def test_what_was_learned_stays():
    first = planned()
    second = planned([start(first, first.num_blocks + 10)])
    third = planned([start(second, second.num_blocks)])
    same = {key: value for key, value in third.as_dict().items() if key != "reasons"}
    assert same == {key: value for key, value in second.as_dict().items() if key != "reasons"}


def test_memory_in_use_after_the_start_sets_the_share():
    first = planned()
    budget = first.gpu_memory_utilization * first.gpu_memory_bytes
    much = planned([start(first, first.num_blocks, used_bytes=int(budget + 5 * GIB))])
    assert much.gpu_memory_utilization < first.gpu_memory_utilization
    assert much.predicted_bytes.outside >= 5 * GIB - 2


@pytest.mark.parametrize(
    "change",
    [
        {"engine_version": "0.32.0"},
        {"gpu_name": "NVIDIA L4"},
        {"model": "qwen3.6-35b-a3b"},
        {"max_num_seqs": 7},
        {"max_num_batched_tokens": 4096},
        {"enforce_eager": True},
        {"text_only": True},
        {"speculative_tokens": 1},
        {"tensor_parallel_size": 2},
        {"gpu_memory_bytes": 30 * GIB},
        {"image": "other"},
        {"block_size_tokens": 544},
        {"schema": 99},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_start_of_other_sizes_does_not_count(change):
    first = planned(image="this")
    record = start(first, first.num_blocks + 10, image="this")
    assert planned([record], image="this").num_blocks == first.num_blocks + 10
    assert planned([{**record, **change}], image="this") == first


def test_the_least_of_several_starts_counts():
    first = planned()
    records = [start(first, first.num_blocks + more) for more in (9, 3, 6)]
    assert planned(records).num_blocks == first.num_blocks + 3


@pytest.mark.parametrize("name", ["qwen3_8b", "q_graph_090"])
def test_a_measured_h200_start_predicts_the_share_of_another(name):
    """The start at 0.90 tells what the same sizes leave at another share."""
    run = next(run for run in H200["runs"] if run["name"] == name)
    model = SHAPES.get(run["model"]) or run["model"]
    host = catalogue.host_from_shape("1xH200")
    wishes = {
        "max_sequences": run["max_num_seqs"],
        "context_length": run["max_model_len"],
        "text_only": run["text_only"],
        "gdn_prefill_backend": "triton",
    }
    first = make_plan(model, host, "vllm", H200["vllm"], wishes)
    assert first.max_num_batched_tokens == run["max_num_batched_tokens"]
    record = {
        **measured_start(
            first,
            model=run["model"] if isinstance(model, str) else "model",
            gpu_name=host["gpus"][0]["name"],
            reported={"num_gpu_blocks": run["num_blocks"], "block_size": run["block_size"]},
            text_only=run["text_only"],
        ),
        "gpu_memory_utilization": run["gpu_memory_utilization"],
    }
    second = make_plan(model, host, "vllm", H200["vllm"], wishes, measured=[record])
    more = second.gpu_memory_utilization * second.gpu_memory_bytes - run["requested_bytes"]
    block = run["available_kv_bytes"] // run["num_blocks"]
    assert second.predicted_bytes.kv == pytest.approx(run["available_kv_bytes"] + more, abs=1.01 * block)


@settings(deadline=None, max_examples=40)
@given(st.integers(-60, 200), st.one_of(st.none(), st.integers(0, 48 * GIB)))
def test_a_learned_plan_keeps_the_rules(more, used):
    first = planned()
    try:
        found = planned([start(first, first.num_blocks + more, used_bytes=used)])
    except Refusal:
        return
    assert found.max_concurrency >= 1
    sizes = found.as_dict()["predicted_bytes"]
    assert all(size >= 0 for size in sizes.values())
    assert found.gpu_memory_utilization <= 0.95
    if used is None:
        assert sum(sizes.values()) <= found.gpu_memory_bytes


def test_nothing_is_measured_where_nothing_is_estimated():
    fixed = planned(kv_cache_memory_bytes=2 * GIB, context_length=8192)
    with pytest.raises(Refusal, match="a start of vllm on cuda with a fixed KV pool"):
        start(fixed, 10)
    other = make_plan(MODEL, catalogue.host_from_shape("1xH100"), "sglang")
    with pytest.raises(Refusal, match="a start of sglang on cuda"):
        start(other, 10)


def test_an_engine_with_other_blocks_is_refused():
    with pytest.raises(Refusal, match="runs with blocks of 16 tokens, the plan says"):
        measured_start(planned(), model=MODEL, gpu_name=NAME, reported={"num_gpu_blocks": 10, "block_size": 16})


def test_a_report_without_blocks_is_refused():
    with pytest.raises(Refusal, match="a report of the engine without a readable 'num_gpu_blocks'"):
        measured_start(planned(), model=MODEL, gpu_name=NAME, reported={})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_blocks": "many"}, "has num_blocks 'many'. Needed: num_blocks as int"),
        ({"num_blocks": True}, "has num_blocks True"),
        ({"num_blocks": 0}, "has sizes out of range"),
        ({"gpu_memory_utilization": 1.5}, "has sizes out of range"),
        ({"colour": 1}, "has the unknown field colour"),
    ],
)
def test_a_damaged_record_is_refused(change, message):
    record = start(planned(), 100)
    with pytest.raises(Refusal, match=message):
        read_measured([{**record, **change}])


def test_an_incomplete_record_is_refused():
    record = start(planned(), 100)
    del record["num_blocks"]
    with pytest.raises(Refusal, match="a record of an earlier start has no num_blocks"):
        read_measured([record])
    with pytest.raises(Refusal, match="a record of an earlier start is a str"):
        read_measured(["text"])


def test_a_start_that_took_more_lowers_plans_of_other_sizes():
    first = planned(context_length=8192, max_sequences=16)
    bad = start(first, first.num_blocks - 30, used_bytes=int(0.92 * first.gpu_memory_bytes) + 5 * GIB)
    other, warned = (planned(records, context_length=8192, max_sequences=8) for records in (None, [bad]))
    assert warned.num_blocks < other.num_blocks - 30
    assert warned.gpu_memory_utilization < other.gpu_memory_utilization
    assert "lowered after an earlier start took" in warned.reasons["predicted_bytes"]
    assert "GiB outside of its budget more than estimated" in warned.reasons["predicted_bytes"]


def test_a_start_that_took_less_says_nothing_about_other_sizes():
    first = planned(context_length=8192, max_sequences=16)
    good = start(first, first.num_blocks + 30)
    assert planned([good], context_length=8192, max_sequences=8) == planned(context_length=8192, max_sequences=8)
