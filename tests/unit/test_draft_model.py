"""A draft model of a deployment: lock, staging, mounts, and both engines' configuration."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

from metalserve import catalogue
from metalserve.deployments import Inputs, lock_requests, normalize, serving_releases
from metalserve.errors import Refusal

MODEL, DRAFT, HEAD = "qwen3-32b", "qwen3-small", "qwen3-32b-eagle3"
FILES = [{"path": "config.json", "size_bytes": 2, "sha256": "a" * 64}]
DEPLOYMENT = {"name": "chat", "engine": "vllm", "model": MODEL, "port": 8000, "speculative_tokens": 3}
SHAPE = dict(catalogue.model(MODEL).as_dict()["shape"])
SMALL = {**SHAPE, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
EAGLE = {**SHAPE, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}
MODELS = {
    DRAFT: {"repositories": {"huggingface": "my-org/small"}, "format": "bf16", "context_length": 32768, "shape": SMALL},
    HEAD: {"repositories": {"huggingface": "my-org/head"}, "format": "bf16", "context_length": 32768, "shape": EAGLE},
}
LOCK = {
    "images": {
        image: {"digest": "sha256:" + "d" * 64} for image in ("vllm/vllm-openai:v0.33.0", "lmsysorg/sglang:v0.5.23")
    },
    "models": {key: {"revision": f"{n}123abcd", "files": FILES} for n, key in enumerate((MODEL, DRAFT, HEAD))},
}
INPUTS = Inputs(models=MODELS, engines={}, lock=LOCK, weight_sources={}, models_dir="/var/lib/metalserve/models")
HOST = catalogue.host_from_shape("2xH200")


def one(inputs=INPUTS, **changes):
    (release,) = serving_releases([{**DEPLOYMENT, "draft_model": DRAFT, **changes}], HOST, inputs)
    return release


def config_of(release):
    return yaml.safe_load(release["files"]["engine.yaml"])


def refusal_of(function, *arguments, **options):
    with pytest.raises(Refusal) as caught:
        function(*arguments, **options)
    return caught.value


@pytest.mark.parametrize(("draft", "method"), [(DRAFT, "draft_model"), (HEAD, "eagle3")])
def test_in_the_configuration_of_vllm(draft, method):
    assert json.loads(config_of(one(draft_model=draft))["speculative-config"]) == {
        "method": method,
        "model": f"/models/{draft}",
        "num_speculative_tokens": 3,
    }


@pytest.mark.parametrize(("draft", "algorithm"), [(DRAFT, "STANDALONE"), (HEAD, "EAGLE3")])
def test_in_the_configuration_of_sglang(draft, algorithm):
    config = config_of(one(engine="sglang", draft_model=draft))
    assert {name: value for name, value in config.items() if name.startswith("speculative")} == {
        "speculative-algorithm": algorithm,
        "speculative-draft-model-path": f"/models/{draft}",
        "speculative-num-steps": 3,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": 4,
    }


def test_it_is_locked_staged_and_mounted():
    requests = lock_requests([{**DEPLOYMENT, "draft_model": DRAFT}], INPUTS)["models"]
    assert [request["key"] for request in requests] == [MODEL, DRAFT]
    assert requests[1]["sources"] == ["huggingface:my-org/small"]
    assert "adapter" not in requests[1]
    release = one()
    assert [(part["key"], part["weight_format"]) for part in release["weights"]] == [(MODEL, "bf16"), (DRAFT, "bf16")]
    record = json.loads(release["files"]["release.json"])
    assert record["beside"][0]["kind"] == "draft"
    assert (record["beside"][0]["key"], record["beside"][0]["revision"]) == (DRAFT, "1123abcd")
    mount = f"--mount=type=bind,source=/var/lib/metalserve/models/{DRAFT}/1123abcd,target=/models/{DRAFT},readonly"
    assert f"METALSERVE_MOUNTS={mount}\n" in release["files"]["release.env"]


def test_a_head_has_neither_tokenizer_nor_template():
    assert one(draft_model=HEAD)["weights"][1]["weight_format"] == "draft-bf16"


def test_another_revision_of_it_is_another_release():
    models = {**LOCK["models"], DRAFT: {"revision": "moved", "files": FILES}}
    moved = one(replace(INPUTS, lock={**LOCK, "models": models}))
    assert moved["release_id"] != one()["release_id"]
    assert moved["plan"]["start"]["arguments"] == one()["plan"]["start"]["arguments"]
    assert one()["plan"]["start"]["arguments"] != one(draft_model=HEAD)["plan"]["start"]["arguments"]


def test_its_memory_is_in_the_plan():
    alone = one(draft_model=None, speculative_tokens=0)
    assert one()["plan"]["predicted_bytes"]["weights"] > alone["plan"]["predicted_bytes"]["weights"]
    assert "draft_model" in one()["plan"]["reasons"]


def test_one_that_is_not_locked():
    lock = {**LOCK, "models": {MODEL: LOCK["models"][MODEL]}}
    assert refusal_of(one, replace(INPUTS, lock=lock)).found == f"no revision and manifest locked for {DRAFT}"


def test_the_model_itself_or_an_unknown_one():
    assert refusal_of(one, draft_model=MODEL).found == f"draft_model {MODEL} of the deployment chat, which is its model"
    assert refusal_of(one, draft_model="nothing").found == "model 'nothing' is not in the catalogue"
    refusal = refusal_of(normalize, [{**DEPLOYMENT, "draft_model": ["a"]}])
    assert refusal.found == "draft_model ['a'] of the deployment chat"


def test_without_a_number_of_tokens():
    assert refusal_of(one, speculative_tokens=0).found == f"draft_model {DRAFT} without speculative_tokens"


def test_a_second_way_to_draft_is_refused():
    ngram = {"speculative-config": {"method": "ngram", "num_speculative_tokens": 2}}
    assert refusal_of(one, engine_args=ngram).found == (
        f"engine_args sets 'speculative-config' beside draft_model {DRAFT}"
    )
    # Without a draft model it is the engine's own matter.
    kept = config_of(one(draft_model=None, speculative_tokens=0, engine_args=ngram))
    assert json.loads(kept["speculative-config"])["method"] == "ngram"


def test_a_draft_model_that_nobody_stages_is_refused():
    other = {"speculative-config": {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 2}}
    refusal = refusal_of(one, draft_model=None, speculative_tokens=0, engine_args=other)
    assert refusal.found == "engine_args sets 'speculative-config' with a model"
    path = {"speculative-draft-model-path": "/models/x"}
    refusal = refusal_of(one, draft_model=None, speculative_tokens=0, engine="sglang", engine_args=path)
    assert refusal.change == "draft_model of the deployment instead of engine_args.speculative-draft-model-path"
