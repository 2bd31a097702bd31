"""From deployments and host facts to releases: every refusal with its sentence, and what a release is made of."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from metalserve import catalogue, deployments
from metalserve.deployments import (
    DEFAULTS,
    REQUIRED,
    Inputs,
    check_ports,
    engine_for,
    gate_endpoints,
    lock_requests,
    normalize,
    plan_table,
    serving_releases,
    weight_sources,
)
from metalserve.errors import Refusal

ROOT = Path(__file__).resolve().parents[2]
MODEL = "qwen3.6-35b-a3b-fp8"
QWEN = {"name": "qwen", "engine": "vllm", "model": MODEL, "port": 8000}
DIGEST = "sha256:" + "d" * 64
IMAGE = "vllm/vllm-openai:v0.33.0"
FILES = [{"path": "config.json", "size_bytes": 2, "sha256": "a" * 64}]
LOCK = {
    "images": {IMAGE: {"digest": DIGEST, "compressed_bytes": 9_000_000_000}},
    "models": {MODEL: {"revision": "0123abcd", "files": FILES}},
}
INPUTS = Inputs(models={}, engines={}, lock=LOCK, weight_sources={}, models_dir="/var/lib/metalserve/models")
PUBLIC_KEY = (
    ec.generate_private_key(ec.SECP256R1())
    .public_key()
    .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    .decode()
)
H800 = catalogue.host_from_shape("8xH800")
CPU = catalogue.host_from_shape("cpu-24GiB")


def lab() -> tuple[list[dict], Inputs]:
    """The lab's deployments and inputs, with addresses in the place of its variables."""
    text = (ROOT / "inventories/lab/group_vars/all/main.yml").read_text(encoding="utf-8")
    text = text.replace("{{ lab_registry }}", "registry:5000").replace("{{ lab_mirror_address }}", "mirror")
    variables = yaml.safe_load(text)
    image = variables["serving_engines"]["vllm"]["image"]
    return variables["serving_deployments"], Inputs(
        models=variables["serving_models"],
        engines=variables["serving_engines"],
        lock={
            "images": {image: {"digest": DIGEST}},
            "models": {"lab-moe-tiny": {"revision": "0123abcd", "files": FILES}},
        },
        weight_sources=variables["serving_weight_sources"],
        models_dir="/var/lib/metalserve/models",
    )


def one(*, facts=H800, inputs=INPUTS, **changes):
    """The only release of one deployment."""
    (release,) = serving_releases([{**QWEN, **changes}], facts, inputs)
    return release


def with_lock(**changes):
    return replace(INPUTS, lock={**LOCK, **changes})


def refusal_of(function, *arguments, **options):
    with pytest.raises(Refusal) as caught:
        function(*arguments, **options)
    return caught.value


