"""What the probe's answers mean: cause and remedy of each error of CUDA."""

from __future__ import annotations

import copy

import pytest
from health_hosts import DRIVER, healthy, passed_probe

from metalserve.health.probe import check_probes
from metalserve.health.types import data

NAMES = {
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    3: "CUDA_ERROR_NOT_INITIALIZED",
    35: "CUDA_ERROR_INSUFFICIENT_DRIVER",
    100: "CUDA_ERROR_NO_DEVICE",
    101: "CUDA_ERROR_INVALID_DEVICE",
    802: "CUDA_ERROR_SYSTEM_NOT_READY",
    803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    804: "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
    999: "CUDA_ERROR_UNKNOWN",
}


def judged(probe, facts=None):
    (row,) = check_probes(facts or healthy(), [probe])
    return row


def with_error(code, step=0, library=f"/usr/lib/x86_64-linux-gnu/libcuda.so.{DRIVER}"):
    probe = passed_probe(healthy())
    error = {"call": "cuInit", "code": code, "name": NAMES.get(code)}
    probe["steps"][step]["answer"] = {"ok": False, "error": error, "library": library, "devices": [], "nodes": []}
    return probe


@pytest.mark.parametrize("code", data("cuda_errors.yaml")["codes"])
def test_each_known_error_has_its_cause_and_its_remedy(code):
    row = judged(with_error(code))
    entry = data("cuda_errors.yaml")["codes"][code]
    assert row.state == "fail"
    assert f"cuInit returned {code} ({NAMES[code]})" in row.found
    assert entry["cause"] in row.found
    assert row.change == entry["remedy"]


@pytest.mark.parametrize(
    ("code", "cause", "remedy"),
    [
        (802, "fabric manager", "exactly the driver's version"),
        (803, "does not fit the loaded kernel module", "reload the driver"),
        (804, "forward-compatibility", "nvidia_driver_version"),
        (999, "nvidia_uvm", "modprobe nvidia_uvm"),
    ],
)
def test_the_errors_that_hosts_are_known_for(code, cause, remedy):
    row = judged(with_error(code))
    assert cause in row.found
    assert remedy in row.change


def test_803_from_a_library_of_the_image_names_the_library():
    """Seen so on a machine with two H200s and driver 580.159.04, whose CUDA image brings an older library."""
    row = judged(with_error(803, library="/usr/local/cuda-13.0/compat/libcuda.so.580.95.05"))
    assert "the image's own /usr/local/cuda-13.0/compat/libcuda.so.580.95.05 was loaded" in row.found


@pytest.mark.parametrize("code", [100, 999])
def test_gpus_that_are_lost_at_a_daemon_reload(code):
    row = judged(with_error(code, step=1))
    assert "after systemctl daemon-reload in a running container" in row.found
    assert "lost its GPUs when systemd applied its device rules again" in row.found


def test_an_error_that_nobody_described():
    row = judged(with_error(719))
    assert "cuInit returned 719 (None): no known cause" in row.found
    assert "journalctl -k -b" in row.change


def test_no_cuda_library_in_the_container():
    probe = with_error(0)
    probe["steps"][0]["answer"]["error"] = {
        "call": "load",
        "code": None,
        "name": None,
        "text": "libcuda.so.1: cannot open",
    }
    row = judged(probe)
    assert "the CUDA library could not be used: libcuda.so.1: cannot open" in row.found
    assert "refresh the CDI specification" in row.change


def test_a_container_that_does_not_start():
    probe = passed_probe(healthy())
    probe["steps"] = [{"when": "start", "answer": None, "error": "unresolvable CDI devices nvidia.com/gpu=all"}]
    assert "unresolvable CDI devices nvidia.com/gpu=all" in judged(probe).found


def test_a_gpu_that_gives_back_other_bytes():
    probe = passed_probe(healthy())
    probe["steps"][0]["answer"]["devices"] = copy.deepcopy(probe["steps"][0]["answer"]["devices"])
    probe["steps"][0]["answer"]["devices"][3]["memory_works"] = False
    row = judged(probe)
    assert "what was read back differs from what was written on GPU 3" in row.found
    assert "dcgmi diag -r 3" in row.change


def test_a_container_that_sees_too_few_gpus():
    probe = passed_probe(healthy())
    probe["steps"][1]["answer"]["devices"] = probe["steps"][1]["answer"]["devices"][:-1]
    row = judged(probe)
    assert "7 GPUs, without GPU-00000000-0000-0000-0000-000000000007" in row.found
    assert "the 8 GPUs of the host" in row.needed


def test_a_container_that_sees_a_foreign_gpu():
    facts = healthy()
    probe = passed_probe(facts)
    facts["gpus"][0]["uuid"] = "GPU-11111111-0000-0000-0000-000000000000"
    row = judged(probe, facts)
    assert "without GPU-11111111-" in row.found
    assert "with GPU-00000000-0000-0000-0000-000000000000" in row.found


def test_a_probe_that_ended_between_its_steps():
    probe = passed_probe(healthy())
    del probe["steps"][1]
    row = judged(probe)
    assert row.state == "fail"
    assert "ended early" in row.found


def test_a_probe_is_not_run_beside_engines():
    row = judged({"image": "i", "steps": [], "postponed": ["qwen", "glm"]})
    assert row.state == "warn"
    assert "not run: qwen, glm hold the GPUs" in row.found


def test_a_probe_that_has_passed_before():
    row = judged({"image": "i", "steps": [], "proven": True})
    assert row.state == "ok"
    assert "has passed with this driver" in row.found
