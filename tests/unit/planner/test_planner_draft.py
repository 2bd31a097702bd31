"""Draft models of their own: which are taken, their weights and layers, and started engines."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from planner_examples import ADAPTERS_DRAFTS, SHAPES, TINY

from metalserve import catalogue
from metalserve.cli import main
from metalserve.errors import Refusal
from metalserve.planner import Adapters, kv, make_plan, read_draft
from metalserve.planner.draft import draft_bytes, draft_problems
from metalserve.planner.lora import adapter_bytes
from metalserve.planner.memory import Load, budget, outside_bytes, runner, safe_utilization, unprofiled_bytes
from metalserve.planner.shape import read_shape
from metalserve.planner.units import gib
from metalserve.planner.versions import behaviour
from metalserve.planner.weights import weights

GIB = 1 << 30
H200 = catalogue.host_from_shape("1xH200")
TARGET = read_shape(SHAPES["qwen3_8b"])
SMALL = read_draft("small", SHAPES["qwen3_06b"])
HEAD = read_draft("head", SHAPES["eagle3_8b"])
STARTS = [run for run in ADAPTERS_DRAFTS["runs"] if run["draft"]]
DOCUMENTATION = Path(__file__).parents[3] / "docs" / "planner.md"
# What the head of a start with dummy weights shares with the model: embeddings, and its own head.
SHARED = 2 * 4096 * (151936 + 32000)


def planned(run):
    draft = read_draft(run["draft"]["model"], SHAPES[run["draft"]["model"]])
    assert draft.method == run["draft"]["method"]
    given = run["adapters"]
    adapters = Adapters(given["rank"], given["slots"], frozenset(given["modules"])) if given else None
    release = behaviour(ADAPTERS_DRAFTS["vllm"])
    load = Load(
        tensor_parallel_size=1,
        max_sequences=run["max_num_seqs"],
        max_batched_tokens=run["max_num_batched_tokens"],
        eager=run["eager"],
        vision=False,
        draft_tokens=run["draft"]["tokens"],
        draft=draft,
        adapters=adapters is not None,
    )
    taken = draft_bytes(draft) - (SHARED if draft.method == "eagle3" else 0)
    buffers = adapter_bytes(TARGET, adapters)
    loaded = replace(weights(TARGET, text_only=True), draft_bytes=taken, adapter_bytes=buffers)
    share = run["gpu_memory_utilization"]
    found = budget(TARGET, release, load, loaded, total_bytes=run["usable_bytes"], utilization=share)
    cut = kv.layout(
        TARGET,
        release,
        tensor_parallel_size=1,
        draft_tokens=load.draft_tokens,
        draft=draft.shape,
        max_batched_tokens=load.max_batched_tokens,
    )
    return draft, release, load, found, cut


def test_the_kind_of_a_draft_model():
    assert (SMALL.method, SMALL.vocabulary) == ("draft_model", 151936)
    assert (HEAD.method, HEAD.vocabulary, HEAD.inputs) == ("eagle3", 32000, 3 * 4096)
    two = {**SHAPES["eagle3_8b"], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9]}}
    assert read_draft("head", two).inputs == 2 * 4096


@pytest.mark.parametrize("name", ["EagleLlamaForCausalLM", "MedusaModel", "DFlashDraftModel"])
def test_other_drafters_are_refused(name):
    with pytest.raises(Refusal, match=rf"the draft model x of the architecture {name}. Needed: an EAGLE-3 head"):
        read_draft("x", {**SHAPES["eagle3_8b"], "architectures": [name]})


def test_weights_of_a_head_by_hand():
    h, width, heads = 4096, 12288, 32 + 2 * 8
    tables = 2 * h * (151936 + 32000)
    layer = 2 * (2 * h * heads * 128 + 32 * 128 * h + 3 * h * width)
    projection, norms, ids = 2 * 3 * h * h, 2 * 4 * h, 8 * 32000
    assert draft_bytes(HEAD) == tables + layer + projection + norms + ids
    assert draft_bytes(SMALL) == weights(SMALL.shape).total_bytes
    assert draft_bytes(None) == 0
    assert draft_bytes(SMALL, 2) < draft_bytes(SMALL)


@pytest.mark.parametrize("run", STARTS, ids=lambda r: r["name"])
def test_what_the_started_engines_loaded(run):
    _, _, _, found, _ = planned(run)
    # Rotary tables of the same form are shared, and planned twice: 10 MiB.
    difference = run["loaded_bytes"] - found.weights_bytes - found.buffers_bytes
    assert -(11 << 20) < difference < 3 << 20


@pytest.mark.parametrize("run", STARTS, ids=lambda r: r["name"])
def test_the_cache_and_the_memory_of_the_started_engines(run):
    draft, release, load, found, cut = planned(run)
    assert runner(TARGET, release, draft) == run["runner"]
    assert run["available_kv_bytes"] // cut.block_bytes == run["num_blocks"]
    layer = 4096 if draft.shape.kv_heads == 8 else 2048
    assert cut.block_bytes == 16 * (4096 * 36 + layer * len(draft.shape.layers))
    # The V1 runner's estimate of its graphs is planned with its upper bound.
    graphs = found.graphs_bytes - run.get("graph_estimate_bytes", 0)
    assert found.kv_bytes + graphs == pytest.approx(run["available_kv_bytes"], rel=0.006)
    # Never more than there is.
    assert found.kv_bytes < run["available_kv_bytes"]
    outside = outside_bytes(TARGET, release, load) + unprofiled_bytes(TARGET, release, load)
    assert run["used_after_start_bytes"] <= run["requested_bytes"] + outside
    share = safe_utilization(TARGET, release, load, total_bytes=run["usable_bytes"])
    overshoot = run["used_after_start_bytes"] - run["requested_bytes"]
    assert share * run["usable_bytes"] + overshoot < run["usable_bytes"]


@pytest.mark.parametrize("run", STARTS, ids=lambda r: r["name"])
def test_the_table_in_the_documentation_is_this_one(run):
    _, _, _, found, _ = planned(run)
    measured, before = run["available_kv_bytes"], run["predicted_kv_bytes"]
    row = (
        f"| {run['name']} | {measured / GIB:.2f} | {before / GIB:.2f} | {100 * (before / measured - 1):+.2f} % | "
        f"{run['num_blocks']} / {run['predicted_num_blocks']} | {found.kv_bytes / GIB:.2f} | "
        f"{100 * (found.kv_bytes / measured - 1):+.2f} % |"
    )
    assert row in DOCUMENTATION.read_text()


def test_layers_of_another_size_are_added_to_the_block():
    other = replace(SMALL.shape, kv_heads=4)
    release = behaviour("0.24.0")
    same = kv.layout(TARGET, release, tensor_parallel_size=1, draft_tokens=3, draft=SMALL.shape)
    less = kv.layout(TARGET, release, tensor_parallel_size=1, draft_tokens=3, draft=other)
    assert same.block_bytes - less.block_bytes == 16 * 28 * 2048
    assert same.blocks_per_request(4096) == less.blocks_per_request(4096)


def test_a_draft_model_takes_the_place_of_the_mtp_layers():
    hybrid = read_shape(catalogue.model("qwen3.6-35b-a3b").shape)
    draft = replace(HEAD.shape, kv_heads=2, head_dim=256)
    release = behaviour("0.33.0")
    own = kv.layout(hybrid, release, tensor_parallel_size=1, draft_tokens=2)
    instead = kv.layout(hybrid, release, tensor_parallel_size=1, draft_tokens=2, draft=draft)
    assert own.block_bytes == instead.block_bytes


def plan(engine="vllm", version=None, host=H200, model="qwen3-32b", draft=SMALL, adapters=None, **wishes):
    wishes = {"speculative_tokens": 3, "max_sequences": 64, **wishes}
    return make_plan(model, host, engine, version, wishes, draft=draft, adapters=adapters)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_plan_with_a_draft_model(engine):
    alone = plan(engine, draft=None, speculative_tokens=0)
    drafted = plan(engine)
    assert drafted.predicted_bytes.weights - alone.predicted_bytes.weights == draft_bytes(SMALL)
    assert drafted.kv_cache_tokens < alone.kv_cache_tokens
    said = drafted.reasons["draft_model"]
    assert said.startswith(f"{gib(draft_bytes(SMALL))} of the weights are small")
    assert "draft_model" not in alone.reasons


def test_the_mtp_layers_are_not_loaded_beside_it():
    draft = replace(HEAD, shape=replace(HEAD.shape, vocabulary=248320, kv_heads=2, head_dim=256), inputs=3 * 2048)
    alone = plan(model="qwen3.6-35b-a3b", draft=None, speculative_tokens=0)
    drafted = plan(model="qwen3.6-35b-a3b", draft=draft)
    assert drafted.predicted_bytes.weights - alone.predicted_bytes.weights == draft_bytes(draft)


def changed(draft, **fields):
    return replace(draft, shape=replace(draft.shape, **fields))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative_tokens": 0}, "draft_model small without speculative_tokens. Needed: how many tokens"),
        (
            {"draft": changed(SMALL, vocabulary=151937)},
            "the draft model small with a vocabulary of 151937 words, qwen3-32b has 151936. Needed: the same",
        ),
        ({"draft": HEAD}, "the EAGLE-3 head head for 12288 elements of hidden state, qwen3-32b has 5120"),
        (
            {"pipeline_parallel_size": 2, "host": catalogue.host_from_shape("2xH200")},
            "draft_model small with pipeline_parallel_size 2. Needed: one stage",
        ),
        (
            {"draft": changed(SMALL, layers=("sliding_attention",) * 28)},
            "the draft model small with layers that keep a window or a state",
        ),
        (
            {"draft": changed(SMALL, kv_heads=4), "engine": "sglang"},
            "the draft model small with 2048 B of keys and values a token and layer, qwen3-32b has 4096. Needed: the "
            "same: SGLang sizes its pool as if it were so",
        ),
        (
            {"draft": changed(SMALL, vocabulary=201088), "model": "gpt-oss-20b"},
            "Needed: the same: gpt-oss-20b has layers of several kinds",
        ),
        ({"version": "0.20.2"}, "the draft model small with vLLM 0.20.2. Needed: vLLM 0.24.0 or newer"),
        ({"host": catalogue.host_from_shape("cpu-64GiB")}, "draft_model small on a host without GPUs"),
        (
            {"host": catalogue.host_from_shape("cpu-64GiB"), "engine": "sglang", "kv_cache_memory_bytes": GIB},
            "draft_model small on a host without GPUs",
        ),
        (
            {"engine": "sglang", "adapters": Adapters(16, 2, frozenset({"q_proj"}))},
            "lora_adapters and the draft model small with SGLang. Needed: an EAGLE-3 head",
        ),
    ],
)
def test_draft_models_that_are_refused(options, words):
    with pytest.raises(Refusal) as caught:
        plan(**options)
    assert words in str(caught.value)
    assert "Change: " in str(caught.value)


def test_a_split_that_the_draft_model_does_not_take():
    odd = changed(SMALL, heads=14, kv_heads=14)
    assert draft_problems(odd, 2) == []
    assert draft_problems(odd, 4)[0].startswith("the draft model small: ")
    assert draft_problems(None, 4) == []
    four = catalogue.host_from_shape("4xH200")
    odd = changed(SMALL, heads=14)
    with pytest.raises(Refusal, match="the draft model small: "):
        plan(host=four, tensor_parallel_size=4, draft=odd)
    with pytest.raises(Refusal, match="the draft model small: "):
        plan("sglang", host=four, tensor_parallel_size=4, draft=odd)


def test_no_drafts_of_mtp_layers_that_are_not_there():
    with pytest.raises(Refusal, match=r"qwen3-32b has no MTP layers.*or name a `draft_model`"):
        plan(draft=None)
    assert TINY["text_config"].get("mtp_num_hidden_layers") is None


def test_on_the_command_line(tmp_path, capsys):
    file = tmp_path / "small" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(SHAPES["qwen3_06b"]))
    command = ["plan", "--model", "qwen3-32b", "--json", "--speculative-tokens", "3"]
    assert main([*command, "--gpus", "1xH200", "--draft-model", str(file)]) == 0
    assert "of the weights are small" in json.loads(capsys.readouterr().out)["reasons"]["draft_model"]
    assert main([*command, "--gpus", "1xH200", "--draft-model", "nothing"]) == 1
    assert "model 'nothing' is not in the catalogue" in capsys.readouterr().err
    assert main([*command, "--gpus", "any", "--draft-model", str(file)]) == 1
    assert "--draft-model with --gpus any" in capsys.readouterr().err