def assert_plain(value, where="result"):
    """Only the types that JSON has, none of their subclasses."""
    assert type(value) in (dict, list, str, int, float, bool, type(None)), f"{where} is a {type(value).__name__}"
    if isinstance(value, dict):
        for key, item in value.items():
            assert type(key) is str, f"{where} has the key {key!r}"
            assert_plain(item, f"{where}.{key}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            assert_plain(item, f"{where}[{index}]")


# ---- the form of the deployments ----


def test_defaults_are_filled_in():
    (filled,) = normalize([QWEN])
    assert filled == {**DEFAULTS, **QWEN, "served_names": [MODEL]}


def test_null_stands_for_the_default_and_what_is_given_stays():
    given = {**QWEN, "bind_address": None, "served_names": ["a", "b"], "context_length": 4096, "gpus": [0]}
    (filled,) = normalize([given])
    assert filled["bind_address"] == "0.0.0.0"
    assert (filled["served_names"], filled["context_length"], filled["gpus"]) == (["a", "b"], 4096, [0])


def test_what_was_given_is_not_changed():
    given = dict(QWEN)
    (filled,) = normalize([given])
    filled["served_names"].append("x")
    assert given == QWEN
    assert DEFAULTS["served_names"] == []


def test_the_defaults_are_those_of_the_documentation():
    """Each field of a deployment has a line in docs/deployments.md."""
    text = (ROOT / "docs/deployments.md").read_text(encoding="utf-8")
    assert [field for field in (*REQUIRED, *DEFAULTS) if f"`{field}`" not in text] == []


def test_an_unknown_field_names_the_nearest():
    refusal = refusal_of(normalize, [{**QWEN, "contextlength": 4096}])
    assert refusal.found == "the deployment qwen has the field 'contextlength'"
    assert refusal.needed.startswith("one of name, engine, model, port, ")
    assert refusal.needed.endswith("; the nearest is 'context_length'")
    assert refusal.change == "the field in serving_deployments; flags of the engine go under engine_args of qwen"


def test_an_unknown_field_that_is_near_to_nothing():
    refusal = refusal_of(normalize, [{**QWEN, "zzzz": 1}])
    assert refusal.needed == f"one of {', '.join((*REQUIRED, *DEFAULTS))}"


def test_a_deployment_without_a_name():
    refusal = refusal_of(normalize, [{"engine": "vllm", "port": None, "model": ""}])
    assert refusal.found == "the deployment (unnamed) without name, model, port"
    assert refusal.needed == "name, engine, model, port for each deployment"
    assert refusal.change == "serving_deployments"


@pytest.mark.parametrize("field", REQUIRED)
def test_a_required_field_that_is_missing(field):
    refusal = refusal_of(normalize, [{name: value for name, value in QWEN.items() if name != field}])
    assert refusal.found == f"the deployment {'(unnamed)' if field == 'name' else 'qwen'} without {field}"


@pytest.mark.parametrize("name", ["Qwen", "qwen_a", "-qwen", "qwen-", "qwen.a", "a/b", "a b", "a\n", "q" * 41])
def test_a_name_that_is_no_unit_and_directory(name):
    refusal = refusal_of(normalize, [{**QWEN, "name": name}])
    assert refusal.found == f"a deployment called {name!r}"
    assert (
        refusal.needed == "lower-case letters, digits and dashes, 40 at most: the name becomes a unit and a directory"
    )
    assert refusal.change == "`name` in serving_deployments"


@pytest.mark.parametrize("name", ["q", "qwen-3-6", "0", "q" * 40])
def test_a_name_that_is_one(name):
    assert normalize([{**QWEN, "name": name}])[0]["name"] == name


@pytest.mark.parametrize("port", [0, 65536, -1, "8000", 8000.0, True])
def test_a_port_that_is_no_port(port):
    refusal = refusal_of(normalize, [{**QWEN, "port": port}])
    assert refusal.found == f"port {port!r} of the deployment qwen"
    assert refusal.needed == "a number from 1 to 65535"
    assert refusal.change == "`port` of qwen in serving_deployments"


def test_an_unknown_engine():
    refusal = refusal_of(normalize, [{**QWEN, "engine": "vlm"}])
    assert refusal.found == "engine 'vlm' of the deployment qwen"
    assert refusal.needed == "one of vllm, sglang"
    assert refusal.change == "`engine` of qwen in serving_deployments"


def test_two_deployments_of_one_name():
    refusal = refusal_of(normalize, [QWEN, {**QWEN, "port": 8001}])
    assert refusal.found == "the deployments qwen and qwen both have the name qwen"
    assert refusal.needed == "a name of its own for each deployment of a host"
    assert refusal.change == "`name` of one of them in serving_deployments"


def test_two_deployments_on_one_port():
    refusal = refusal_of(normalize, [QWEN, {**QWEN, "name": "other"}])
    assert refusal.found == "the deployments qwen and other both have port 8000"
    assert refusal.needed == "a port of its own for each deployment of a host"
    assert refusal.change == "`port` of one of them in serving_deployments"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"name": 123}, "123"),
        ({"model": 5}, "5"),
        ({"served_names": "qwen"}, "served_names"),
        ({"gpus": []}, "gpus"),
        ({"gpus": [True]}, "gpus"),
        ({"gpus": ["0"]}, "gpus"),
        ({"gpus": "0,1"}, "gpus"),
        ({"bind_address": "eth0"}, "eth0"),
        ({"engine_args": ["--x"]}, "engine_args"),
        ({"environment": "A=1"}, "environment"),
        ({"context_length": "long"}, "long"),
        ({"memory_share": "all"}, "all"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_field_of_the_wrong_type_is_refused_with_a_sentence(change, word):
    assert word in str(refusal_of(one, **change))


@pytest.mark.parametrize("items", [["qwen"], {"qwen": {"engine": "vllm"}}], ids=["a name", "a mapping"])
def test_deployments_that_are_no_list_of_mappings_are_refused_with_a_sentence(items):
    assert "serving_deployments" in str(refusal_of(serving_releases, items, H800, INPUTS))


# ---- GPUs ----


def both(first, second):
    """Two deployments on one 8xH800 host with these `gpus`."""
    return [{**QWEN, "gpus": first}, {**QWEN, "name": "other", "port": 8001, "gpus": second}]


def test_deployments_side_by_side():
    first, second = serving_releases(both([0, 1], [2, 7]), H800, INPUTS)
    assert (first["plan"]["gpus_used"], second["plan"]["gpus_used"]) == ([0, 1], [2, 7])


def test_a_number_of_gpus_takes_free_ones():
    first, second = serving_releases(both(4, [0, 1]), H800, INPUTS)
    assert second["plan"]["gpus_used"] == [0, 1]
    assert len(first["plan"]["gpus_used"]) == 4
    assert not set(first["plan"]["gpus_used"]) & {0, 1}
    devices = first["files"]["release.env"].splitlines()
    assert sum(line.count("nvidia.com/gpu=") for line in devices) == 4


def test_more_gpus_than_are_free():
    assert "lower `gpus`" in refusal_of(serving_releases, both(7, [0, 1]), H800, INPUTS).change


def test_two_deployments_on_one_gpu():
    refusal = refusal_of(serving_releases, both([0, 1], [1, 2]), H800, INPUTS)
    assert refusal.found == "the deployments qwen and other both want GPU 1"
    assert refusal.needed == "each GPU in one deployment"
    assert refusal.change.startswith("`gpus` of both in serving_deployments")


def test_all_beside_another_deployment():
    refusal = refusal_of(serving_releases, both("all", [7]), H800, INPUTS)
    assert refusal.found == "the deployments qwen and other both want GPU 7"


def test_a_gpu_that_the_host_does_not_have():
    refusal = refusal_of(serving_releases, both([8], [0]), H800, INPUTS)
    assert "GPU 8 of the deployment qwen" in refusal.found
    assert refusal.change == "`gpus` of qwen in serving_deployments"


def test_one_gpu_twice_in_one_deployment():
    refusal = refusal_of(normalize, [{**QWEN, "gpus": [0, 0]}])
    assert refusal.found == "gpus [0, 0] of the deployment qwen"
    assert "different indexes" in refusal.needed


def test_gpus_on_a_host_without_any():
    deployments_, inputs = lab()
    refusal = refusal_of(serving_releases, [{**deployments_[0], "gpus": [0]}], CPU, inputs)
    assert "a host without GPUs" in refusal.found


# ---- drivers ----


def test_both_are_asked_before_anything_is_planned():
    broken = {**H800, "driver": {"state": "mismatch"}}
    assert "state 'mismatch'" in refusal_of(one, facts=broken).found
    old = {**H800, "driver": {"state": "ok", "loaded": "570.1"}}
    assert refusal_of(one, facts=old).found.startswith("driver 570.1 under")


# ---- ports ----

NGINX = {"address": "0.0.0.0", "port": 8000, "pid": 812, "process": "nginx", "deployment": None}


def port_check(socket, **changes):
    check_ports(normalize([{**QWEN, **changes}]), [{**NGINX, **socket}])


def test_a_port_in_use_by_a_process():
    refusal = refusal_of(port_check, {})
    assert refusal.found == "port 8000 of the deployment qwen is in use on 0.0.0.0 by process nginx (pid 812)"
    assert refusal.needed == "a free port"
    assert refusal.change == "`port` of qwen in serving_deployments, or stop that process"


def test_a_port_in_use_by_nobody_knows_whom():
    refusal = refusal_of(port_check, {"pid": None, "process": None})
    assert refusal.found.endswith("by process unknown (pid unknown)")


def test_a_port_in_use_by_another_deployment():
    refusal = refusal_of(port_check, {"process": "vllm", "deployment": "old"})
    assert refusal.found.endswith("in use on 0.0.0.0 by the deployment old, process vllm (pid 812)")


def test_its_own_engine_may_listen():
    port_check({"deployment": "qwen"})


def test_another_port_is_free():
    port_check({"port": 8001})


@pytest.mark.parametrize(
    ("listening", "wanted"),
    [
        ("0.0.0.0", "0.0.0.0"),
        ("::", "0.0.0.0"),
        ("127.0.0.1", "0.0.0.0"),
        ("10.0.0.5", "::"),
        ("0.0.0.0", "10.0.0.5"),
        ("::", "10.0.0.5"),
        ("10.0.0.5", "10.0.0.5"),
    ],
)
def test_addresses_that_overlap(listening, wanted):
    refusal = refusal_of(port_check, {"address": listening}, bind_address=wanted)
    assert f"is in use on {listening} by" in refusal.found


@pytest.mark.parametrize(("listening", "wanted"), [("127.0.0.1", "10.0.0.5"), ("10.0.0.6", "10.0.0.5")])
def test_addresses_that_do_not(listening, wanted):
    port_check({"address": listening}, bind_address=wanted)


def test_ports_are_checked_for_a_host():
    assert "nginx" in refusal_of(one, facts={**H800, "listening": [NGINX]}).found


# ---- what else stops a host ----


def test_a_host_without_deployments():
    refusal = refusal_of(serving_releases, [], H800, INPUTS)
    assert refusal.found == "a host in serving_hosts without deployments"
    assert refusal.needed == "at least one entry in serving_deployments"
    assert refusal.change == "serving_deployments of this host, or take it out of the group serving_hosts"


def test_an_unknown_model():
    refusal = refusal_of(one, model="qwen3.6-35b-a3b-fp9")
    assert refusal.found == "model 'qwen3.6-35b-a3b-fp9' is not in the catalogue"
    assert f"the closest are {MODEL}, " in refusal.needed
    assert refusal.change == "set `model` to a known key, or describe the model in `serving_models`"


def test_an_image_without_a_lock():
    refusal = refusal_of(one, image="vllm/vllm-openai:v0.33.0-cu129")
    assert refusal.found == "no digest locked for vllm/vllm-openai:v0.33.0-cu129"
    assert refusal.needed == "a digest beside the tag, so that every host runs the same bytes"
    assert refusal.change == (
        "run `ansible-playbook playbooks/ops/lock.yml` with this inventory; it writes them down once"
    )


def test_a_model_without_a_lock():
    refusal = refusal_of(one, inputs=with_lock(models={}))
    assert refusal.found == f"no revision and manifest locked for {MODEL}"
    assert refusal.needed == "a commit and file hashes, so that every host runs the same bytes"


@pytest.mark.parametrize("lock", [{}, {"images": None, "models": None}])
def test_an_empty_lock(lock):
    assert refusal_of(one, inputs=replace(INPUTS, lock=lock)).found == f"no digest locked for {IMAGE}"


def test_a_lock_with_an_empty_manifest():
    refusal = refusal_of(one, inputs=with_lock(models={MODEL: {"revision": "0123abcd", "files": []}}))
    assert refusal.found.startswith(f"the lock of the model {MODEL}: The manifest lists no files")
    assert refusal.needed == "its manifest"
    assert refusal.change == "run playbooks/ops/lock.yml"


@pytest.mark.parametrize("entry", [{"revision": "0123abcd"}, {"files": FILES}], ids=["no files", "no revision"])
def test_a_lock_of_a_model_that_lacks_a_part_is_refused_with_a_sentence(entry):
    assert MODEL in str(refusal_of(one, inputs=with_lock(models={MODEL: entry})))


def test_a_lock_of_an_image_without_its_digest():
    refusal = refusal_of(one, inputs=with_lock(images={IMAGE: {"compressed_bytes": 1}}))
    assert refusal.found == f"the image {IMAGE} without a digest"


# ---- the engine ----


def test_the_catalogue_pins_the_engine():
    engine = engine_for(QWEN, {})
    assert (engine.version, engine.image) == ("0.33.0", IMAGE)


@pytest.mark.parametrize("engines", [{"vllm": None}, {"sglang": {"version": "0.5.23", "image": "x/y:1"}}])
def test_pins_of_the_inventory_for_nothing_or_another_engine(engines):
    assert engine_for(QWEN, engines).image == IMAGE


PINS = {"vllm": {"version": "0.32.0", "image": "registry:5000/vllm-cpu:0.32.0"}}


@pytest.mark.parametrize(
    ("engines", "changes", "version", "image"),
    [
        (PINS, {}, "0.32.0", "registry:5000/vllm-cpu:0.32.0"),
        ({"vllm": {"version": "0.32.0"}}, {}, "0.32.0", "vllm/vllm-openai:v0.32.0"),
        ({"vllm": {"image": "mirror/vllm:v0.33.0"}}, {}, "0.33.0", "mirror/vllm:v0.33.0"),
        # The inventory's image belongs to the inventory's version.
        (PINS, {"engine_version": "0.27.1"}, "0.27.1", "vllm/vllm-openai:v0.27.1"),
        (PINS, {"engine_version": "0.32.0"}, "0.32.0", "registry:5000/vllm-cpu:0.32.0"),
        (PINS, {"image": "own/vllm:1"}, "0.32.0", "own/vllm:1"),
        (PINS, {"image": "own/vllm:1", "engine_version": "0.27.1"}, "0.27.1", "own/vllm:1"),
    ],
)
def test_the_deployment_wins_over_the_inventory_and_that_over_the_catalogue(engines, changes, version, image):
    engine = engine_for({**QWEN, **changes}, engines)
    assert (engine.version, engine.image) == (version, image)


# ---- places of the weights ----


def test_the_default_place_is_the_revision_on_hugging_face():
    model = catalogue.model(MODEL)
    assert weight_sources(model, "0123abcd", {}) == ["https://huggingface.co/Qwen/Qwen3.6-35B-A3B-FP8/resolve/0123abcd"]


def test_all_names_are_filled_in():
    model = catalogue.model(MODEL)
    templates = ["http://mirror/{key}/{revision}", "/mnt/{huggingface}", "https://modelscope.cn/{modelscope}"]
    hosts = model.repositories
    assert weight_sources(model, "0123abcd", {MODEL: templates}) == [
        f"http://mirror/{MODEL}/0123abcd",
        f"/mnt/{hosts['huggingface']}",
        f"https://modelscope.cn/{hosts['modelscope']}",
    ]


def test_the_places_of_a_model_win_over_the_default_ones():
    model = catalogue.model(MODEL)
    sources = {"default": ["/mnt/default/{key}"], "other": ["/mnt/other"]}
    assert weight_sources(model, "r", sources) == [f"/mnt/default/{MODEL}"]
    assert weight_sources(model, "r", {**sources, MODEL: ["/mnt/own"]}) == ["/mnt/own"]


def test_a_place_that_needs_a_name_that_the_model_lacks_is_left_out():
    model = replace(catalogue.model(MODEL), repositories={"huggingface": None, "modelscope": None})
    templates = ["https://huggingface.co/{huggingface}/resolve/{revision}", "http://mirror/{key}"]
    assert weight_sources(model, "r", {MODEL: templates}) == [f"http://mirror/{MODEL}"]


def test_no_place_is_left():
    model = replace(catalogue.model(MODEL), repositories={"huggingface": None, "modelscope": None})
    refusal = refusal_of(weight_sources, model, "r", {})
    assert refusal.found == f"no place to fetch {MODEL} from"
    assert refusal.needed == "a repository in its catalogue entry, or a URL or directory"
    assert refusal.change == f"serving_weight_sources.{MODEL}"


@pytest.mark.parametrize("places", ["http://mirror/tiny", ["http://mirror/{model}"]], ids=["a text", "unknown name"])
def test_a_place_that_cannot_be_filled_in_is_refused_with_a_sentence(places):
    refusal = refusal_of(weight_sources, catalogue.model(MODEL), "r", {MODEL: places})
    assert "serving_weight_sources" in refusal.change


# ---- the releases of a host ----


def test_a_release_on_eight_h800():
    release = one()
    assert_plain(release)
    assert re.fullmatch(r"[0-9a-f]{12}", release["release_id"])
    assert sorted(release["files"]) == ["endpoint.json", "engine.yaml", "release.env", "release.json"]
    assert json.loads(release["files"]["release.json"])["id"] == release["release_id"]
    assert release["command"] == ["vllm", "serve", "--config", "/release/engine.yaml"]
    assert release["image"] == {"reference": IMAGE, "digest": DIGEST, "compressed_bytes": 9_000_000_000}
    assert release["model"] == {
        "key": MODEL,
        "revision": "0123abcd",
        "files": FILES,
        "weight_format": "fp8",
        "sources": ["https://huggingface.co/Qwen/Qwen3.6-35B-A3B-FP8/resolve/0123abcd"],
    }
    assert (release["deployment"], release["engine"], release["engine_version"]) == ("qwen", "vllm", "0.33.0")
    assert (release["port"], release["url"]) == (8000, "http://127.0.0.1:8000")
    assert (release["health_route"], release["metrics_route"]) == ("/health", "/metrics")
    assert (release["served_names"], release["thinking"]) == ([MODEL], "off")
    assert release["plan"]["gpus_used"] == list(range(8))
    assert json.loads(json.dumps(release)) == release


def test_the_lab_on_a_cpu_host():
    items, inputs = lab()
    (release,) = serving_releases(items, CPU, inputs)
    assert_plain(release)
    assert (release["deployment"], release["engine_version"]) == ("tiny", "0.32.0")
    assert release["image"] == {
        "reference": "registry:5000/metalserve/vllm-cpu:0.32.0",
        "digest": DIGEST,
        "compressed_bytes": None,
    }
    assert release["model"]["sources"] == ["http://mirror:8080/lab-moe-tiny/0123abcd"]
    # Its chat template knows no thinking.
    assert release["thinking"] == "absent"
    assert release["plan"]["device"] == "cpu"
    config = yaml.safe_load(release["files"]["engine.yaml"])
    assert (config["max-model-len"], config["max-num-seqs"]) == (4096, 16)


PACKAGE = f"some-plugin==1.2.3 --hash=sha256:{'b' * 64}"


def with_packages(*packages: str, **more: str) -> Inputs:
    return replace(INPUTS, engines={"vllm": {"version": "0.33.0", "packages": list(packages), **more}})


def test_packages_make_another_image_of_which_the_name_is_the_content():
    plain = one()
    (release,) = serving_releases([QWEN], H800, with_packages(PACKAGE))
    record = json.loads(release["files"]["release.json"])
    assert re.fullmatch("metalserve/derived@sha256:[0-9a-f]{64}", record["image"])
    assert record["image"] != f"metalserve/derived@{DIGEST}"
    assert release["release_id"] != plain["release_id"]
    # What is pulled is the image below.
    assert release["image"] == {**plain["image"], "packages": [PACKAGE], "python": "3.12"}
    (other,) = serving_releases([QWEN], H800, with_packages(PACKAGE.replace("1.2.3", "1.2.4"), python="3.11"))
    assert other["release_id"] != release["release_id"]
    assert other["image"]["python"] == "3.11"


def test_a_deployment_with_an_image_of_its_own_gets_no_packages():
    own = {**QWEN, "image": IMAGE}
    (release,) = serving_releases([own], H800, with_packages(PACKAGE))
    assert "packages" not in release["image"]


@pytest.mark.parametrize("package", ["some-plugin", "some-plugin==1.2.3", PACKAGE.replace("==", ">="), "a\nb", 5])
def test_a_package_that_is_not_pinned_is_refused(package):
    refusal = refusal_of(serving_releases, [QWEN], H800, with_packages(package))
    assert refusal.found == f"the package {package!r} of vllm"
    assert refusal.needed.startswith("an exact version and the hash of its wheel")
    assert refusal.change.startswith("serving_engines.vllm.packages")


def test_an_image_that_its_keys_have_not_signed_is_refused():
    refusal = refusal_of(serving_releases, [QWEN], H800, replace(INPUTS, image_keys={"default": [PUBLIC_KEY]}))
    assert refusal.found == f"the image {IMAGE} ({DIGEST}) unsigned"


def test_two_deployments_share_a_host():
    items = [{**QWEN, "gpus": [0, 1, 2, 3]}, {**QWEN, "name": "other", "port": 8001, "gpus": [4, 5, 6, 7]}]
    first, second = serving_releases(items, H800, INPUTS)
    assert (first["plan"]["gpus_used"], second["plan"]["gpus_used"]) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert first["release_id"] != second["release_id"]


def test_sglang_is_ready_at_another_route_and_started_in_another_way():
    inputs = with_lock(images={"lmsysorg/sglang:v0.5.23": {"digest": DIGEST}})
    release = one(engine="sglang", port=30000, inputs=inputs)
    assert release["health_route"] == "/ready"
    assert release["command"][:2] == ["sglang", "serve"]
    assert "/models/${METALSERVE_MODEL_KEY}" in release["command"]
    assert release["command"][-2:] == ["--config", "/release/engine.yaml"]


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://127.0.0.1:8000"),
        ("10.0.0.5", "http://10.0.0.5:8000"),
        ("::1", "http://[::1]:8000"),
    ],
)
def test_where_the_host_itself_asks_its_engine(address, url):
    assert one(bind_address=address)["url"] == url


