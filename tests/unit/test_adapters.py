"""LoRA adapters of a deployment: form, lock, plan, both engines' configuration, and the release."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

from metalserve import catalogue
from metalserve.adapters import adapter_record, asked_names
from metalserve.deployments import Inputs, gate_endpoints, lock_requests, normalize, serving_releases
from metalserve.engines.arguments import check_arguments
from metalserve.errors import Refusal
from metalserve.release import read_release
from metalserve.staged import needed_models

MODEL = "qwen3-32b"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = [{"path": "config.json", "size_bytes": 2, "sha256": "a" * 64}]
ADAPTER_FILES = [{"path": "adapter_config.json", "size_bytes": 3, "sha256": "b" * 64}]
SQL = {"name": "sql", "repositories": {"huggingface": "my-org/sql-lora"}, "revision": COMMIT}
DEPLOYMENT = {"name": "chat", "engine": "vllm", "model": MODEL, "port": 8000}
LOCKED = {"rank": 16, "modules": ["q_proj", "v_proj"], "base_model": "Qwen/Qwen3-32B"}
LOCK = {
    "images": {
        image: {"digest": "sha256:" + "d" * 64}
        for image in ("vllm/vllm-openai:v0.33.0", "vllm/vllm-openai:v0.17.1", "lmsysorg/sglang:v0.5.23")
    },
    "models": {
        MODEL: {"revision": "0123abcd", "files": FILES},
        "sql": {"revision": COMMIT, "files": ADAPTER_FILES, "adapter": LOCKED},
        "de": {"revision": "4567", "files": ADAPTER_FILES, "adapter": {**LOCKED, "rank": 20, "modules": ["up_proj"]}},
    },
}
INPUTS = Inputs(models={}, engines={}, lock=LOCK, weight_sources={}, models_dir="/var/lib/metalserve/models")
H100 = catalogue.host_from_shape("1xH100")
HOST = catalogue.host_from_shape("2xH200")


def one(inputs=INPUTS, facts=HOST, **changes):
    (release,) = serving_releases([{**DEPLOYMENT, "lora_adapters": [SQL], **changes}], facts, inputs)
    return release


def with_lock(**models):
    return replace(INPUTS, lock={**LOCK, "models": {**LOCK["models"], **models}})


def config_of(release):
    return yaml.safe_load(release["files"]["engine.yaml"])


def environment_of(release):
    return dict(line.split("=", 1) for line in release["files"]["release.env"].splitlines())


def refusal_of(function, *arguments, **options):
    with pytest.raises(Refusal) as caught:
        function(*arguments, **options)
    return caught.value


# ---- form ----


def test_a_name_is_enough():
    (filled,) = normalize([{**DEPLOYMENT, "lora_adapters": [{"name": "Org/SQL", "key": "sql"}, {"name": "de"}]}])
    assert filled["lora_adapters"] == [
        {"name": "Org/SQL", "key": "sql", "repositories": {}, "revision": None},
        {"name": "de", "key": "de", "repositories": {}, "revision": None},
    ]


@pytest.mark.parametrize(
    ("adapters", "found", "needed"),
    [
        (["sql"], "'sql'", "a mapping with name"),
        ([{"name": "sql", "rank": 16}], "rank: 16", "name, key and revision (texts) and repositories"),
        ([{"name": "sql", "repositories": "my-org/sql"}], "repositories: 'my-org/sql'", "(huggingface, modelscope)"),
        ([{"repositories": {}}], "the name ''", "letters, digits and ._/@+- only"),
        ([{"name": "chat:sql"}], "the name 'chat:sql'", "letters, digits and ._/@+- only"),
        ([{"name": "Org/SQL"}], "the key 'org/sql' of the adapter Org/SQL", "it becomes a directory"),
        ([{"name": "sql", "repositories": {"s3": "x"}}], "the repository host 's3'", "huggingface or modelscope"),
        ([{"name": MODEL}], f"the adapter name {MODEL}, which is a served name already", "a name of its own"),
        ([SQL, SQL], "the adapter name sql, which is another adapter's already", "a name of its own"),
        ([SQL, {"name": "SQL"}], "the adapters sql and SQL with the key sql", "a `key` of its own"),
    ],
)
def test_adapters_of_a_wrong_form(adapters, found, needed):
    refusal = refusal_of(normalize, [{**DEPLOYMENT, "lora_adapters": adapters}])
    assert refusal.found.startswith(f"lora_adapters of the deployment chat with {found}")
    assert needed in refusal.needed
    assert refusal.change == "`lora_adapters` of chat in serving_deployments"


@pytest.mark.parametrize(("slots", "adapters"), [(0, [SQL]), (2, [SQL]), (1, []), (True, [SQL]), ("1", [SQL])])
def test_slots_that_are_none(slots, adapters):
    refusal = refusal_of(normalize, [{**DEPLOYMENT, "lora_adapters": adapters, "lora_slots": slots}])
    assert refusal.found == f"lora_slots {slots!r} of the deployment chat with {len(adapters)} adapters"
    assert refusal.needed == "a whole number from 1 up to the number of lora_adapters"


def test_the_names_that_clients_ask_for():
    (vllm,) = normalize([{**DEPLOYMENT, "served_names": ["a", "b"], "lora_adapters": [SQL]}])
    assert asked_names(vllm) == ["a", "b", "sql"]
    (sglang,) = normalize([{**DEPLOYMENT, "engine": "sglang", "served_names": ["a"], "lora_adapters": [SQL]}])
    assert asked_names(sglang) == ["a", "a:sql"]


# ---- what an adapter says of itself ----


def test_a_configuration_as_it_is_kept():
    config = {"peft_type": "LORA", "r": 8, "bias": "none", "target_modules": ["a.b.q_proj", "v_proj", "q_proj"]}
    assert adapter_record("sql", config) == {"rank": 8, "modules": ["q_proj", "v_proj"], "base_model": None}
    assert adapter_record("sql", {**config, "target_modules": "all-linear"})["modules"] is None


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"r": None}, "r None"),
        ({"r": True}, "r True"),
        ({"r": 0}, "r 0"),
        ({"bias": "all"}, "bias 'all'"),
        ({"use_dora": True}, "use_dora True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save ['lm_head']"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern {'q_proj': 4}"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern {'q_proj': 4}"),
        ({"target_modules": []}, "target_modules []"),
    ],
)
def test_adapters_that_no_engine_serves_right(changes, found):
    config = {"r": 8, "target_modules": ["q_proj"], **changes}
    refusal = refusal_of(adapter_record, "sql", config)
    assert refusal.found == f"adapter_config.json of the adapter sql with {found}"
    assert refusal.change.endswith("merge it into the weights and serve these as a model")


# ---- lock ----


def test_adapters_are_locked_beside_the_model():
    items = [{**DEPLOYMENT, "lora_adapters": [SQL]}, {**DEPLOYMENT, "name": "b", "lora_adapters": [SQL]}]
    model, adapter = lock_requests(items, INPUTS)["models"]
    assert (model["key"], "adapter" in model) == (MODEL, False)
    assert adapter == {
        "key": "sql",
        "revision": COMMIT,
        "sources": ["huggingface:my-org/sql-lora"],
        "adapter": True,
    }


def test_two_adapters_of_one_key_are_refused():
    other = {**SQL, "revision": "f" * 40}
    items = [{**DEPLOYMENT, "lora_adapters": [SQL]}, {**DEPLOYMENT, "name": "b", "lora_adapters": [other]}]
    refusal = refusal_of(lock_requests, items, INPUTS)
    assert refusal.found == "two adapters with the key sql and different repositories or revisions"


def test_an_adapter_with_the_key_of_a_model_is_refused():
    (item,) = normalize([{**DEPLOYMENT, "lora_adapters": [{"name": "x", "key": "qwen3-30b-a3b"}]}])
    refusal = refusal_of(needed_models, item, {})
    assert refusal.found == "the key qwen3-30b-a3b of an adapter of chat, which is a model's"


def test_an_adapter_that_is_not_locked_or_locked_as_something_else():
    assert refusal_of(one, with_lock(sql=None)).found == "no revision and manifest locked for sql"
    refusal = refusal_of(one, with_lock(sql={"revision": COMMIT, "files": ADAPTER_FILES}))
    assert refusal.found == "a lock of the adapter sql without its rank and modules"
    assert "lock.yml" in refusal.change
    refusal = refusal_of(one, with_lock(sql={"revision": COMMIT, "adapter": LOCKED}))
    assert refusal.found == "a lock of the adapter sql without files"


def test_another_revision_than_the_locked_one():
    refusal = refusal_of(one, lora_adapters=[{**SQL, "revision": "f" * 40}])
    assert refusal.found == f"the adapter sql at revision {'f' * 40}, locked at {COMMIT}"
    moved = with_lock(sql={**LOCK["models"]["sql"], "revision": "0" * 40, "hub_revisions": {"modelscope": COMMIT}})
    assert one(moved)["weights"][1]["revision"] == "0" * 40


# ---- vLLM ----


def test_adapters_in_the_configuration_of_vllm():
    config = config_of(one(lora_adapters=[SQL, {"name": "Org/de", "key": "de"}], lora_slots=1, **PLACES))
    assert {name: value for name, value in config.items() if "lora" in name} == {
        "enable-lora": True,
        "lora-modules": ["sql=/adapters/sql", "Org/de=/adapters/de"],
        "lora-target-modules": ["q_proj", "up_proj", "v_proj"],
        "max-cpu-loras": 2,
        "max-lora-rank": 32,
        "max-loras": 1,
    }


PLACES = {"inputs": replace(INPUTS, weight_sources={"de": ["/mirror/de"]})}


def test_an_older_vllm_keeps_buffers_for_every_module():
    old = one(engine_version="0.17.1")
    assert "lora-target-modules" not in config_of(old)
    assert old["plan"]["predicted_bytes"]["weights"] > one()["plan"]["predicted_bytes"]["weights"]
    assert old["plan"]["reasons"]["lora_adapters"].endswith("1 adapter of rank 16 for every module")


def test_a_pattern_of_modules_stands_for_all():
    release = one(with_lock(sql={**LOCK["models"]["sql"], "adapter": {**LOCKED, "modules": None}}))
    assert "lora-target-modules" not in config_of(release)


def test_experts_go_by_the_name_of_their_layer():
    lock = with_lock(**{"qwen3-30b-a3b": LOCK["models"][MODEL], "sql": {**LOCK["models"]["sql"], "adapter": EXPERTS}})
    config = config_of(one(lock, model="qwen3-30b-a3b"))
    assert config["lora-target-modules"] == ["down_proj", "experts", "gate_proj", "up_proj"]


EXPERTS = {**LOCKED, "rank": 8, "modules": ["gate_proj", "up_proj", "down_proj"]}


def test_an_adapter_of_another_model_is_refused_before_anything_changes():
    other = with_lock(sql={**LOCK["models"]["sql"], "adapter": {**LOCKED, "modules": ["in_proj_qkv"]}})
    refusal = refusal_of(one, other)
    assert refusal.found == f"the adapter sql of modules in_proj_qkv, which {MODEL} does not have"


def test_a_head_over_a_vocabulary_that_vllm_does_not_take():
    shape = {**catalogue.model(MODEL).as_dict()["shape"], "vocab_size": 262208}
    inputs = with_lock(
        large=LOCK["models"][MODEL], sql={**LOCK["models"]["sql"], "adapter": {**LOCKED, "modules": ["lm_head"]}}
    )
    inputs = replace(inputs, models={"large": {"format": "bf16", "context_length": 4096, "shape": shape}})
    inputs = replace(inputs, weight_sources={"large": ["/mirror"]})
    refusal = refusal_of(one, inputs, model="large")
    assert refusal.found == "adapters of lm_head for large, whose vocabulary has 262208 words"


def test_what_another_base_model_is_worth():
    assert one()["notes"] == []
    other = with_lock(sql={**LOCK["models"]["sql"], "adapter": {**LOCKED, "base_model": "Qwen/Qwen3-8B"}})
    assert one(other)["notes"] == [
        f"chat: the adapter sql says it was made for Qwen/Qwen3-8B, and runs on {MODEL}",
    ]


@pytest.mark.parametrize("flag", ["enable-lora", "lora-modules", "max-loras", "max-lora-rank", "lora-target-modules"])
def test_flags_of_adapters_are_the_fields_matter(flag):
    with pytest.raises(Refusal, match=f"engine_args sets '{flag}'.*lora_(adapters|slots) of the deployment"):
        check_arguments("vllm", "0.33.0", {flag: "x"})
    with pytest.raises(Refusal, match=r"engine_args sets 'lora-paths'.*lora_adapters of the deployment"):
        check_arguments("sglang", "0.5.23", {"lora-paths": ["a=/b"]})


# ---- SGLang ----


def test_adapters_of_sglang_stand_on_its_command_line():
    release = one(engine="sglang", lora_adapters=[SQL])
    config = config_of(release)
    # The plain model takes one of the slots.
    assert {name: value for name, value in config.items() if "lora" in name} == {
        "enable-lora": True,
        "max-lora-rank": 16,
        "max-loras-per-batch": 2,
    }
    assert environment_of(release)["METALSERVE_WORDS"] == "--lora-paths sql=/adapters/sql"
    assert json.loads(release["files"]["release.json"])["words"] == ["--lora-paths", "sql=/adapters/sql"]
    assert release["served_names"] == [MODEL, f"{MODEL}:sql"]
    assert "METALSERVE_WORDS" not in environment_of(one())


def test_modules_that_sglang_has_no_buffers_for():
    lock = with_lock(
        **{
            "qwen3.6-35b-a3b": LOCK["models"][MODEL],
            "sql": {**LOCK["models"]["sql"], "adapter": {**LOCKED, "modules": ["in_proj_qkv", "q_proj"]}},
        }
    )
    refusal = refusal_of(one, lock, engine="sglang", model="qwen3.6-35b-a3b", text_only=True)
    assert refusal.found == "the adapter sql of modules in_proj_qkv with sglang 0.5.23"
    assert "q_proj" in refusal.needed
    assert refusal.change.startswith("`engine: vllm`")


# ---- release ----


def test_what_the_release_says_and_mounts():
    release = one()
    record = read_release(release["files"]["release.json"])
    assert record.beside[0]["kind"] == "adapter"
    assert {name: record.beside[0][name] for name in ("key", "revision")} == {"key": "sql", "revision": COMMIT}
    assert environment_of(release)["METALSERVE_MOUNTS"] == (
        f"--mount=type=bind,source=/var/lib/metalserve/models/sql/{COMMIT},target=/adapters/sql,readonly"
    )
    plain = one(lora_adapters=[])
    assert "METALSERVE_MOUNTS" not in environment_of(plain)
    assert not {"beside", "words"} & set(json.loads(plain["files"]["release.json"]))
    assert release["release_id"] != plain["release_id"]


def test_another_revision_of_an_adapter_is_another_release():
    first = one(lora_adapters=[{"name": "sql"}], inputs=replace(INPUTS, weight_sources={"sql": ["/m"]}))
    moved = replace(with_lock(sql={**LOCK["models"]["sql"], "revision": "0" * 40}), weight_sources={"sql": ["/m"]})
    second = one(lora_adapters=[{"name": "sql"}], inputs=moved)
    assert first["release_id"] != second["release_id"]
    files = [{**ADAPTER_FILES[0], "sha256": "c" * 64}]
    changed = replace(with_lock(sql={**LOCK["models"]["sql"], "files": files}), weight_sources={"sql": ["/m"]})
    assert one(lora_adapters=[{"name": "sql"}], inputs=changed)["release_id"] != first["release_id"]


def test_what_is_staged_and_what_the_gate_asks():
    release = one(served_names=["chat", "big"])
    assert [part["key"] for part in release["weights"]] == [MODEL, "sql"]
    assert release["weights"][0] == release["model"]
    assert release["weights"][1]["weight_format"] == "lora"
    assert release["weights"][1]["sources"][0].endswith(f"/my-org/sql-lora/resolve/{COMMIT}")
    (endpoint,) = gate_endpoints([release], None)
    assert (endpoint["model"], endpoint["served_names"]) == ("chat", ["big", "sql"])
    kept = json.loads(release["files"]["endpoint.json"])
    assert (kept["served_names"], kept["weights_bytes"]) == (["big", "sql"], 5)


def test_a_measurement_with_adapters_says_nothing_about_a_start_without():
    assert one()["plan"]["start"]["arguments"] != one(lora_adapters=[])["plan"]["start"]["arguments"]
    assert one()["plan"]["start"]["arguments"] == one()["plan"]["start"]["arguments"]
