"""The catalogue: its own entries, entries of an inventory, GPUs and host shapes."""

import pytest

from metalserve import catalogue
from metalserve.errors import Refusal
from metalserve.planner.shape import read_shape

ENTRY = {"format": "bf16", "context_length": 4096, "shape": {"hidden_size": 8}}


@pytest.mark.parametrize("key", catalogue.models())
def test_entries_agree_with_themselves(key):
    entry = catalogue.model(key)
    shape = read_shape(entry.shape)
    assert entry.context_length_tokens == shape.max_position_tokens
    assert entry.repositories["huggingface"]
    assert entry.sources
    assert catalogue.models({key: entry.as_dict()})[key] == entry


@pytest.mark.parametrize("key", ["qwen3.6-35b-a3b", "qwen3.6-35b-a3b-fp8", "qwen3.5-35b-a3b", "qwen3.5-35b-a3b-fp8"])
def test_the_models_of_the_house(key):
    entry = catalogue.model(key)
    assert entry.repositories["modelscope"] == entry.repositories["huggingface"]
    assert entry.revision is None
    for engine in ("vllm", "sglang"):
        assert entry.parsers[engine] == catalogue.Parsers("qwen3_coder", "qwen3")
    assert entry.minimum_versions["vllm"] == "0.17.0"


def test_an_inventory_adds_and_replaces():
    found = catalogue.models({"mine": ENTRY, "qwen3-32b": ENTRY})
    assert found["mine"].context_length_tokens == 4096
    assert found["qwen3-32b"].context_length_tokens == 4096
    assert "mine" not in catalogue.models()


@pytest.mark.parametrize(
    ("key", "entry", "message"),
    [
        ("Mine", ENTRY, "has a key that cannot be a directory name"),
        ("mine", "bf16", "is described by a str"),
        ("mine", {**ENTRY, "size": 3}, "has the unknown field 'size'"),
        ("mine", {**ENTRY, "format": "int3"}, "has the format 'int3'. Needed: one of bf16"),
        ("mine", {**ENTRY, "context_length": "4k"}, "has the context_length '4k'. Needed: a whole number of tokens"),
        ("mine", {**ENTRY, "shape": {}}, "has no shape"),
        ("mine", {**ENTRY, "format": "fp8"}, "says format fp8, its shape says bf16"),
        ("mine", {**ENTRY, "repositories": {"github": "x/y"}}, "names the repository host 'github'"),
        ("mine", {**ENTRY, "parsers": {"tgi": {}}}, "names the engine 'tgi'"),
        ("mine", {**ENTRY, "minimum_versions": {"vllm": "new"}}, "has the minimum vllm version 'new'"),
    ],
)
def test_a_wrong_entry_is_refused(key, entry, message):
    with pytest.raises(Refusal, match=message) as caught:
        catalogue.models({key: entry})
    assert "serving_models" in caught.value.change


def test_gpus_are_found_by_pci_id_and_alias():
    assert catalogue.gpu_by_pci_id("10DE:2335").key == "H200-SXM5-141GB"
    assert catalogue.gpu_by_pci_id("10de:0000") is None
    assert catalogue.gpu_by_pci_id(None) is None
    assert catalogue.gpu("h800").nvlink_links == 8
    assert catalogue.gpu("NVIDIA A100-SXM4-80GB").compute_capability == "8.0"


def test_pci_ids_and_names_are_unique():
    known = catalogue.gpus().values()
    ids = [pci for gpu in known for pci in gpu.pci_ids]
    labels = [label.lower() for gpu in known for label in (gpu.key, *gpu.aliases)]
    assert len(set(ids)) == len(ids)
    assert len(set(labels)) == len(labels)


def test_usable_memory_of_an_h200_is_what_cuda_reports():
    gpu = catalogue.gpu("H200")
    assert gpu.memory_usable_bytes == 150_109_880_320
    assert gpu.memory_total_bytes == 150_754_820_096


@pytest.mark.parametrize(
    ("shape", "count", "name", "link"),
    [
        ("8xH800", 8, "NVIDIA H800", "NV8"),
        ("8xA100-SXM4-80GB", 8, "NVIDIA A100-SXM4-80GB", "NV12"),
        ("1xL40S", 1, "NVIDIA L40S", None),
        ("2xRTX-4090", 2, "NVIDIA GeForce RTX 4090", "SYS"),
        ("H100", 1, "NVIDIA H100 80GB HBM3", None),
        ("2x4090", 2, "NVIDIA GeForce RTX 4090", "SYS"),
    ],
)
def test_a_shape_becomes_host_facts(shape, count, name, link):
    host = catalogue.host_from_shape(shape)
    assert len(host["gpus"]) == count
    assert {gpu["name"] for gpu in host["gpus"]} == {name}
    assert host["schema"] == 1
    if link:
        assert host["links"][0][:2] == ["X", link]


def test_a_cpu_shape():
    host = catalogue.host_from_shape("cpu-24GiB")
    assert host["gpus"] == []
    assert host["memory"]["total_bytes"] == 24 << 30


@pytest.mark.parametrize("shape", ["", "0xH100", "eight H100", "x", "8x"])
def test_a_shape_that_cannot_be_read(shape):
    with pytest.raises(Refusal, match=r"is not a host shape|is not in the catalogue"):
        catalogue.host_from_shape(shape)


def test_an_unknown_gpu_names_the_closest():
    with pytest.raises(Refusal, match=r"the closest are .*H800"):
        catalogue.host_from_shape("8xH8000")
