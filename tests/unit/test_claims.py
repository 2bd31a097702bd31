"""Every claim of docs/claims.md: that the page is whole, that what it says is refused is, and the numbers it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from metalserve import catalogue
from metalserve.engines.claims import claims
from metalserve.engines.flags import flags_for
from metalserve.errors import Refusal
from metalserve.planner import kv_capacity, make_plan
from metalserve.planner.kv import token_bytes
from metalserve.planner.shape import read_quantization, read_shape
from metalserve.planner.weights import weights

ROOT = Path(__file__).resolve().parents[2]
ROWS = {
    match[1]: match[2]
    for match in re.finditer(
        r"^\| ([AB]\d+) \|.*\| ([^|]*) \|$", (ROOT / "docs/claims.md").read_text(encoding="utf-8"), re.MULTILINE
    )
}
GIB = 1 << 30
BF16, FP8 = "qwen3.6-35b-a3b", "qwen3.6-35b-a3b-fp8"
SHAPE = read_shape(catalogue.model(BF16).shape)


def plan(model, shape, **wishes):
    return make_plan(model, catalogue.host_from_shape(shape), wishes=wishes)


def test_the_page_has_every_claim_of_both_guides_once():
    assert list(ROWS) == [f"A{number}" for number in range(1, 70)] + [f"B{number}" for number in range(1, 37)]
    text = (ROOT / "docs/claims.md").read_text(encoding="utf-8")
    assert all(len(re.findall(rf"^\| {row} \|", text, re.MULTILINE)) == 1 for row in ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_the_proof_that_the_page_names_exists(row):
    sources = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    known = {claim.name for claim in claims()}
    for proof in ROWS[row].split(", "):
        if refused := re.fullmatch(r"refused: `(.+)`", proof):
            assert refused[1] in known
        elif named := re.fullmatch(r"`(test_\w+)`", proof):
            assert f"def {named[1]}(" in sources
        else:
            assert proof == "said"


@pytest.mark.parametrize("version", ["0.7.2", "0.8.2", "0.10.0"])
def test_versions_of_the_guides_are_refused(version):
    with pytest.raises(Refusal, match=r"Needed: 0\.17\.0 or newer"):
        make_plan(BF16, catalogue.host_from_shape("2xA100-SXM4-80GB"), "vllm", version)


def test_the_shape_is_the_models_own():
    assert (SHAPE.hidden, len(SHAPE.layers), SHAPE.full_layers, SHAPE.linear_layers) == (2048, 40, 10, 30)
    assert catalogue.model(BF16).context_length_tokens == 262144
    assert SHAPE.experts is not None
    assert SHAPE.experts.per_token < SHAPE.experts.count / 10


def test_the_first_layer_is_linear_attention():
    assert SHAPE.layers[0] == "linear_attention"


def test_blocks_of_the_hybrid_are_not_16_tokens():
    found = plan(BF16, "2xA100-SXM4-80GB")
    assert found.block_size_tokens == 1056
    assert "take the room of one linear-attention state" in found.reasons["block_size_tokens"]


def test_parsers_come_from_the_catalogue():
    assert catalogue.model(BF16).parsers["vllm"].tool_call == "qwen3_coder"


def test_weights_in_gigabytes():
    whole = weights(SHAPE, draft=True).total_bytes
    assert whole / 1e9 == pytest.approx(71.90, abs=0.01)
    assert whole / 2e9 == pytest.approx(35.95, abs=0.01)
    fp8 = weights(read_shape(catalogue.model(FP8).shape), draft=True).total_bytes
    assert 37.4 < fp8 / 1e9 < 38.4


def test_one_a100_holds_the_16_bit_checkpoint():
    found = plan(BF16, "1xA100-SXM4-80GB", text_only=True)
    assert found.tensor_parallel_size == 1
    assert 0 < found.predicted_bytes.kv < 8 * GIB


def test_no_official_awq_is_named():
    for model in catalogue.models().values():
        if model.format == "awq":
            assert not str(model.repositories["huggingface"]).startswith("Qwen/Qwen3.")


def test_zero_points_are_counted():
    base = {"quant_method": "awq", "bits": 4, "group_size": 128}
    asymmetric, symmetric = (read_quantization({**base, "zero_point": point}) for point in (True, False))
    assert asymmetric is not None
    assert symmetric is not None
    assert asymmetric.bits == symmetric.bits == 4
    assert not asymmetric.symmetric
    assert symmetric.symmetric


def test_two_a100_need_no_tensor_parallel():
    found = plan(FP8, "2xA100-SXM4-80GB", tensor_parallel_size=1)
    assert (found.tensor_parallel_size, found.data_parallel_size) == (1, 2)
    assert found.max_model_len == 262144


def test_the_share_follows_from_what_is_taken():
    text, vision = plan(BF16, "1xH200", text_only=True), plan(BF16, "1xH200")
    assert 0.92 < text.gpu_memory_utilization <= 0.95
    assert vision.gpu_memory_utilization <= 0.92
    assert "go to context, communication and runner beside the budget" in vision.reasons["gpu_memory_utilization"]
    assert 0.1 * catalogue.gpu("A100-SXM4-80GB").memory_usable_bytes / GIB == pytest.approx(7.9, abs=0.05)


def test_sequences_are_bound_by_blocks():
    found = plan(BF16, "2xL40S")
    assert found.max_num_seqs <= found.num_blocks
    assert "blocks hold no more short requests" in found.reasons["max_num_seqs"]


def test_the_whole_context_fits_on_one_a100_with_fp8_weights():
    assert plan(FP8, "1xA100-SXM4-80GB").max_model_len == 262144


def test_too_little_memory_is_a_sentence_with_numbers():
    with pytest.raises(Refusal, match=r"needs 65\.4 GiB of weights, one NVIDIA L40S gives 40\.8 GiB"):
        plan(BF16, "1xL40S")


def test_an_l40s_is_planned():
    found = plan(FP8, "1xL40S")
    assert 0 < found.predicted_bytes.kv < 6 * GIB
    assert found.max_model_len < 262144


def test_log_level_is_a_flag_of_newer_releases():
    assert flags_for("vllm", "0.33.0").find("log-level") is not None
    assert flags_for("vllm", "0.20.2").find("log-level") is None


def test_kv_bytes_of_one_token():
    told = SHAPE.hidden * 48 * 4 * 2
    true = SHAPE.full_layers * token_bytes(SHAPE, 1, 2)
    assert true == 20 * 1024
    assert told / true == pytest.approx(38.4)


def test_sixteen_requests_of_32k():
    capacity = kv_capacity(
        catalogue.model(BF16).shape, tensor_parallel_size=1, available_bytes=20 * GIB, max_model_len=32768
    )
    assert 16 * capacity.blocks_per_request * capacity.block_bytes / GIB == pytest.approx(12.2, abs=0.1)


def test_eager_changes_the_plan():
    eager, graphs = plan(BF16, "1xH200", eager=True), plan(BF16, "1xH200")
    assert eager.predicted_bytes.graphs == 0 < graphs.predicted_bytes.graphs
    assert eager.enforce_eager
