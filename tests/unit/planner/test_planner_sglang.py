"""SGLang's default fraction against its own resolver, and the division of a budget into pools."""

import json

import pytest
from planner_examples import FIXTURES

from metalserve import catalogue
from metalserve.errors import Refusal
from metalserve.planner import make_plan
from metalserve.planner.kv import state_bytes
from metalserve.planner.plan_types import Wishes
from metalserve.planner.resolve import resolve
from metalserve.planner.sglang import serving_of
from metalserve.planner.sglang_rules import Serving, default_fraction, pools, tier
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
    found = pools(QWEN, budget_gib * GIB, tp, Serving(context_tokens=262144, kv_element_bytes=kv_bytes))
    assert abs(found.slots - slots) <= 1
    assert found.tokens == pytest.approx(tokens, rel=0.02)
    assert abs(found.max_running - running) <= 1


def test_a_budget_without_room_for_one_request():
    assert pools(QWEN, 0.3 * GIB, 1, Serving(context_tokens=1024)) is None
    assert pools(PLAIN, 1000, 1, Serving(context_tokens=1024)) is None
    assert pools(PLAIN, -5 * GIB, 1, Serving(context_tokens=1024)) is None


def test_without_radix_cache_a_request_holds_one_slot():
    kept, dropped = (pools(QWEN, 10 * GIB, 1, Serving(context_tokens=8192, radix_cache=kind)) for kind in (True, False))
    assert kept.slots == dropped.slots
    assert dropped.max_running == dropped.slots
    assert kept.max_running == kept.slots // 5


def test_draft_tokens_take_state_and_cap_running_requests():
    plain, draft = (pools(QWEN, 40 * GIB, 1, Serving(context_tokens=8192, draft_tokens=tokens)) for tokens in (0, 4))
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


def test_a_window_saves_memory_only_where_sglang_has_a_pool_for_it():
    gemma, oss = (read_shape(catalogue.model(key).shape) for key in ("gemma-3-27b-it", "gpt-oss-20b"))
    assert pools(gemma, 10 * GIB, 1, Serving(context_tokens=8192)).sliding_tokens == 0
    made = pools(oss, 10 * GIB, 1, Serving(context_tokens=8192))
    assert made.sliding_tokens == int(made.tokens * 0.8)


def plan_with(model, host, **wishes):
    return make_plan(model, catalogue.host_from_shape(host), "sglang", None, wishes)


def test_a_smaller_state_and_a_larger_ratio_give_more_sequences():
    plain = plan_with("qwen3.6-35b-a3b-fp8", "1xH100")
    small = plan_with("qwen3.6-35b-a3b-fp8", "1xH100", sglang={"state_dtype": "bfloat16"})
    ratio = plan_with("qwen3.6-35b-a3b-fp8", "1xH100", sglang={"state_memory_ratio": 3.0})
    lazy = plan_with("qwen3.6-35b-a3b-fp8", "1xH100", sglang={"radix_strategy": "extra_buffer_lazy"})
    assert small.max_num_seqs > 1.9 * plain.max_num_seqs
    assert ratio.max_num_seqs > plain.max_num_seqs
    assert ratio.kv_cache_tokens < plain.kv_cache_tokens
    assert lazy.max_num_seqs == lazy.state_slots // 4


def test_without_prefix_caching_the_limit_sizes_the_pools():
    """SGLang keeps a slot for each request it may run, and gives the rest to the KV cache."""
    found = plan_with("qwen3.6-35b-a3b-fp8", "1xH200", prefix_caching=False, max_sequences=32)
    assert found.state_slots == found.max_num_seqs == 32
    cached = plan_with("qwen3.6-35b-a3b-fp8", "1xH200", max_sequences=32)
    assert found.kv_cache_tokens > 1.5 * cached.kv_cache_tokens


def test_the_static_fraction_of_the_deployment():
    found = plan_with("qwen3-32b-fp8", "1xH100", sglang={"static_fraction": 0.7})
    assert found.gpu_memory_utilization == 0.7
    assert "sglang.static_fraction" in found.reasons["gpu_memory_utilization"]


def test_a_checkpoint_that_declares_an_fp8_cache_gets_one():
    config = dict(catalogue.model("qwen3-32b").shape)
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    declared, plain = (resolve(model) for model in (config, "qwen3-32b"))
    assert serving_of(declared, Wishes(), 8192, 8192).kv_element_bytes == 1
    assert serving_of(declared, Wishes(kv_cache_dtype="bfloat16"), 8192, 8192).kv_element_bytes == 2
    assert serving_of(plain, Wishes(), 8192, 8192).kv_element_bytes == 2


@pytest.mark.parametrize(
    ("model", "wishes", "words"),
    [
        ("qwen3-32b-fp8", {"sglang": {"radix_strategy": "extra_buffer_lazy"}}, "keeps no state"),
        ("qwen3-32b-fp8", {"sglang": {"static_fraction": 0.8}, "memory_share": 0.8}, "one of them"),
        ("qwen3-32b-fp8", {"sglang": {"static_fractoin": 0.8}}, "the nearest is static_fraction"),
        ("qwen3-32b-fp8", {"sglang": {"static_fraction": 1.5}}, "from 0.05 to 0.99"),
        ("qwen3-32b-fp8", {"sglang": {"max_queued_requests": 1.5}}, "a number from 1"),
        ("qwen3-32b-fp8", {"sglang": {"schedule_policy": "lifo"}}, "one of lpm"),
        ("qwen3-32b-fp8", {"sglang": {"disaggregation_transfer": "nixl"}}, "without sglang.disaggregation_mode"),
        ("qwen3-32b-fp8", {"sglang": ["x"]}, "a mapping"),
    ],
)
def test_refused_options(model, wishes, words):
    with pytest.raises(Refusal, match=words):
        plan_with(model, "1xH100", **wishes)


DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "tie_word_embeddings": False,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
CPU_HOST = {"gpus": [], "memory": {"total_bytes": 24 * GIB}}


def test_a_cpu_host_has_a_fixed_number_of_tokens():
    # 2 layers x 2 KV heads x (64 + 64) x 2 bytes = 1024 bytes a token; a server started with it reported 16384.
    found = make_plan(DENSE, CPU_HOST, "sglang", None, {"kv_cache_memory_bytes": 16 * 2**20, "max_sequences": 16})
    assert (found.kv_cache_tokens, found.max_num_seqs, found.device) == (16384, 16, "cpu")
    assert found.gpu_memory_utilization == 0.9


@pytest.mark.parametrize(
    ("model", "wishes", "words"),
    [
        ("qwen3.6-35b-a3b", {"kv_cache_memory_bytes": GIB}, "Gated DeltaNet layers"),
        ("qwen3-32b-fp8", {"kv_cache_memory_bytes": GIB}, "quantised weights"),
        (DENSE, {"kv_cache_memory_bytes": GIB, "gpus": [0]}, "no GPU indexes"),
        (DENSE, {}, "set `kv_cache_memory_bytes`"),
        (DENSE, {"kv_cache_memory_bytes": GIB, "tensor_parallel_size": 2}, "parallel size 1"),
        (DENSE, {"kv_cache_memory_bytes": GIB, "kv_cache_dtype": "fp8"}, "neither"),
        (DENSE, {"kv_cache_memory_bytes": 2048, "context_length": 4096}, "holds 2 tokens"),
        (DENSE, {"kv_cache_memory_bytes": 30 * GIB}, "of memory"),
    ],
)
def test_refused_on_a_cpu_host(model, wishes, words):
    with pytest.raises(Refusal, match=words):
        make_plan(model, CPU_HOST, "sglang", None, wishes)
