"""SGLang's default fraction against its own resolver, and the division of a budget into pools."""

import json

import pytest
from planner_examples import FIXTURES

from metalserve import catalogue
from metalserve.planner import make_plan
from metalserve.planner.kv import state_bytes
from metalserve.planner.sglang import default_fraction, pools, tier
from metalserve.planner.shape import read_shape

GIB = 1 << 30
RESOLVED = json.loads((FIXTURES / "sglang_0523.json").read_text())
QWEN = read_shape(catalogue.model("qwen3.6-35b-a3b").shape)
PLAIN = read_shape(catalogue.model("qwen3-32b").shape)


@pytest.mark.parametrize("row", RESOLVED["text_only_model"], ids=lambda r: r["gpu"])
def test_default_fraction_equals_the_resolver(row):
    assert default_fraction(PLAIN, row["total_mib"]) == row["fraction"]
    assert tier(row["total_mib"], 1) == (row["chunk"], row["decode"])


@pytest.mark.parametrize("row", RESOLVED["qwen36_on_h100"], ids=str)
def test_default_fraction_of_a_model_with_a_vision_tower(row):
    found = default_fraction(
        QWEN, 81559, tensor_parallel_size=row["tensor_parallel_size"], max_running=row.get("max_running")
    )
    assert found == pytest.approx(row["fraction"], abs=1e-6)


def test_a_slot_of_the_hybrid():
    assert QWEN.linear_layers * state_bytes(QWEN, 1, 0) == 64_389_120


@pytest.mark.parametrize(
    ("budget_gib", "tp", "kv_bytes", "slots", "tokens", "running"),
    [
        (5.0, 1, 2, 38, 142_000, 7),
        (24.9, 1, 2, 195, 691_000, 39),
        (24.9, 1, 1, 195, 1_380_000, 39),
        (26.7, 2, 2, 420, 1_470_000, 84),
        (50.0, 1, 2, 393, 1_380_000, 78),
    ],
)
def test_worked_examples(budget_gib, tp, kv_bytes, slots, tokens, running):
    # The budgets of the examples are rounded to 0.1 GiB, so slots may differ by one and tokens by two in a hundred.
    found = pools(QWEN, budget_gib * GIB, tensor_parallel_size=tp, context_tokens=262144, kv_element_bytes=kv_bytes)
    assert abs(found.slots - slots) <= 1
    assert found.tokens == pytest.approx(tokens, rel=0.02)
    assert abs(found.max_running - running) <= 1


def test_a_budget_without_room_for_one_request():
    assert pools(QWEN, 0.3 * GIB, tensor_parallel_size=1, context_tokens=1024) is None
    assert pools(PLAIN, 1000, tensor_parallel_size=1, context_tokens=1024) is None


def test_without_radix_cache_a_request_holds_one_slot():
    kept, dropped = (
        pools(QWEN, 10 * GIB, tensor_parallel_size=1, context_tokens=8192, radix_cache=kind) for kind in (True, False)
    )
    assert kept.slots == dropped.slots
    assert dropped.max_running == dropped.slots
    assert kept.max_running == kept.slots // 5


def test_draft_tokens_take_state_and_cap_running_requests():
    plain, draft = (
        pools(QWEN, 40 * GIB, tensor_parallel_size=1, context_tokens=8192, draft_tokens=tokens) for tokens in (0, 4)
    )
    assert draft.slots < plain.slots
    assert draft.tokens < plain.tokens
    assert draft.max_running <= 48


def test_plan_uses_the_default_fraction_where_it_fits():
    found = make_plan("qwen3.6-35b-a3b-fp8", catalogue.host_from_shape("1xH100"), "sglang")
    assert found.engine_version == "0.5.23"
    assert found.gpu_memory_utilization == 0.768
    assert found.state_slots // 5 == found.max_num_seqs
    assert found.max_model_len == 262144


def test_plan_raises_the_fraction_for_bf16_on_80_gib():
    found = make_plan("qwen3.6-35b-a3b", catalogue.host_from_shape("1xH100"), "sglang")
    assert found.gpu_memory_utilization == 0.9
    assert found.max_num_seqs in (6, 7, 8)
    assert "leaves no room" in found.reasons["gpu_memory_utilization"]


def test_eight_gpus_become_replicas_of_four():
    found = make_plan("qwen3.6-35b-a3b-fp8", catalogue.host_from_shape("8xH800"), "sglang")
    assert (found.tensor_parallel_size, found.data_parallel_size) == (4, 2)
    # SGLang's replicas are independent: each keeps all experts.
    assert not found.expert_parallel


def test_memory_share_becomes_the_fraction():
    found = make_plan("qwen3.6-35b-a3b-fp8", catalogue.host_from_shape("1xH200"), "sglang", None, {"memory_share": 0.5})
    assert 0.5 <= found.gpu_memory_utilization < 0.51
