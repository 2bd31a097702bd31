"""The verdict of one host: what is right, what the playbooks will put right, and every refusal with its remedy."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import pytest
from verdict_hosts import (
    DIGEST,
    GIB,
    IMAGE,
    INPUTS,
    LOCK,
    MODEL,
    QWEN,
    WANTED,
    a_driver,
    a_host,
    bare,
    judge,
    problems,
    row,
)

from metalserve import catalogue
from metalserve.deployments import Inputs
from metalserve.errors import Refusal
from metalserve.verdict.host import compatibility_verdict, host_verdict, refused_host
from metalserve.verdict.options import read_options
from metalserve.verdict.rows import split_refusals

FIXTURES = Path(__file__).parents[1] / "fixtures"
BF16 = [{**QWEN, "model": "qwen3.6-35b-a3b"}]


def bf16_inputs():
    files = [{"path": "a", "size_bytes": 70 * GIB, "sha256": "a" * 64}]
    models = {**LOCK["models"], "qwen3.6-35b-a3b": {"revision": "0123abcd", "files": files}}
    return Inputs({}, {}, {**LOCK, "models": models}, {}, "/var/lib/metalserve/models")


# ---- what is right ----


@pytest.mark.parametrize("shape", ["8xH800", "8xH100", "8xH200", "4xL40S"])
def test_a_host_on_which_everything_is_right(shape):
    verdict = judge(a_host(shape, nvswitch_count=0))
    assert problems(verdict) == []
    assert (verdict.verdict, verdict.action) == ("ok", None)
    assert [release["deployment"] for release in verdict.releases] == ["qwen"]


@pytest.mark.parametrize("shape", ["8xA100-SXM4-80GB", "2xA100-PCIE-80GB"])
def test_an_ampere_host_serves_the_16_bit_model(shape):
    verdict = host_verdict(a_host(shape), BF16, bf16_inputs(), read_options({}), dt.date(2026, 11, 30))
    assert (verdict.verdict, problems(verdict)) == ("ok", [])


def test_a_host_without_gpus_is_asked_about_docker_disk_and_plan_only():
    verdict = judge(a_host("cpu-24GiB", driver=a_driver(None)))
    assert {check.name for check in verdict.checks} == {"docker", "plan"}
    assert row(verdict, "plan").verdict == "refused"
    assert row(verdict, "plan").change == "set `model` to a bfloat16 checkpoint"


def test_the_answer_is_plain_and_every_row_has_its_parts():
    answer = judge(bare()).as_dict()
    assert json.loads(json.dumps(answer)) == answer
    for check in answer["checks"]:
        assert set(check) == {"name", "group", "verdict", "found", "needed", "change", "action"}
        assert check["found"]
        assert bool(check["needed"] and check["change"]) == (check["verdict"] != "ok")
        assert bool(check["action"]) == (check["verdict"] == "ok_after")


def test_the_facts_of_a_real_pair_of_h200():
    """Read on a virtual machine with two H200 and a driver only: no Docker, no toolkit, no module on its disk."""
    facts = json.loads((FIXTURES / "h200_x2_host_facts.json").read_text(encoding="utf-8"))
    facts["disks"] = a_host()["disks"]
    verdict = judge(facts, driver={"manage": False})
    assert verdict.verdict == "ok_after"
    assert verdict.action == "Docker install; container toolkit install; CDI specification"
    assert problems(verdict) == [
        ("docker", "ok_after"),
        ("driver", "warn"),
        ("container_toolkit", "ok_after"),
        ("cdi", "ok_after"),
    ]
    assert row(verdict, "nvlink").found == "18 links up on each of 2 GPUs"
    assert row(verdict, "image_cuda").found.startswith("driver 580.159.04 has CUDA 13.0")


# ---- what the playbooks will put right ----


def test_a_bare_host():
    verdict = judge(bare(docker={"version": None, "running": False}))
    assert verdict.verdict == "ok_after"
    assert verdict.action == (
        "Docker install; driver install and load; container toolkit install; CDI specification"
    )  # fmt: skip
    assert row(verdict, "driver").found.startswith("no driver is loaded; the module on disk for kernel")
    assert row(verdict, "driver").change == "nothing: playbooks/prepare.yml does it"
    assert row(verdict, "image_cuda").found == f"driver {WANTED} has CUDA 13.0 of {IMAGE}", "judged as it will be"
    assert verdict.releases[0]["plan"]["gpus_used"] == list(range(8)), "planned from the PCI ids"


@pytest.mark.parametrize(
    ("facts", "action"),
    [
        (bare(nouveau_bound=True), "driver install and reboot"),
        (bare(driver=a_driver(None, on_disk=WANTED, flavour_on_disk="open", userland=WANTED, fabric_manager=WANTED,
                              state="not_loaded")), "driver load"),
        (bare(driver=a_driver(None, on_disk="570.195.03", state="not_loaded")), "driver upgrade and load"),
        (a_host(version="535.261.03"), "driver upgrade and reload"),
        (a_host(version="595.91.07"), "driver downgrade and reload"),
        (a_host(driver=a_driver(WANTED, loaded="580.159.04")), "driver reload"),
        (a_host(driver=a_driver(WANTED, state="mismatch", userland="580.159.04")), "driver repair"),
        (a_host(driver=a_driver(WANTED, fabric_manager="580.159.04")), "driver repair"),
    ],
    ids=["nouveau", "not loaded", "old on disk", "old", "newer", "waits for a reload", "mismatch", "fabric manager"],
)  # fmt: skip
def test_a_driver_that_is_not_the_wanted_one(facts, action):
    verdict = judge(facts)
    assert verdict.verdict == "ok_after"
    assert row(verdict, "driver").action == action
    assert row(verdict, "image_cuda").verdict == "ok"


def test_a_reboot_that_nobody_allowed_names_the_variable():
    verdict = judge(bare(nouveau_bound=True))
    assert row(verdict, "driver").change == (
        "before playbooks/prepare.yml: nvidia_driver_reboot_allowed: true (do it) or false (leave it to you and report "
        "it)"
    )
    assert row(judge(bare(nouveau_bound=True), driver={"reboot_allowed": True}), "driver").change.startswith("nothing")


def test_a_driver_that_may_not_be_changed_is_judged_as_it_is():
    verdict = judge(a_host(version="535.261.03"), driver={"reload_allowed": False})
    assert verdict.verdict == "refused"
    assert row(verdict, "driver_change").verdict == "warn"
    assert "nvidia_driver_reload_allowed" in row(verdict, "driver_change").change
    assert row(verdict, "image_cuda").found.startswith("driver 535.261.03 under")
    assert row(verdict, "driver_branch").verdict == "refused"


def test_headers_that_are_not_there_yet():
    verdict = judge(bare(kernel_headers=False))
    found = row(verdict, "kernel_headers")
    assert found.verdict == "warn"
    assert "headers of exactly that kernel" in found.needed
    assert "refuses this host before any change" in found.change
    assert all(
        check.name != "kernel_headers" for check in judge(bare(kernel_headers=False), driver={"prebuilt": True}).checks
    )
    assert all(check.name != "kernel_headers" for check in judge(a_host(kernel_headers=False)).checks)


@pytest.mark.parametrize(
    ("changes", "name", "action"),
    [
        ({"container_toolkit": {"version": "1.17.7"}}, "container_toolkit", "container toolkit upgrade"),
        ({"container_toolkit": {"version": None}}, "container_toolkit", "container toolkit install"),
        ({"cdi": {"specs": []}}, "cdi", "CDI specification"),
        ({"services": {"nvidia-fabricmanager": "failed"}}, "fabric_manager", "start of the fabric manager"),
        ({"docker": {"version": "28.5.1", "running": False}}, "docker", "Docker start"),
    ],
)
def test_software_that_the_playbooks_bring(changes, name, action):
    verdict = judge(a_host(**changes))
    assert (row(verdict, name).verdict, row(verdict, name).action) == ("ok_after", action)
    assert verdict.verdict == "ok_after"


def test_a_reboot_also_heals_a_gpu_that_fell_off_the_bus():
    facts = a_host(
        xid_errors=[{"code": 79, "pci_address": "0000:13:00.0", "message": "GPU has fallen off the bus.", "count": 1}]
    )
    facts["gpus"][3].update(source="pci", index=None)
    verdict = judge(facts, driver={"reboot_allowed": True})
    assert row(verdict, "driver").action == "driver reboot"
    for name in ("gpu_count", "gpu_errors"):
        assert (row(verdict, name).verdict, row(verdict, name).action) == ("ok_after", "driver reboot"), name


# ---- refusals of the driver ----


def refusal(facts, name, **options):
    verdict = judge(facts, **options)
    assert verdict.verdict == "refused"
    assert verdict.action is None
    return row(verdict, name, "refused")


def test_secure_boot_without_an_enrolled_key():
    found = refusal(bare(secure_boot=True), "driver")
    assert found.found == "Secure Boot is on, and the key that signs modules built on this host is not enrolled"
    assert found.needed == "a key that the firmware knows, or the kernel refuses the module"
    assert "nvidia_driver_signing_key" in found.change
    assert judge(bare(secure_boot=True, mok_enrolled=True)).verdict == "ok_after"
    assert judge(bare(secure_boot=True), driver={"key_enrolled": True}).verdict == "ok_after"


def test_gpus_that_belong_to_something_else():
    facts = bare()
    for gpu in facts["gpus"]:
        gpu["pci_driver"] = "vfio-pci"
    assert refusal(facts, "driver").found.startswith("GPUs bound to another driver: 0000:10:00.0 to vfio-pci")


def test_every_refusal_of_the_driver_is_a_row_of_its_own():
    facts = bare(secure_boot=True)
    facts["gpus"][0]["pci_driver"] = "vfio-pci"
    rows = [check for check in judge(facts).checks if check.name == "driver"]
    assert [check.verdict for check in rows] == ["refused", "refused"]
    assert rows[0].found != rows[1].found


def test_what_the_driver_s_role_says_against_a_host_is_said_once():
    text = "there are no headers of the running kernel simulated. Needed: them. Change: install them."
    found = refusal(bare(kernel_headers=False), "driver", driver={"refusal": text})
    assert (found.found, found.change) == ("there are no headers of the running kernel simulated", "install them")
    first = refusal(bare(secure_boot=True), "driver")
    both = f"{first.found}. Needed: x. Change: y. {text[0].upper()}{text[1:]}"
    rows = [check for check in judge(bare(secure_boot=True), driver={"refusal": both}).checks if check.name == "driver"]
    assert [check.found for check in rows] == [first.found, "There are no headers of the running kernel simulated"]


def test_a_wanted_version_that_is_incomplete():
    found = refusal(a_host(), "driver", driver={"version": "580"})
    assert (found.found, found.change) == ("driver version '580'", "nvidia_driver_version")


def test_a_wanted_branch_without_fixes():
    found = refusal(bare(), "driver", driver={"version": "570.195.03"})
    assert found.found == "driver branch 570 (nvidia_driver_version 570.195.03) gets no more fixes"
    assert "nvidia_driver_end_of_life_allowed: true" in found.change


def test_a_present_branch_without_fixes():
    found = refusal(a_host(version="535.261.03"), "driver_branch", driver={"manage": False})
    assert found.found == "driver branch 535 ended in 2026-06"
    assert found.needed.startswith("a branch that gets security fixes: 580, 595")
    allowed = judge(a_host(version="535.261.03"), driver={"manage": False, "end_of_life_allowed": True})
    assert row(allowed, "driver_branch").verdict == "warn"


def test_a_branch_that_ends_soon_or_after_it_was_written_down():
    def life(day):
        verdict = host_verdict(
            a_host(version="595.91.07"), [QWEN], INPUTS, read_options({"driver": {"manage": False}}), day
        )
        return row(verdict, "driver_branch")

    assert life(dt.date(2026, 8, 1)).verdict == "ok"
    assert life(dt.date(2026, 11, 30)).found == "driver branch 595 ends in 2027-03"
    assert life(dt.date(2026, 11, 30)).verdict == life(dt.date(2027, 3, 31)).verdict == "warn"
    assert life(dt.date(2027, 4, 1)).verdict == "refused"


def test_a_branch_that_nobody_knows():
    verdict = judge(a_host(version="700.10"), driver={"manage": False})
    assert row(verdict, "driver_branch").found == "driver branch 700, whose life is not known here"


@pytest.mark.parametrize("state", ["none", "nouveau", "not_loaded", "mismatch"])
def test_a_driver_that_does_not_work_and_is_not_ours(state):
    driver = a_driver("580.95.05", state=state, on_disk=None, userland="575.57.08")
    found = refusal(a_host(driver=driver), "driver", driver={"manage": False})
    assert found.found == (
        f"GPUs on the PCI bus and a driver in state '{state}' (loaded 580.95.05, userland 575.57.08)"
    )
    assert found.needed == "a loaded NVIDIA driver that fits its userland"
    assert "nvidia_driver_manage: true" in found.change


def test_drift_of_a_driver_that_is_not_ours():
    driver = a_driver("580.159.04", on_disk=WANTED)
    found = refusal(a_host(driver=driver), "driver", driver={"manage": False})
    assert found.needed == "one version on all levels, to the last digit"


@pytest.mark.parametrize("manage", [True, False])
def test_a_kernel_that_the_next_boot_takes_without_a_driver(manage):
    driver = a_driver(on_disk_newest_kernel={"kernel": "6.12.60", "version": None})
    found = row(judge(a_host(driver=driver), driver={"manage": manage}), "next_boot")
    assert found.verdict == "warn"
    assert found.found == "the next boot takes kernel 6.12.60, whose driver module is missing"
    assert "install the headers of 6.12.60" in found.change


def test_a_driver_that_is_too_old_for_the_image_and_stays():
    found = refusal(a_host(version="570.195.03"), "image_cuda", driver={"manage": False, "end_of_life_allowed": True})
    assert found.found == f"driver 570.195.03 under {IMAGE}, which carries CUDA 13.0"


# ---- refusals of GPUs, links and health ----


def change_gpu(number=3, shape="8xH800", **values):
    facts = a_host(shape)
    facts["gpus"][number].update(values)
    return facts


GPU_REFUSALS = [
    ("gpu_count", change_gpu(source="pci", index=None), {}, "not known to the driver"),
    ("gpu_count", a_host(), {"gpu_count": 4}, "8 GPUs that the driver knows"),
    ("gpu_ids", a_host(), {"gpu_pci_ids": ["10de:2330"] * 8}, "PCI ids 10de:2324"),
    ("gpu_memory", change_gpu(memory_total_bytes=40 * GIB), {}, "40960 MiB"),
    ("compute_capability", change_gpu(compute_capability="8.0"), {}, "reports 8.0"),
    ("ecc", change_gpu(ecc_enabled=False), {}, "off on GPU 3"),
    (
        "remapped_rows",
        change_gpu(remapped_rows={"correctable": 0, "uncorrectable": 1, "pending": True, "failure": False}),
        {},
        "waits for a reset",
    ),
    (
        "remapped_rows",
        change_gpu(remapped_rows={"correctable": 0, "uncorrectable": 9, "pending": False, "failure": True}),
        {},
        "could not be remapped",
    ),
    ("sram", change_gpu(sram_threshold_exceeded=True, sram_uncorrectable=11), {}, "11 uncorrectable errors"),
    ("recovery_action", change_gpu(recovery_action="reset"), {}, "asks for reset"),
    ("pcie_width", change_gpu(pcie_width=8), {}, "runs x8 of x16"),
    ("nvlink", change_gpu(nvlink_active=7), {}, "has 7 of 8 links"),
    ("mig", change_gpu(mig_enabled=True), {}, "on on GPU 3"),
    ("compute_mode", change_gpu(compute_mode="exclusive_process"), {}, "exclusive_process"),
    ("persistence", change_gpu(persistence=False), {}, "off on GPU 3"),
    ("throttle", change_gpu(throttle_reasons=["hw_thermal_slowdown"]), {}, "hw_thermal_slowdown"),
    ("fabric_state", change_gpu(fabric_state="in_progress"), {}, "in_progress"),
    (
        "gpu_errors",
        a_host(xid_errors=[{"code": 48, "pci_address": "0000:13:00.0", "message": "DBE", "count": 2}]),
        {},
        "Xid 48",
    ),
    (
        "gpu_errors",
        a_host(sxid_errors=[{"code": 20034, "pci_address": "0000:c0:00.0", "message": "Fatal, Link 3", "count": 1}]),
        {},
        "SXid 20034",
    ),
    ("processes", a_host(driver=a_driver(holders=[{"pid": 7, "process": "train", "deployment": None}])), {}, "train"),
]


@pytest.mark.parametrize(("name", "facts", "expected", "words"), GPU_REFUSALS)
def test_a_fault_of_a_gpu(name, facts, expected, words):
    found = refusal(facts, name, expected=expected)
    assert words in found.found
    assert found.needed
    assert found.change
    accepted = judge(facts, expected=expected, accept=[name])
    assert row(accepted, name).verdict == "warn"
    assert row(accepted, name).change.endswith("(accepted: preflight_accept)")


def test_gpus_of_the_wrong_number_or_kind_before_the_driver():
    facts = bare()
    found = refusal(facts, "gpu_count", expected={"gpu_count": 4})
    assert (found.found, found.needed) == ("8 GPUs on the PCI bus", "4 (gpu_health_expected.gpu_count)")
    found = refusal(facts, "gpu_ids", expected={"gpu_count": 8, "gpu_pci_ids": ["10de:2330"] * 8})
    assert found.found.startswith("PCI ids 10de:2324")
    assert judge(facts, expected={"gpu_count": 8, "gpu_pci_ids": ["10de:2324"] * 8}).verdict == "ok_after"


def test_a_host_that_should_have_gpus():
    found = refusal(a_host("cpu-24GiB"), "gpu_count", expected={"gpu_count": 8})
    assert (found.found, found.needed) == ("no NVIDIA GPU on the PCI bus", "8 (gpu_health_expected)")


def test_expectations_that_cannot_be_read():
    found = refusal(a_host(), "expected", expected={"count": 8})
    assert "the unknown field 'count'" in found.found


def test_links_within_a_deployment():
    facts = a_host()
    facts["links"][0][1] = facts["links"][1][0] = "NODE"
    verdict = judge(facts, [{**QWEN, "tensor_parallel_size": 4}])
    assert row(verdict, "topology").verdict == "refused"
    assert "GPU 0 and GPU 1 by NODE" in row(verdict, "topology").found


def test_an_idle_gpu_on_a_slow_link_is_all_right():
    assert judge(change_gpu(pcie_generation=1)).verdict == "ok"


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"acs_redirect": ["0000:02:01.0"]}, "acs", "0000:02:01.0"),
        ({"iommu": "on"}, "iommu", "translates every access"),
    ],
)
def test_what_slows_traffic_over_pcie(changes, name, words):
    verdict = judge(a_host("4xL40S", **changes))
    assert row(verdict, name).verdict == "warn"
    assert words in row(verdict, name).found
    assert verdict.verdict == "ok", "it is slower, not wrong"
    guest = judge(a_host("4xL40S", virtualization="kvm", **changes))
    assert problems(guest) == [], "a guest must not change it"
    nvlink = judge(a_host("8xH800", **changes))
    assert problems(nvlink) == [], "NVLink does not go that way"


# ---- refusals of toolkit, Docker, disk and plan ----


def test_a_toolkit_below_the_security_floor():
    found = refusal(a_host(container_toolkit={"version": "1.17.7"}), "container_toolkit", toolkit={"manage": False})
    assert found.needed.startswith("1.17.8 or newer")
    assert "CVE-2025-23266" in found.needed
    found = refusal(a_host(container_toolkit={"version": None}), "container_toolkit", toolkit={"manage": False})
    assert found.found == "no NVIDIA container toolkit"


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([], "no CDI specification"),
        ([{"path": "/a", "driver_version": "535.1", "devices": ["nvidia.com/gpu=0"]}], "/a is of driver 535.1"),
        ([{"path": p, "driver_version": WANTED, "devices": ["nvidia.com/gpu=0"]} for p in ("/a", "/b")], "2 CDI"),
    ],
)
def test_cdi_specifications(specs, words):
    assert words in refusal(a_host(cdi={"specs": specs}), "cdi", toolkit={"manage": False}).found


def test_a_systemd_that_is_too_old():
    found = refusal(a_host(systemd=249), "systemd")
    assert (found.found, found.needed) == ("systemd 249", "252 or newer, which verifies template units")
    assert row(judge(a_host(systemd=257)), "systemd").verdict == "ok"


def test_a_docker_that_is_too_old():
    found = refusal(a_host(docker={"version": "20.10.24+dfsg1", "running": True, "images": []}), "docker")
    assert found.found == "Docker 20.10.24+dfsg1 is installed"
    assert found.needed == "26.0 or newer, which resolves CDI devices"


def test_a_docker_that_the_package_sources_do_not_have():
    text = "No package docker.io is offered. Needed: 26.0 or newer. Change: use Debian 13."
    found = refusal(a_host(docker={"version": None}), "docker", docker={"refusal": text})
    assert (found.found, found.needed, found.change) == (
        "No package docker.io is offered", "26.0 or newer", "use Debian 13",
    )  # fmt: skip


def disks(free_bytes):
    return [{**disk, "free_bytes": free_bytes} for disk in a_host()["disks"]]


def test_a_disk_that_is_too_small_for_images_and_weights_together():
    found = refusal(a_host(disks=disks(50 * GIB)), "disk")
    assert found.found == "The disk of /var/lib/docker and /var/lib/metalserve/models has 50.0 GiB free"
    assert found.needed == (
        f"72.0 GiB: 35.0 GiB to pull and unpack {IMAGE}, 36.0 GiB for the weights of {MODEL}, 1.0 GiB in reserve"
    )
    assert found.change.startswith("free 22.0 GiB there")


def test_what_is_there_already_needs_no_room():
    models = [{"key": MODEL, "revision": "0123abcd", "published": False, "size_bytes": 30 * GIB}]
    # Under another name, as a mirror gives it: the digest is the image.
    docker = {**a_host()["docker"], "images": [f"mirror:5000/vllm/vllm-openai@{DIGEST}"]}
    assert judge(a_host(disks=disks(7 * GIB), models=models, docker=docker)).verdict == "ok"
    assert refusal(a_host(disks=disks(6 * GIB), models=models, docker=docker), "disk").needed.startswith("7.0 GiB")
    models[0].update(published=True, size_bytes=36 * GIB)
    full = judge(a_host(disks=disks(0), models=models, docker=docker))
    assert problems(full) == []


def test_disks_of_their_own_are_judged_apart():
    split = disks(40 * GIB)
    split[1]["mount"] = "/var/lib/docker"
    assert judge(a_host(disks=split)).verdict == "ok"


def test_a_disk_that_was_not_read():
    found = [check for check in judge(a_host(disks=[])).checks if check.name == "disk"]
    assert [check.verdict for check in found] == ["warn", "warn"]
    assert "gpu_facts_disk_paths" in found[0].change


def test_memory_that_does_not_hold_the_weights():
    facts = a_host()
    facts["memory"]["total_bytes"] = 32 * GIB
    found = row(judge(facts), "memory")
    assert found.verdict == "warn"
    assert found.found == "32.0 GiB of memory on the host"


@pytest.mark.parametrize(
    ("facts", "deployment", "words"),
    [
        (a_host(), {"model": "nothing"}, "model 'nothing' is not in the catalogue"),
        (a_host(), {"engine_version": "0.16.0"}, "vllm 0.16.0"),
        (a_host(), {"gpus": [8]}, "GPU 8 of the deployment qwen"),
        (a_host("1xL4"), {}, "NVIDIA L4"),
        (a_host("8xA100"), {"kv_cache_dtype": "fp8", "model": MODEL, "gpus": 0}, "gpus 0"),
        (a_host(listening=[{"address": "::", "port": 8000, "pid": 1, "process": "nginx", "deployment": None}]), {},
         "port 8000"),
    ],
)  # fmt: skip
def test_a_deployment_that_does_not_fit(facts, deployment, words):
    found = refusal(facts, "plan", **{}) if not deployment else None
    if found is None:
        verdict = judge(facts, [{**QWEN, **deployment}])
        assert verdict.verdict == "refused"
        found = row(verdict, "plan")
    assert words in found.found
    accepted = judge(facts, [{**QWEN, **deployment}], accept=["plan"])
    assert row(accepted, "plan").verdict == "refused", "without a plan there is nothing to serve"


def test_quantisation_that_the_gpu_does_not_have():
    facts = catalogue.host_from_shape("1xL40S")
    facts["gpus"][0]["compute_capability"] = "7.0"
    found = row(judge(a_host("1xL40S", gpus=facts["gpus"])), "plan")
    assert (found.verdict, found.needed) == ("refused", "7.5 for fp8 weights under vllm")


def test_a_host_that_gives_no_facts():
    found = refusal({}, "facts")
    assert found.found == "the host gave no facts"
    told = refused_host("Python 2.7 is too old").checks[0]
    assert told.found == "Python 2.7 is too old"
    assert judge(None, accept=["facts"]).verdict == "refused"


# ---- options and texts ----


def test_an_option_that_nobody_knows():
    with pytest.raises(Refusal, match=r"the option driver\.verison of a verdict"):
        read_options({"driver": {"verison": WANTED}})
    with pytest.raises(Refusal, match="the option acept of a verdict"):
        read_options({"acept": []})


def test_an_accepted_check_that_does_not_exist():
    with pytest.raises(Refusal, match="'pcie_with'") as caught:
        read_options({"accept": ["pcie_with"]})
    assert "pcie_width" in caught.value.needed
    assert caught.value.change == "preflight_accept"
    with pytest.raises(Refusal, match="a text"):
        read_options({"accept": "pcie_width"})


def test_refusals_in_a_text():
    one = "A. Needed: B 1.2 or so. Change: c, x: true."
    assert [str(refusal) for refusal in split_refusals(one)] == [one]
    both = f"{one} 3 things. Needed: D. Change: E."
    assert [refusal.found for refusal in split_refusals(both)] == ["A", "3 things"]
    assert split_refusals("boom")[0].found == "boom"


def test_the_filter_without_anything_beside_the_facts():
    answer = compatibility_verdict(a_host(), today=dt.date(2026, 11, 30))
    assert [check["found"] for check in answer["checks"] if check["name"] == "plan"] == [
        "a host in serving_hosts without deployments"
    ]