def test_the_id_is_the_same_for_the_same_inputs():
    backwards = dict(reversed(QWEN.items()))
    assert one()["release_id"] == serving_releases([backwards], H800, INPUTS)[0]["release_id"]
    # A default that is written down changes nothing.
    assert one(eager=False, gpus="all", served_names=[MODEL])["release_id"] == one()["release_id"]


def test_the_id_is_the_same_in_another_process():
    script = (
        "import json, sys; from metalserve import catalogue, deployments; items, inputs = json.load(sys.stdin);"
        "host = catalogue.host_from_shape('8xH800');"
        "print(deployments.serving_releases(items, host, deployments.Inputs(**inputs))[0]['release_id'])"
    )
    inputs = {"models": {}, "engines": {}, "lock": LOCK, "weight_sources": {}, "models_dir": INPUTS.models_dir}
    run = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps([[QWEN], inputs]),
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == one()["release_id"]


OTHER_LOCK = {
    "digest": with_lock(images={IMAGE: {"digest": "sha256:" + "e" * 64}}),
    "revision": with_lock(models={MODEL: {"revision": "4567", "files": FILES}}),
    "manifest": with_lock(models={MODEL: {"revision": "0123abcd", "files": [{**FILES[0], "sha256": "b" * 64}]}}),
    "models_dir": replace(INPUTS, models_dir="/data"),
}


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"port": 8001},
        {"bind_address": "10.0.0.5"},
        {"gpus": [0, 1, 2, 3]},
        {"context_length": 4096},
        {"served_names": ["other"]},
        {"environment": {"NCCL_DEBUG": "WARN"}},
        {"engine_args": {"seed": 1}},
        {"facts": {**H800, "driver": {"state": "ok", "loaded": "580.95.05"}}},
        *({"inputs": inputs} for inputs in OTHER_LOCK.values()),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_id_changes_with_what_runs(changes):
    assert one(**changes)["release_id"] != one()["release_id"]


