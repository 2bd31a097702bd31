import hashlib
import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from metalserve.engines.info import engine_info, engine_of
from metalserve.errors import Refusal
from metalserve.release import Release, build_release, canonical_json, diff_releases, read_release, split_image

DIGEST = "sha256:" + "a" * 64
MANIFEST = "b" * 64
MODEL = {"key": "tiny", "parsers": {"vllm": {"tool_call": "hermes"}}}
DEPLOYMENT = {
    "name": "small",
    "engine": "vllm",
    "engine_version": "0.33.0",
    "model": "tiny",
    "port": 8001,
    "gpus": [0, 1],
    "environment": {"NCCL_DEBUG": "WARN"},
}
PLAN = {
    "device": "cuda",
    "tensor_parallel_size": 2,
    "gpu_memory_utilization": 0.9,
    "max_model_len": 4096,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "kv_cache_dtype": "auto",
    "prefix_caching": True,
    "reasons": {"max_num_seqs": "asked for"},
}


def release(
    deployment=DEPLOYMENT,
    plan=PLAN,
    image="vllm/vllm-openai:v0.33.0",
    digest=DIGEST,
    model=MODEL,
    revision="0123abc",
    manifest=MANIFEST,
    driver="580.178.04",
):
    info = engine_of(deployment)
    return build_release(deployment, info, image, digest, model, revision, manifest, plan, driver)


def reordered(value):
    """The same content with every mapping in the opposite order."""
    if isinstance(value, dict):
        return {key: reordered(item) for key, item in reversed(value.items())}
    return value


def test_the_files_of_a_release():
    files = release().files()
    assert sorted(files) == ["engine.yaml", "release.env", "release.json"]
    assert files["release.env"] == (
        f"METALSERVE_RELEASE={release().id}\n"
        f"METALSERVE_IMAGE=vllm/vllm-openai@{DIGEST}\n"
        "METALSERVE_DEVICES=--device nvidia.com/gpu=0 --device nvidia.com/gpu=1\n"
        "METALSERVE_MODEL_DIR=/var/lib/metalserve/models/tiny/0123abc\n"
        "METALSERVE_MODEL_KEY=tiny\n"
        "METALSERVE_PORT=8001\n"
        "CUDA_CACHE_PATH=/root/.cache/nv\n"
        "DO_NOT_TRACK=1\n"
        "HF_HUB_OFFLINE=1\n"
        "METALSERVE_DEPLOYMENT=small\n"
        "NCCL_DEBUG=WARN\n"
        "TRITON_CACHE_DIR=/root/.cache/triton\n"
        "VLLM_NO_USAGE_STATS=1\n"
    )
    config = yaml.safe_load(files["engine.yaml"])
    assert (config["model"], config["port"]) == ("/models/tiny", 8001)
    record = json.loads(files["release.json"])
    assert record["config"] == config
    assert record["plan"] == PLAN
    assert (record["driver"], record["model_revision"], record["manifest_sha256"]) == (
        "580.178.04",
        "0123abc",
        MANIFEST,
    )


def test_the_id_is_the_hash_of_the_record_without_id_and_plan():
    made = release()
    record = json.loads(made.files()["release.json"])
    claimed = record.pop("id")
    del record["plan"]
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert claimed == made.id == hashlib.sha256(text.encode()).hexdigest()[:12]


def test_the_id_of_this_content_never_changes():
    """A new id for old content would make every host look out of date: change SCHEMA on purpose instead."""
    assert release().id == "c26f477b81db"


def test_the_same_content_in_another_order_has_the_same_id_and_files():
    other = release(deployment=reordered(DEPLOYMENT), plan=reordered(PLAN), model=reordered(MODEL))
    assert other.id == release().id
    assert other.files() == release().files()


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "sha256:" + "c" * 64},
        {"revision": "0123abd"},
        {"manifest": "d" * 64},
        {"driver": "580.178.05"},
        {"plan": PLAN | {"max_num_seqs": 65}},
        {"deployment": DEPLOYMENT | {"port": 8002}},
        {"deployment": DEPLOYMENT | {"gpus": [0, 2]}},
        {"deployment": DEPLOYMENT | {"environment": {}}},
        {"deployment": DEPLOYMENT | {"engine_args": {"max-logprobs": 5}}},
    ],
)
def test_every_change_of_content_changes_the_id(changes):
    assert release(**changes).id != release().id


