"""Whole plans: the choices, their reasons, and that the same input gives the same plan."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_examples import TINY

from metalserve import catalogue
from metalserve.errors import Refusal
from metalserve.planner import gpu_memory_utilization, make_plan, read_wishes, tensor_parallel_problems
from metalserve.planner.shape import read_shape

GIB = 1 << 30


def plan(model, shape, **wishes):
    version = wishes.pop("engine_version", None)
    return make_plan(model, catalogue.host_from_shape(shape), "vllm", version, wishes)


@pytest.mark.parametrize("model", ["qwen3.6-35b-a3b-fp8", "qwen3.6-35b-a3b"])
def test_replicas_begin_where_kv_heads_would_be_copied(model):
    found = plan(model, "8xH800")
    assert (found.tensor_parallel_size, found.data_parallel_size, found.expert_parallel) == (2, 4, True)
    assert found.gpus_used == tuple(range(8))
    assert "without copies of the 2 KV heads" in found.reasons["tensor_parallel_size"]
    assert not found.disable_custom_all_reduce
    # Against one replica on all eight: 24 million tokens and 6.4.
    one = plan(model, "8xH800", tensor_parallel_size=4, data_parallel_size=1)
    assert found.kv_cache_tokens * 4 > 2 * one.kv_cache_tokens


def test_the_next_larger_size_that_fails_is_named():
    found = plan("qwen3-30b-a3b-fp8", "8xH800")
    assert (found.tensor_parallel_size, found.data_parallel_size) == (2, 4)
    assert "; 4 fails: each expert keeps" in found.reasons["tensor_parallel_size"]


def test_kv_heads_are_copied_where_nothing_less_fits():
    host = catalogue.host_from_shape("8xH100")
    for row in host["gpus"]:
        row.update(memory_usable_bytes=18 << 30, memory_total_bytes=18 << 30)
    # 12.7 GiB of weights on each of four leave no room; the 4 KV heads are copied on eight.
    found = make_plan("qwen3.5-27b", host)
    assert (found.tensor_parallel_size, found.data_parallel_size) == (8, 1)
    assert "the smallest size above the 4 KV heads on which the context fits" in found.reasons["tensor_parallel_size"]


def test_other_divisions_are_told_with_what_they_hold():
    found = plan("qwen3.6-35b-a3b", "8xH800")
    largest, separate = found.alternatives
    single = plan("qwen3.6-35b-a3b", "8xH800", tensor_parallel_size=8)
    assert largest.startswith("tensor_parallel_size 8 and data_parallel_size 1 answer a single request faster")
    assert f"would hold {single.kv_cache_tokens / 1e6:.1f}M tokens" in largest
    two = plan("qwen3.6-35b-a3b", "2xH800")
    assert separate.startswith("4 deployments of TP 2 (`gpus: 2` each) would hold ")
    assert f"{4 * two.kv_cache_tokens / 1e6:.1f}M tokens together, and restart one by one" in separate
    # The same when a deployment insists on the bad size.
    assert single.alternatives[0] == (
        "tensor_parallel_size 2 with data_parallel_size 4 would hold "
        f"{4 * found.kv_cache_tokens / 1e6:.1f}M tokens together"
    )
    assert single.alternatives[1] == separate


def test_the_latent_of_mla_is_on_every_gpu():
    found = plan("deepseek-v3", "8xH200")
    assert found.tensor_parallel_size == 8
    assert "every GPU keeps the whole latent of MLA" in found.reasons["tensor_parallel_size"]
    assert found.alternatives[0].startswith("tensor_parallel_size 1 with data_parallel_size 8 would hold ")


def test_over_pcie_no_larger_split_is_praised():
    found = plan("qwen3.6-35b-a3b-fp8", "4xL40S")
    assert (found.tensor_parallel_size, found.data_parallel_size) == (1, 4)
    (separate,) = found.alternatives
    assert separate.startswith("2 deployments of TP 2")


@pytest.mark.parametrize(("model", "shape"), [("qwen3-32b", "8xH100"), ("qwen3.6-35b-a3b", "1xH200")])
def test_nothing_is_weighed_where_there_is_nothing_to_weigh(model, shape):
    assert plan(model, shape).alternatives == ()


def test_replicas_of_experts_pay_for_talking_to_all_gpus():
    shared, alone = plan("qwen3.6-35b-a3b", "8xH800"), plan("qwen3.6-35b-a3b", "2xH800")
    assert shared.predicted_bytes.outside > alone.predicted_bytes.outside
    dense, half = plan("qwen3.5-27b", "8xH100"), plan("qwen3.5-27b", "4xH100")
    assert (dense.tensor_parallel_size, dense.data_parallel_size) == (4, 2)
    assert dense.predicted_bytes.outside == half.predicted_bytes.outside


def test_bf16_on_two_a100():
    found = plan("qwen3.6-35b-a3b", "2xA100-SXM4-80GB")
    assert found.tensor_parallel_size == 2
    assert found.max_model_len == 262144
    # The engine's own default on a card with A100 in its name.
    assert found.max_num_batched_tokens == 2048
    # Triton prefill on compute capability 8.0: no checkpoint block, no alignment to 64.
    assert found.block_size_tokens == 1056


def test_hopper_uses_flashinfer_blocks_from_0_33_on():
    assert plan("qwen3.6-35b-a3b", "1xH200").block_size_tokens == 1088
    assert plan("qwen3.6-35b-a3b", "1xH200", engine_version="0.32.0").block_size_tokens == 1056
    assert plan("qwen3.6-35b-a3b", "1xH200", gdn_prefill_backend="triton").block_size_tokens == 1056


def test_prefix_caching_of_hybrids_follows_the_release():
    assert not plan("qwen3.6-35b-a3b", "1xH200", engine_version="0.24.0").prefix_caching
    assert plan("qwen3.6-35b-a3b", "1xH200").prefix_caching
    assert plan("qwen3-32b", "1xH200", engine_version="0.24.0").prefix_caching


@pytest.mark.parametrize(("version", "share"), [("0.17.1", 0.90), ("0.20.2", 0.92), ("0.33.0", 0.92)])
def test_share_never_above_the_releases_default_with_vision(version, share):
    assert plan("qwen3.6-35b-a3b", "1xH200", engine_version=version).gpu_memory_utilization == share


def test_pcie_prefers_replicas_and_no_custom_all_reduce():
    found = plan("qwen3-32b", "4xL40S")
    assert (found.tensor_parallel_size, found.data_parallel_size) == (2, 2)
    assert found.disable_custom_all_reduce
    assert "PCIe" in found.reasons["tensor_parallel_size"]


def test_a_gpu_that_no_split_takes_is_named():
    found = plan("qwen3-235b-a22b-fp8", "3xB200", tensor_parallel_size=2)
    assert found.gpus_used == (0, 1)
    assert "GPU 2 stays unused" in found.reasons["gpus_used"]


def test_three_gpus_become_three_replicas():
    found = plan("qwen3.6-35b-a3b-fp8", "3xH100")
    assert (found.tensor_parallel_size, found.data_parallel_size, found.expert_parallel) == (1, 3, True)


def test_kv_heads_that_are_copied_are_mentioned():
    found = plan("qwen3.6-35b-a3b", "8xH100", tensor_parallel_size=8)
    assert "beyond 2 the KV heads are copied" in found.reasons["tensor_parallel_size"]


def test_context_shrinks_to_what_fits_when_none_is_wished():
    found = plan("qwen3.6-35b-a3b-fp8", "1xL40S")
    assert 2048 <= found.max_model_len < 262144
    assert found.max_concurrency >= 1
    assert "the longest that fits" in found.reasons["max_model_len"]


def test_sequences_stay_below_what_the_blocks_can_run():
    found = plan("qwen3.6-35b-a3b", "2xL40S")
    assert found.max_num_seqs * 7 <= found.num_blocks
    assert "short requests" in found.reasons["max_num_seqs"]


def test_fp8_cache_needs_a_batch_of_one_block():
    found = plan("qwen3.6-35b-a3b", "2xA100-SXM4-80GB", kv_cache_dtype="fp8")
    assert found.block_size_tokens == 2096
    assert found.max_num_batched_tokens >= 2096


def test_the_checkpoints_own_kv_dtype_is_used_and_said():
    found = plan("qwen3.6-35b-a3b-nvfp4", "1xH100")
    assert found.kv_cache_dtype == "auto"
    assert "declares fp8" in found.reasons["kv_cache_dtype"]
    assert found.block_size_tokens == 2112


def test_memory_share_bounds_the_whole_engine():
    whole, half = plan("qwen3.6-35b-a3b-fp8", "1xH200"), plan("qwen3.6-35b-a3b-fp8", "1xH200", memory_share=0.5)
    assert half.gpu_memory_utilization < 0.5 < whole.gpu_memory_utilization
    taken = sum(half.as_dict()["predicted_bytes"].values())
    assert taken <= 0.5 * half.gpu_memory_bytes


def test_fixed_pool_gives_exact_blocks_and_no_share():
    found = plan("qwen3.6-35b-a3b-fp8", "1xH100", kv_cache_memory_bytes=20 * GIB, gdn_prefill_backend="triton")
    assert found.gpu_memory_utilization is None
    assert (found.num_blocks, found.kv_cache_tokens) == (992, 1019791)


def test_text_only_and_eager_leave_more_for_the_cache():
    plain = plan("qwen3.6-35b-a3b-fp8", "1xH100")
    text = plan("qwen3.6-35b-a3b-fp8", "1xH100", text_only=True)
    eager = plan("qwen3.6-35b-a3b-fp8", "1xH100", text_only=True, eager=True)
    assert plain.num_blocks < text.num_blocks < eager.num_blocks
    assert eager.predicted_bytes.graphs == 0
    assert eager.enforce_eager


def test_used_memory_counts_only_when_wished():
    host = catalogue.host_from_shape("1xH100")
    before = make_plan("qwen3.6-35b-a3b-fp8", host)
    host["gpus"][0]["memory_used_bytes"] = 20 * GIB
    assert make_plan("qwen3.6-35b-a3b-fp8", host) == before
    beside = make_plan("qwen3.6-35b-a3b-fp8", host, wishes={"keep_used_memory": True})
    assert beside.gpu_memory_utilization < before.gpu_memory_utilization
    assert "20.0 GiB are in use by others" in beside.reasons["gpu_memory_utilization"]


def test_a_gpu_without_a_driver_is_planned_from_the_catalogue():
    host = catalogue.host_from_shape("1xH100")
    for field in ("index", "memory_total_bytes", "memory_usable_bytes", "compute_capability", "name"):
        host["gpus"][0][field] = None
    found = make_plan("qwen3.6-35b-a3b-fp8", host)
    assert found.num_blocks == plan("qwen3.6-35b-a3b-fp8", "1xH100").num_blocks
    assert "the driver does not answer" in found.reasons["gpus_used"]


def test_different_gpus_are_planned_as_the_smallest():
    host = catalogue.host_from_shape("2xH100")
    host["gpus"][1].update(name="NVIDIA H200", memory_usable_bytes=140 * GIB)
    found = make_plan("qwen3.6-35b-a3b-fp8", host)
    assert found.gpu_memory_bytes == host["gpus"][0]["memory_usable_bytes"]
    assert "planned as the smallest" in found.reasons["gpus_used"]


def test_the_listed_gpus_are_owned():
    found = plan("qwen3.6-35b-a3b-fp8", "8xH100", gpus=[4, 5])
    assert found.gpus_used == (4, 5)
    assert found.tensor_parallel_size == 2


def test_a_newer_release_is_planned_with_a_wider_margin():
    known, newer = (plan("qwen3.6-35b-a3b-fp8", "1xL40S", engine_version=version) for version in ("0.33.0", "0.40.0"))
    assert newer.max_model_len < known.max_model_len
    assert "newer than the newest release known" in newer.reasons["engine_version"]


def test_draft_tokens_cost_capacity():
    plain, draft = plan("qwen3.6-35b-a3b", "1xH200"), plan("qwen3.6-35b-a3b", "1xH200", speculative_tokens=2)
    assert draft.kv_cache_tokens < plain.kv_cache_tokens
    assert draft.predicted_bytes.weights - plain.predicted_bytes.weights == 2 * 844_640_768


def test_a_whole_deployment_is_accepted_as_wishes():
    deployment = {"name": "qwen", "engine": "vllm", "model": "x", "port": 8000, "engine_args": {}, "gpus": "all"}
    assert read_wishes(deployment | {"context_length": 4096}).context_length == 4096


def test_cpu_plan_of_a_tiny_model():
    found = make_plan(TINY, catalogue.host_from_shape("cpu-24GiB"), wishes={"kv_cache_memory_bytes": 64 << 20})
    assert found.device == "cpu"
    assert found.gpu_memory_utilization is None
    assert found.enforce_eager
    assert (found.block_size_tokens, found.num_blocks) == (256, 512)
    assert found.max_num_seqs == 512 // 7


def test_cpu_pool_does_not_wobble_with_the_memory():
    pools = set()
    for wobble in range(0, 64 << 20, 7 << 20):
        host = catalogue.host_from_shape("cpu-24GiB")
        host["memory"] = {"total_bytes": 24 * GIB - wobble, "numa_nodes": []}
        pools.add(make_plan("qwen3-32b-tiny", host, extra_models=EXTRA).kv_cache_memory_bytes)
    assert len(pools) == 1
    assert pools.pop() <= 6 * GIB


EXTRA = {
    "qwen3-32b-tiny": {
        "format": "bf16",
        "context_length": 40960,
        "shape": {**catalogue.model("qwen3-32b").shape, "num_hidden_layers": 4, "hidden_size": 1024},
    }
}


def test_cpu_state_is_32_bit_where_the_kernels_want_it():
    config = json.loads(json.dumps(TINY))
    del config["text_config"]["mamba_ssm_dtype"]
    host = catalogue.host_from_shape("cpu-24GiB")
    fast = make_plan(config, host)
    host["cpu"]["instruction_sets"] = ["avx2"]
    slow = make_plan(config, host)
    # 4 heads x 64 x 64 x 4 B + 512 x 3 x 2 B = 68608 B in blocks of 128 tokens of 512 B; half of it in 16 bit.
    assert (fast.block_size_tokens, slow.block_size_tokens) == (256, 128)


def test_the_smallest_numa_node_bounds_a_cpu_plan():
    host = catalogue.host_from_shape("cpu-128GiB")
    whole = make_plan("qwen3-32b-tiny", host, extra_models=EXTRA).kv_cache_memory_bytes
    host["memory"]["numa_nodes"] = [{"node": n, "total_bytes": 12 * GIB} for n in range(2)]
    assert make_plan("qwen3-32b-tiny", host, extra_models=EXTRA).kv_cache_memory_bytes < whole


def test_as_dict_is_plain_and_complete():
    found = plan("qwen3.6-35b-a3b-fp8", "2xH100").as_dict()
    assert json.loads(json.dumps(found)) == found
    missing = {"gpus_used", "tensor_parallel_size", "max_model_len", "max_num_seqs", "prefix_caching"} - set(
        found["reasons"]
    )
    assert not missing


def test_share_filter_equals_the_plan():
    host = catalogue.host_from_shape("1xH100")
    share = gpu_memory_utilization("qwen3.6-35b-a3b-fp8", host, "0.33.0", {"text_only": True})
    assert share == plan("qwen3.6-35b-a3b-fp8", "1xH100", text_only=True).gpu_memory_utilization


def test_share_filter_has_nothing_for_a_fixed_pool():
    with pytest.raises(Refusal, match="a plan with a fixed KV pool"):
        gpu_memory_utilization(
            "qwen3.6-35b-a3b-fp8", catalogue.host_from_shape("1xH100"), None, {"kv_cache_memory_bytes": GIB}
        )


def test_share_filter_has_nothing_for_a_cpu_host():
    with pytest.raises(Refusal, match="a host without GPUs"):
        gpu_memory_utilization(TINY, catalogue.host_from_shape("cpu-24GiB"))


MODELS = st.sampled_from(["qwen3.6-35b-a3b", "qwen3.6-35b-a3b-fp8", "qwen3-32b", "gpt-oss-20b", "gemma-3-27b-it"])
HOSTS = st.sampled_from(["1xL40S", "2xA100", "3xH100", "4xL40S", "8xH800", "1xH200"])


@settings(deadline=None, max_examples=60)
@given(
    MODELS,
    HOSTS,
    st.fixed_dictionaries(
        {},
        optional={
            "context_length": st.integers(256, 131072),
            "max_sequences": st.integers(1, 300),
            "kv_cache_dtype": st.sampled_from(["auto", "fp8"]),
            "text_only": st.booleans(),
            "eager": st.booleans(),
            "memory_share": st.floats(0.3, 1.0),
        },
    ),
    st.sampled_from([None, "0.17.1", "0.24.0", "0.27.1"]),
)
def test_a_plan_keeps_every_rule(model, shape, wishes, version):
    host = catalogue.host_from_shape(shape)
    try:
        found = make_plan(model, host, "vllm", version, wishes)
    except Refusal:
        return
    assert make_plan(model, host, "vllm", version, wishes) == found
    assert not tensor_parallel_problems(
        read_shape(catalogue.model(model).shape),
        found.tensor_parallel_size,
        expert_parallel=found.expert_parallel,
        text_only=wishes.get("text_only", False),
    )
    assert found.tensor_parallel_size * found.data_parallel_size == len(found.gpus_used) <= len(host["gpus"])
    assert found.max_concurrency >= 1
    assert found.max_num_seqs <= found.max_num_batched_tokens
    assert found.max_model_len == wishes.get("context_length", found.max_model_len)
    assert sum(found.as_dict()["predicted_bytes"].values()) <= found.gpu_memory_bytes
    if found.kv_cache_tokens:
        assert found.predicted_bytes.kv >= found.num_blocks
