"""CUDA images against drivers and GPUs: every row of the table that the rules were written from."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from metalserve.catalogue import gpu_by_pci_id
from metalserve.driver_state import driver_data
from metalserve.engines.info import engine_info
from metalserve.verdict.cuda import (
    branch_cuda,
    compatibility,
    cuda_level,
    image_check,
    image_cuda,
    oldest_branch,
    product,
    rules,
)

ROWS = list(csv.DictReader((Path(__file__).parent / "compatibility.csv").open(encoding="utf-8")))
# A product for each class of the table.
CLASSES = {
    "ampere_dc": "10de:20b2",
    "ada_dc": "10de:26b9",
    "hopper_dc": "10de:2330",
    "hopper_h200": "10de:2335",
    "ada_geforce": "10de:2684",
    "blackwell_dc": "10de:2901",
}
VLLM = engine_info("vllm")


def gpu(pci_id: str) -> dict:
    return {"pci_id": pci_id}


def test_the_table_is_whole():
    assert len(ROWS) == 612
    assert Counter(row["gpu_class"] for row in ROWS) == dict.fromkeys(CLASSES, 102)


@pytest.mark.parametrize("name", CLASSES)
def test_every_row_of_the_table(name):
    found = product(gpu(CLASSES[name]))
    assert found is not None
    wrong = [
        (row["driver_branch"], row["image_cuda"], row["verdict"], answer)
        for row in ROWS
        if row["gpu_class"] == name
        for answer in [compatibility(found, int(row["driver_branch"]), row["image_cuda"])]
        if answer != row["verdict"]
    ]
    assert wrong == []


def test_the_cuda_of_each_branch_is_that_of_the_table():
    assert {int(row["driver_branch"]): row["driver_cuda"] for row in ROWS} == {
        branch: entry["cuda"] for branch, entry in driver_data()["branches"].items()
    }


def test_every_gpu_of_the_catalogue_has_a_generation():
    from metalserve import catalogue

    unknown = [
        key
        for key, entry in catalogue.gpus().items()
        if product({"name": entry.name, "compute_capability": entry.compute_capability, "pci_id": None}) is None
    ]
    assert unknown == []


def test_a_branch_between_the_listed_ones_has_the_cuda_of_the_one_below():
    assert branch_cuda(582) == "13.0"
    assert branch_cuda(400) is None
    assert branch_cuda(700) == "13.5"


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("NVIDIA GeForce RTX 4090", False), ("NVIDIA RTX 6000 Ada Generation", False), ("NVIDIA L40S", True)],
)
def test_forward_compatibility_is_for_data_centre_gpus(name, allowed):
    found = product({"name": name, "compute_capability": "8.9"})
    assert found is not None
    assert found.forward_compatibility is allowed


@pytest.mark.parametrize(
    ("tag", "locked", "cuda"),
    [
        ("v0.33.0", None, "13.0"),
        ("v0.33.0", {"cuda": "13.0.2"}, "13.0.2"),
        ("v0.30.0-cu129", None, "12.9"),
        ("v0.19.0-cu130", {}, "13.0"),
        ("v0.30.0-cu129", {"cuda": "12.8.1"}, "12.8.1"),
        ("v0.17.1", None, "12.9"),
        ("v0.33.0", {"cuda": "unknown"}, "13.0"),
    ],
)
def test_the_cuda_of_an_image(tag, locked, cuda):
    engine = engine_info("vllm", tag.partition("-")[0], f"vllm/vllm-openai:{tag}")
    assert image_cuda(engine, locked) == cuda


def test_versions_of_cuda():
    assert cuda_level("13.0.1") == (13, 0)
    with pytest.raises(ValueError, match="'new' is no CUDA version"):
        cuda_level("new")


def check(pci_id, driver, engine=VLLM, locked=None, environment=None):
    return image_check([gpu(pci_id)] * 2, driver, engine, locked, environment)


def test_a_driver_that_has_the_cuda_of_the_image():
    found = check("10de:2324", "580.178.04")
    assert (found.verdict, found.found) == ("ok", "driver 580.178.04 has CUDA 13.0 of vllm/vllm-openai:v0.33.0")


def test_minor_version_compatibility_is_ok():
    found = check("10de:2324", "580.178.04", locked={"cuda": "13.2"})
    assert (found.verdict, found.found) == (
        "ok",
        "driver 580.178.04 runs CUDA 13.2 through minor-version compatibility",
    )


def test_no_driver():
    found = check("10de:2324", None)
    assert found.verdict == "refused"
    assert found.found == "no driver for vllm/vllm-openai:v0.33.0, which carries CUDA 13.0"


def test_a_driver_that_does_not_know_the_gpu():
    found = check("10de:2901", "535.309.01")
    assert found.verdict == "refused"
    assert found.found == "driver 535.309.01 with NVIDIA B200"
    assert found.needed == "driver branch 580 or newer; 570 is the first that knows Blackwell"
    assert "nvidia_driver_version" in found.change


def test_an_image_that_does_not_know_the_gpu():
    found = check("10de:2901", "580.178.04", locked={"cuda": "12.6"})
    assert found.verdict == "refused"
    assert found.found == "vllm/vllm-openai:v0.33.0 carries CUDA 12.6, on NVIDIA B200"
    assert found.needed == "CUDA 12.8 or newer, the first that knows Blackwell"
    assert "engine_version" in found.change


def test_a_driver_that_is_too_old_for_the_image():
    found = check("10de:2684", "575.57.08")
    assert found.verdict == "refused"
    assert found.found == "driver 575.57.08 under vllm/vllm-openai:v0.33.0, which carries CUDA 13.0"
    assert found.needed == "driver branch 580 or newer"
    assert found.change == (
        "nvidia_driver_version (with nvidia_driver_manage) or the host's driver, or an older engine with "
        "engine_version of the deployment"
    )


def test_forward_compatibility_must_be_switched_on():
    found = check("10de:2324", "575.57.08")
    assert found.verdict == "refused"
    assert "VLLM_ENABLE_CUDA_COMPATIBILITY: 1 in `environment`" in found.change
    found = check("10de:2324", "575.57.08", environment={"VLLM_ENABLE_CUDA_COMPATIBILITY": "1"})
    assert found.verdict == "warn"
    assert found.found.endswith("it runs only through the compat library in the image")
    off = check("10de:2324", "575.57.08", environment={"VLLM_ENABLE_CUDA_COMPATIBILITY": "0"})
    assert off.verdict == "refused"
    geforce = check("10de:2684", "575.57.08", environment={"VLLM_ENABLE_CUDA_COMPATIBILITY": "1"})
    assert geforce.verdict == "refused", "CUDA refuses it there with error 804"
    sglang = image_check([gpu("10de:2324")], "575.57.08", engine_info("sglang"))
    assert sglang.verdict == "refused"
    assert "COMPATIBILITY" not in sglang.change


def test_a_gpu_that_nobody_knows():
    found = check("10de:ffff", "580.178.04")
    assert found.verdict == "warn"
    assert found.found == "GPUs whose generation is not known here (10de:ffff)"


def test_the_worst_of_different_gpus_decides():
    found = image_check([gpu("10de:2324"), gpu("10de:2901")], "535.309.01", VLLM)
    assert found.found == "driver 535.309.01 with NVIDIA B200"
    assert image_check([], "580.178.04", VLLM).verdict == "ok"


def test_the_oldest_branch_is_a_living_one():
    found = product(gpu("10de:20b2"))
    assert found is not None
    assert oldest_branch(found, "13.0") == 580
    assert oldest_branch(found, "12.4") == 580, "550 would do, but gets no fixes"
    assert oldest_branch(found, "13.3") == 580, "by minor-version compatibility"
    assert oldest_branch(found, "14.0") is None


def test_what_the_rules_name_is_known():
    branches = set(driver_data()["branches"])
    for listed in rules()["forward_compatibility"].values():
        assert set(listed) <= branches
    for entry in rules()["generations"]:
        for pci_id in entry.get("pci_ids", ()):
            known = gpu_by_pci_id(pci_id)
            assert known is None or known.name.startswith("NVIDIA")