def test_the_id_does_not_change_with_the_places_of_the_weights():
    elsewhere = replace(INPUTS, weight_sources={MODEL: ["/mnt/weights"]})
    assert one(inputs=elsewhere)["model"]["sources"] == ["/mnt/weights"]
    assert one(inputs=elsewhere)["release_id"] == one()["release_id"]


def test_the_id_does_not_change_with_the_words_of_the_plan(monkeypatch):
    before, make_plan = one(), deployments.make_plan

    def reworded(*arguments, **options):
        return replace(make_plan(*arguments, **options), reasons={"gpus_used": "because"})

    monkeypatch.setattr(deployments, "make_plan", reworded)
    after = one()
    assert after["plan"]["reasons"] != before["plan"]["reasons"]
    assert after["release_id"] == before["release_id"]


def test_the_id_changes_with_what_the_plan_decides(monkeypatch):
    before, make_plan = one(), deployments.make_plan
    monkeypatch.setattr(
        deployments,
        "make_plan",
        lambda *arguments, **options: replace(make_plan(*arguments, **options), max_num_seqs=7),
    )
    assert one()["release_id"] != before["release_id"]


# ---- what is derived from releases ----


def test_the_gate_asks_for_the_first_name_and_keeps_its_result_beside_the_release():
    release = one(served_names=["chat", "qwen"])
    assert gate_endpoints([release], "/etc/metalserve") == [
        {
            "name": "qwen",
            "url": "http://127.0.0.1:8000",
            "model": "chat",
            "served_names": ["qwen"],
            "engine": "vllm",
            "thinking": "off",
            "release_id": release["release_id"],
            "result_path": f"/etc/metalserve/qwen/releases/{release['release_id']}/gate.json",
        }
    ]