def test_a_reworded_reason_does_not_change_the_id():
    assert release(plan=PLAN | {"reasons": {"max_num_seqs": "in other words"}}).id == release().id


@pytest.mark.parametrize(
    ("plan", "gpus", "expected"),
    [
        (PLAN, "all", "--device nvidia.com/gpu=all"),
        (PLAN | {"gpus_used": [3]}, "all", "--device nvidia.com/gpu=3"),
        (PLAN | {"device": "cpu"}, "all", ""),
    ],
)
def test_devices(plan, gpus, expected):
    text = release(deployment=DEPLOYMENT | {"gpus": gpus}, plan=plan).files()["release.env"]
    assert f"METALSERVE_DEVICES={expected}\n" in text


@pytest.mark.parametrize("gpus", [[], [0, 0], "0"])
def test_impossible_gpus_are_refused(gpus):
    with pytest.raises(Refusal, match=r"gpus .* of the deployment small.*a list of different GPU indexes"):
        release(deployment=DEPLOYMENT | {"gpus": gpus})


@pytest.mark.parametrize(
    ("reference", "digest", "expected"),
    [
        ("vllm/vllm-openai:v1", DIGEST, ("vllm/vllm-openai", "v1")),
        ("registry.example:5000/vllm:v1", DIGEST, ("registry.example:5000/vllm", "v1")),
        ("registry.example:5000/a/vllm", DIGEST, ("registry.example:5000/a/vllm", None)),
        (f"vllm/vllm-openai@{DIGEST}", None, ("vllm/vllm-openai", None)),
        (f"vllm/vllm-openai:v1@{DIGEST}", DIGEST, ("vllm/vllm-openai", "v1")),
    ],
)
def test_an_image_is_taken_apart(reference, digest, expected):
    assert split_image(reference, digest) == (*expected, DIGEST)


@pytest.mark.parametrize("digest", [None, ""])
def test_an_image_without_a_digest_is_refused(digest):
    with pytest.raises(Refusal, match=r"v0\.33\.0 without a digest.*64 hexadecimal.*run playbooks/ops/lock\.yml"):
        release(digest=digest)


@pytest.mark.parametrize("digest", ["sha256:abc", "a" * 64, "sha256:" + "A" * 64, "sha512:" + "a" * 64, DIGEST + "\n"])
def test_a_malformed_digest_is_refused(digest):
    with pytest.raises(Refusal, match=r"as the digest of the image.*lower case.*run playbooks/ops/lock\.yml"):
        release(digest=digest)


def test_two_digests_that_differ_are_refused():
    with pytest.raises(Refusal, match=r"with another digest in the lock.*the same digest.*playbooks/ops/lock\.yml"):
        release(image=f"vllm/vllm-openai@{DIGEST}", digest="sha256:" + "c" * 64)


@pytest.mark.parametrize("image", ["vllm openai:v1", "vllm/:v1", "Vllm/Open Ai:v1", ":v1"])
def test_what_is_no_image_is_refused(image):
    with pytest.raises(Refusal, match=r"as an image.*repository:tag"):
        release(image=image)


def test_a_model_of_another_deployment_is_refused():
    with pytest.raises(Refusal, match=r"entry other for the deployment small.*its own model, tiny"):
        release(model=MODEL | {"key": "other"})


@pytest.mark.parametrize("revision", ["", None, "a/b", "..", "-x"])
def test_weights_without_a_revision_are_refused(revision):
    with pytest.raises(Refusal, match=r"as the revision of tiny.*a commit.*playbooks/ops/lock\.yml"):
        release(revision=revision)


