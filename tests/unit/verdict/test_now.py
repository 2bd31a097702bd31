"""What must be right at the moment a release goes onto a host, as stage and rollout ask it."""

from __future__ import annotations

import pytest
from verdict_hosts import IMAGE, INPUTS, QWEN, a_driver, a_host, bare

from metalserve import catalogue
from metalserve.deployments import serving_releases
from metalserve.engines.info import engine_info
from metalserve.errors import Refusal
from metalserve.verdict.now import require_image, require_software


def refusal_of(function, *arguments):
    with pytest.raises(Refusal) as caught:
        function(*arguments)
    return caught.value


def test_a_host_on_which_everything_is_right():
    require_software(a_host())
    require_image(a_host(), engine_info("vllm"), None, {})


def test_a_simulated_host_has_what_it_needs():
    require_software(catalogue.host_from_shape("8xH800"))
    require_image(catalogue.host_from_shape("8xH800"), engine_info("vllm"), None, {})


@pytest.mark.parametrize("state", ["none", "nouveau", "not_loaded", "mismatch"])
def test_a_driver_that_does_not_work(state):
    facts = {"driver": {"state": state, "loaded": "580.95.05", "userland": "575.57.08"}}
    refusal = refusal_of(require_software, facts)
    assert refusal.found == (
        f"GPUs on the PCI bus and a driver in state '{state}' (loaded 580.95.05, userland 575.57.08)"
    )
    assert refusal.needed == "a loaded NVIDIA driver that fits its userland"
    assert refusal.change.startswith("playbooks/prepare.yml with nvidia_driver_manage: true")
    assert refusal_of(require_software, {"driver": {"state": "none"}}).found.endswith("'none' (no version found)")


@pytest.mark.parametrize("toolkit", [None, {"version": None}])
def test_no_container_toolkit(toolkit):
    refusal = refusal_of(require_software, a_host(container_toolkit=toolkit))
    assert refusal.found == "no NVIDIA container toolkit"
    assert refusal.needed == "1.17.8 or newer"


def test_a_container_toolkit_below_the_floor():
    refusal = refusal_of(require_software, a_host(container_toolkit={"version": "1.17.7"}))
    assert refusal.found == "NVIDIA container toolkit 1.17.7"
    assert "CVE-2025-23266" in refusal.needed


def test_a_newer_driver_on_disk_may_wait():
    require_software(a_host(driver=a_driver("580.159.04", on_disk="580.178.04")))


def test_a_driver_that_is_older_than_the_image():
    refusal = refusal_of(require_image, a_host(version="575.57.08"), engine_info("vllm"), None, {})
    assert refusal.found == f"driver 575.57.08 under {IMAGE}, which carries CUDA 13.0"
    assert refusal.needed == "driver branch 580 or newer"


def test_the_lock_knows_the_cuda_of_the_image():
    require_image(a_host(version="575.57.08"), engine_info("vllm"), {"cuda": "12.9.1"}, {})


def test_both_are_asked_before_anything_is_planned():
    assert "state 'none'" in refusal_of(serving_releases, [QWEN], bare(), INPUTS).found
    assert refusal_of(serving_releases, [QWEN], a_host(version="570.1.0"), INPUTS).found.startswith("driver 570.1.0")
    assert serving_releases([QWEN], bare(), INPUTS, check_host=False)[0]["plan"]["gpus_used"] == list(range(8))