def test_without_a_root_no_result_is_kept():
    (endpoint,) = gate_endpoints([one()], None)
    assert sorted(endpoint) == ["engine", "model", "name", "served_names", "thinking", "url"]


def test_the_columns_of_the_plan_stand_below_their_names():
    items = [
        {**QWEN, "gpus": [0, 1, 2, 3]},
        {**QWEN, "name": "another-deployment", "port": 8001, "gpus": [4], "context_length": 4096},
    ]
    releases = serving_releases(items, H800, INPUTS)
    head, *rows = plan_table(releases)
    names = re.split(r"  +", head)
    assert names == ["deployment", "model", "engine", "GPUs", "TP", "context", "sequences", "KV tokens", "release"]
    starts = [head.index(name) for name in names]
    for row, release in zip(rows, releases, strict=True):
        cells = [row[a:b].rstrip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        plan = release["plan"]
        assert cells == [
            release["deployment"],
            MODEL,
            "vllm 0.33.0",
            ",".join(map(str, plan["gpus_used"])),
            str(plan["tensor_parallel_size"]),
            str(plan["max_model_len"]),
            str(plan["max_num_seqs"]),
            str(plan["kv_cache_tokens"]),
            release["release_id"],
        ]
        assert row == row.rstrip()
        # Two spaces at least between one column and the next.
        assert {row[start - 2 : start] for start in starts[1:]} == {"  "}


def test_the_table_of_a_cpu_host_and_of_nothing():
    items, inputs = lab()
    assert re.split(r"  +", plan_table(serving_releases(items, CPU, inputs))[1])[3] == "CPU"
    assert len(plan_table([])) == 1


def test_what_has_to_be_locked_is_asked_for_once():
    items = [QWEN, QWEN, {**QWEN, "name": "other", "engine": "sglang"}]
    assert lock_requests(items, replace(INPUTS, lock={})) == {
        "images": [IMAGE, "lmsysorg/sglang:v0.5.23"],
        "models": [
            {
                "key": MODEL,
                "revision": catalogue.model(MODEL).revision,
                "sources": ["huggingface:Qwen/Qwen3.6-35B-A3B-FP8"],
            }
        ],
    }


def test_the_lab_asks_for_its_own_image_and_mirror():
    items, inputs = lab()
    assert lock_requests(items, inputs) == {
        "images": ["registry:5000/metalserve/vllm-cpu:0.32.0"],
        "models": [
            {
                "key": "lab-moe-tiny",
                "revision": None,
                "sources": ["http://mirror:8080/lab-moe-tiny/{revision}"],
            }
        ],
    }


def test_lock_requests_refuse_what_the_plan_would_refuse():
    assert refusal_of(lock_requests, [{**QWEN, "engine": "vlm"}], INPUTS).found.startswith("engine 'vlm'")
    assert "not in the catalogue" in refusal_of(lock_requests, [{**QWEN, "model": "gpt-5"}], INPUTS).found


# ---- API keys ----


def test_a_key_file_is_another_release_and_no_secret():
    plain, keyed = one(), one(api_key_file="/etc/keys/qwen")
    assert plain["release_id"] != keyed["release_id"]
    assert "METALSERVE_API_KEY_FILE=/etc/keys/qwen\n" in keyed["files"]["release.env"]
    assert json.loads(keyed["files"]["endpoint.json"])["api_key_file"] == "/etc/keys/qwen"
    assert "api_key_file" not in plain["files"]["release.env"]
    (endpoint,) = gate_endpoints([keyed], None)
    assert endpoint["api_key_file"] == "/etc/keys/qwen"
    (endpoint,) = gate_endpoints([plain], None)
    assert "api_key_file" not in endpoint


@pytest.mark.parametrize("path", ["keys/qwen", "/etc/my keys/qwen"])
def test_a_key_file_without_an_absolute_path(path):
    refusal = refusal_of(one, api_key_file=path)
    assert refusal.found == f"api_key_file {path!r} of the deployment qwen"
    assert "an absolute path on the host" in refusal.needed
    assert "`api_key_file` of qwen" in refusal.change


def test_a_key_file_for_an_engine_that_takes_it_on_its_command_line():
    refusal = refusal_of(one, engine="sglang", api_key_file="/etc/keys/qwen")
    assert "with sglang, which takes its key on the command line only" in refusal.found


def test_a_release_can_be_proven_without_its_inventory():
    """Going back to it must not need the inventory that asked for it."""
    release = one(served_names=["a", "b"])
    endpoint = json.loads(release["files"]["endpoint.json"])
    assert endpoint == {
        "engine": "vllm",
        "unit": "vllm@qwen.service",
        "url": release["url"],
        "ready_route": "/health",
        "metrics_route": "/metrics",
        "model": "a",
        "served_names": ["b"],
        "thinking": release["thinking"],
        "weights_bytes": sum(entry["size_bytes"] for entry in FILES),
        "api_key_file": None,
        "answers_alone": True,
    }