@pytest.mark.parametrize("manifest", ["", None, "b" * 63, "B" * 64])
def test_weights_without_a_manifest_are_refused(manifest):
    with pytest.raises(Refusal, match=r"as the hash of the manifest of tiny.*playbooks/ops/lock\.yml"):
        release(manifest=manifest)


def test_a_release_is_read_back():
    made = release()
    read = read_release(made.files()["release.json"])
    assert read == made
    assert read.files() == made.files()


def test_a_changed_record_is_refused():
    text = release().files()["release.json"].replace('"port": 8001', '"port": 8002')
    with pytest.raises(Refusal, match=rf"says {release().id}, with a content of .*an unchanged record"):
        read_release(text)


def test_a_record_of_another_schema_is_refused():
    text = release().files()["release.json"].replace('"schema": 1', '"schema": 2')
    with pytest.raises(Refusal, match=r"schema 2.*schema 1"):
        read_release(text)


def test_a_difference_is_shown_value_by_value():
    old = release(deployment=DEPLOYMENT | {"engine_args": {"max-logprobs": 5}})
    plan = PLAN | {"max_num_seqs": 32, "kv_cache_memory_bytes": 1024}
    new = release(digest="sha256:" + "c" * 64, plan=plan)
    assert diff_releases(old, new) == [
        "+ config.kv-cache-memory-bytes: 1024",
        "- config.max-logprobs: 5",
        "config.max-num-seqs: 64 -> 32",
        f'image: "vllm/vllm-openai@{DIGEST}" -> "vllm/vllm-openai@sha256:{"c" * 64}"',
        "+ plan.kv_cache_memory_bytes: 1024",
        "plan.max_num_seqs: 64 -> 32",
    ]


def test_a_release_does_not_differ_from_itself():
    assert diff_releases(release(), release(plan=reordered(PLAN))) == []


def test_a_release_cannot_be_changed():
    with pytest.raises(AttributeError):
        release().port = 1
    assert isinstance(release(), Release)


def env_as_systemd_reads_it(text):
    """EnvironmentFile= without quotes and backslashes: comments, the first '=', white space stripped at the ends."""
    lines = [line for line in text.split("\n") if line.strip() and line.lstrip()[0] not in "#;"]
    return {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}


def env_as_docker_reads_it(text):
    """--env-file: comments, the first '=', the value as it stands."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


@given(st.text(max_size=40))
def test_systemd_and_docker_read_every_value_that_passes_alike(value):
    try:
        made = release(deployment=DEPLOYMENT | {"environment": {"X": value}})
    except Refusal:
        return
    text = made.files()["release.env"]
    assert env_as_systemd_reads_it(text) == env_as_docker_reads_it(text)
    assert env_as_docker_reads_it(text)["X"] == value


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_canonical_json_depends_on_content_only(value):
    assert canonical_json(value) == canonical_json(reordered(value))
    assert json.loads(canonical_json(value)) == value


def test_canonical_json_refuses_what_json_does_not_know():
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": float("nan")})


def test_the_engine_facts_decide_the_version_of_the_configuration():
    """An inventory may pin another version than the catalogue, without a word in the deployment."""
    deployment = {key: value for key, value in DEPLOYMENT.items() if key != "engine_version"}
    info = engine_info("vllm", "0.17.1")
    plan = PLAN | {"prefix_caching": False}
    made = build_release(deployment, info, info.image, DIGEST, MODEL, "0123abc", MANIFEST, plan, None)
    assert made.engine_version == "0.17.1"
    assert made.config["no-enable-prefix-caching"] is True


def test_the_weights_may_lie_elsewhere():
    info = engine_of(DEPLOYMENT)
    made = build_release(
        DEPLOYMENT, info, info.image, DIGEST, MODEL, "0123abc", MANIFEST, PLAN, None, models_dir="/data/models/"
    )
    assert "METALSERVE_MODEL_DIR=/data/models/tiny/0123abc\n" in made.files()["release.env"]
    assert read_release(made.files()["release.json"]) == made
