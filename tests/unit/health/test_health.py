"""Every gate is tripped once, and says what was found, what is needed and what to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from health_hosts import DRIVER, healthy, passed_probe

from metalserve.errors import Refusal
from metalserve.health import check_health, health_report
from metalserve.health.types import data, read_expected

REAL_HOSTS = Path(__file__).resolve().parents[1] / "fixtures" / "h200_x1_host_facts.json"


def rows(facts, expected=None, **more):
    return {row.name: row for row in check_health(facts, read_expected(expected), **more)}


def failed(facts, name, *texts, expected=None, state="fail", **more):
    """Exactly this check is not ok, and its row has the texts."""
    found = rows(facts, expected, **more)
    assert {key: row.state for key, row in found.items() if row.state != "ok"} == {name: state}
    row = found[name]
    for text in texts:
        assert text in f"{row.found} | {row.needed} | {row.change}"
    assert row.needed
    assert row.change


@pytest.mark.parametrize("shape", ["8xH800", "8xA100-SXM4-80GB", "4xL40S", "1xRTX-4090", "2xH200"])
def test_a_healthy_host_passes_every_check(shape):
    facts = healthy(shape)
    report = health_report(facts, {"driver_version": DRIVER, "gpu_count": len(facts["gpus"])})
    assert report["state"] == "ok", report["table"]
    assert report["refusals"] == []


def test_a_cpu_host_has_nothing_to_check():
    assert health_report({"gpus": []})["table"] == ["ok    gpu_count  no NVIDIA GPU: nothing to check"]


def test_a_host_without_the_gpus_it_should_have():
    failed(
        {"gpus": []}, "gpu_count", "no NVIDIA GPU on the PCI bus", "8 (gpu_health_expected", expected={"gpu_count": 8}
    )


# ---- software ----


def test_no_driver_loaded():
    facts = healthy()
    facts["driver"].update(loaded=None, state="not_loaded")
    row = rows(facts)["driver"]
    assert row.state == "fail"
    assert "no NVIDIA driver is loaded (state not_loaded" in row.found
    assert "reload it or reboot" in row.change


@pytest.mark.parametrize(
    ("level", "text"),
    [
        ("on_disk", "on disk 580.159.04"),
        ("userland", "userland 580.159.04"),
        ("fabric_manager", "fabric manager 580.159.04"),
    ],
)
def test_one_level_of_the_driver_differs(level, text):
    facts = healthy()
    facts["driver"][level] = "580.159.04"
    failed(facts, "driver", text, f"loaded {DRIVER}", "one version on all levels", "prepare.yml")


def test_another_driver_than_wanted():
    failed(healthy(), "driver", "wanted 595.91.07", expected={"driver_version": "595.91.07"})


def test_no_fabric_manager_beside_nvswitches():
    facts = healthy()
    facts["driver"]["fabric_manager"] = None
    failed(facts, "driver", "fabric manager none")


def test_a_driver_in_a_bad_state():
    facts = healthy()
    facts["driver"]["state"] = "mismatch"
    failed(facts, "driver", "state mismatch")


def test_a_module_that_the_next_boot_will_not_find():
    facts = healthy()
    facts["driver"]["on_disk"] = None
    failed(facts, "driver", "not on the disk", state="warn")


@pytest.mark.parametrize("state", ["inactive", "failed", "missing"])
def test_fabric_manager_does_not_run(state):
    facts = healthy()
    facts["services"]["nvidia-fabricmanager"] = state
    failed(facts, "fabric_manager", f"nvidia-fabricmanager is {state}, 4 NVSwitches", "802")


def test_without_nvswitches_nobody_asks_for_fabric_manager():
    facts = healthy("4xL40S")
    facts.update(nvswitch_count=0, services={"nvidia-fabricmanager": "missing"})
    facts["driver"]["fabric_manager"] = None
    assert health_report(facts)["state"] == "ok"


def test_a_fabric_in_progress():
    facts = healthy()
    facts["gpus"][3]["fabric_state"] = "in_progress"
    failed(facts, "fabric_state", "GPU 3 (0000:13:00.0) is in_progress", "completed on every GPU")


def test_no_container_toolkit():
    facts = healthy()
    facts["container_toolkit"] = {"version": None}
    failed(facts, "container_toolkit", "no NVIDIA container toolkit", "1.17.8 or newer")


def test_a_toolkit_below_the_security_floor():
    facts = healthy()
    facts["container_toolkit"] = {"version": "1.17.7"}
    failed(facts, "container_toolkit", "1.17.7", "CVE-2025-23266", "container_toolkit_version")


def test_no_cdi_specification():
    facts = healthy()
    facts["cdi"]["specs"] = [{"path": "/etc/cdi/other.yaml", "driver_version": None, "devices": ["vendor.com/net=0"]}]
    failed(facts, "cdi", "no CDI specification of the GPUs", "metalserve-cdi")


def test_two_cdi_specifications():
    facts = healthy()
    facts["cdi"]["specs"].append({**facts["cdi"]["specs"][0], "path": "/etc/cdi/nvidia.yaml"})
    failed(facts, "cdi", "/var/run/cdi/nvidia.yaml, /etc/cdi/nvidia.yaml", "container_toolkit_remove_other_specs")


def test_a_stale_cdi_specification():
    facts = healthy()
    facts["cdi"]["specs"][0]["driver_version"] = "570.86.15"
    failed(facts, "cdi", "is of driver 570.86.15", DRIVER, "metalserve-cdi")


def test_a_docker_that_does_not_resolve_cdi():
    facts = healthy()
    facts["docker"]["cdi"] = False
    failed(facts, "cdi", "Docker does not resolve CDI devices", "features.cdi", "restart Docker")


def test_dcgm_is_only_judged_where_it_ran():
    assert "dcgm" not in rows(healthy())
    assert rows(healthy(), diag={"status": 0, "output": "| Denylist | Pass |"})["dcgm"].state == "ok"


def test_dcgm_finds_a_fault():
    output = "| software                  | Fail                        |\n| Denylist | Pass |"
    failed(healthy(), "dcgm", "software | Fail", "diag -r 1 -v", diag={"status": 226, "output": output})


def test_dcgm_cannot_run():
    failed(healthy(), "dcgm", "exit status 1", diag={"status": 1, "output": "Error: unable to connect"})


# ---- GPUs ----


def test_a_gpu_that_fell_off_the_bus():
    facts = healthy()
    facts["gpus"][7].update(source="pci", index=None)
    found = rows(facts)["gpu_count"]
    assert found.state == "fail"
    assert "7 GPUs that the driver knows, 8 on the PCI bus" in found.found
    assert "the GPU at 0000:17:00.0" in found.found


def test_a_gpu_that_another_driver_holds():
    facts = healthy()
    facts["gpus"][7].update(source="pci", index=None, pci_driver="vfio-pci")
    failed(facts, "gpu_count", "is bound to vfio-pci")


def test_fewer_gpus_than_the_inventory_says():
    failed(healthy("4xL40S"), "gpu_count", "4 on the PCI bus", "8 (gpu_health_expected", expected={"gpu_count": 8})


def test_other_gpus_than_the_inventory_says():
    wanted = {"gpu_pci_ids": ["10DE:2330"] * 2}
    failed(healthy("2xH200"), "gpu_ids", "10de:2335, 10de:2335", "10de:2330, 10de:2330 in this order", expected=wanted)


def test_the_gpus_that_the_inventory_says():
    assert rows(healthy("2xH200"), {"gpu_pci_ids": ["10DE:2335"] * 2})["gpu_ids"].state == "ok"


def test_a_gpu_that_lost_memory():
    facts = healthy()
    facts["gpus"][2]["memory_total_bytes"] -= 2 << 30
    failed(facts, "gpu_memory", "GPU 2 (0000:12:00.0) has 79511 MiB", "81559", "within 1%")


def test_a_gpu_that_the_catalogue_does_not_know():
    facts = healthy("1xL40S")
    facts["gpus"][0]["pci_id"] = "10de:ffff"
    failed(facts, "gpu_memory", "10de:ffff", "gpus.yaml", state="warn")


def test_a_gpu_with_another_chip():
    facts = healthy("1xL40S")
    facts["gpus"][0]["compute_capability"] = "8.6"
    failed(facts, "compute_capability", "reports 8.6", "has 8.9")


def test_ecc_off():
    facts = healthy()
    facts["gpus"][1]["ecc_enabled"] = False
    failed(facts, "ecc", "off on GPU 1 (0000:11:00.0)", "--ecc-config=1")


def test_a_gpu_without_ecc_is_not_asked_for_it():
    facts = healthy("1xRTX-4090")
    facts["gpus"][0]["ecc_enabled"] = None
    assert "ecc" not in rows(facts)


@pytest.mark.parametrize(
    ("key", "text"), [("failure", "could not be remapped on GPU 4"), ("pending", "waits for a reset on GPU 4")]
)
def test_remapped_rows(key, text):
    facts = healthy()
    facts["gpus"][4]["remapped_rows"][key] = True
    failed(facts, "remapped_rows", text)


def test_too_many_errors_of_the_on_chip_memory():
    facts = healthy()
    facts["gpus"][0].update(sram_threshold_exceeded=True, sram_uncorrectable=7)
    failed(facts, "sram", "7 uncorrectable errors")


def test_a_gpu_that_asks_for_recovery():
    facts = healthy()
    facts["gpus"][5]["recovery_action"] = "reboot"
    failed(facts, "recovery_action", "GPU 5 (0000:15:00.0) asks for reboot")


@pytest.mark.parametrize(
    ("code", "state", "text"),
    [
        (79, "fail", "Xid 79 (GPU has fallen off the bus) 2 x on 0000:10:00.0"),
        (48, "fail", "open a case"),
        (13, "warn", "graphics engine exception"),
        (31337, "warn", "Xid 31337 (the driver's words)"),
    ],
)
def test_errors_since_boot(code, state, text):
    facts = healthy()
    facts["xid_errors"] = [{"code": code, "pci_address": "0000:10:00.0", "message": "the driver's words", "count": 2}]
    failed(facts, "gpu_errors", text, state=state)


def test_errors_that_only_inform_are_listed():
    facts = healthy()
    facts["xid_errors"] = [{"code": 63, "pci_address": "0000:10:00.0", "message": "", "count": 1}]
    assert "Xid 63" in rows(facts)["gpu_errors"].found
    assert health_report(facts)["state"] == "ok"


def test_a_fatal_error_of_an_nvswitch():
    facts = healthy()
    facts["sxid_errors"] = [
        {"code": 20034, "pci_address": "0000:c1:00.0", "message": "Fatal, Link 30 LTSSM", "count": 1}
    ]
    failed(facts, "gpu_errors", "SXid 20034 (Fatal, Link 30 LTSSM) on NVSwitch 0000:c1:00.0")


def test_a_kernel_log_that_cannot_be_read():
    facts = healthy()
    facts["probe_errors"] = [{"probe": "kernel_log", "error": "dmesg: Operation not permitted"}]
    failed(facts, "gpu_errors", "Operation not permitted", "become", state="warn")


def test_a_narrow_link():
    facts = healthy()
    facts["gpus"][6]["pcie_width"] = 8
    failed(facts, "pcie_width", "GPU 6 (0000:16:00.0) runs x8 of x16")


def test_a_slow_slot():
    facts = healthy()
    facts["gpus"][6]["pcie_max_generation"] = 4
    failed(facts, "pcie_generation", "generation 4, its equals 5", state="warn")


def test_too_few_nvlinks_for_the_product():
    facts = healthy()
    facts["gpus"][0]["nvlink_active"] = 7
    failed(facts, "nvlink", "GPU 0 (0000:10:00.0) has 7 of 8 links")


def test_eight_links_are_all_that_an_h800_has_and_too_few_for_an_h200():
    assert "8 links up on each of 8 GPUs" in rows(healthy())["nvlink"].found
    facts = healthy("2xH200")
    facts["gpus"][1]["nvlink_active"] = 8
    failed(facts, "nvlink", "8 of 18 links")


def test_links_that_a_guest_cannot_see():
    facts = healthy("2xH200")
    for gpu in facts["gpus"]:
        gpu["nvlink_active"] = None
    failed(facts, "nvlink", "cannot be read", state="warn")


def test_mig_on_where_it_should_be_off():
    facts = healthy("4xL40S")
    facts["gpus"][0]["mig_enabled"] = True
    failed(facts, "mig", "on on GPU 0", "off (gpu_health_expected.mig)", "--multi-instance-gpu=0")


def test_mig_off_where_it_should_be_on():
    failed(healthy("1xL40S"), "mig", "off on GPU 0", "--multi-instance-gpu=1", expected={"mig": True})


def test_an_exclusive_gpu():
    facts = healthy()
    facts["gpus"][0]["compute_mode"] = "exclusive_process"
    failed(facts, "compute_mode", "exclusive_process", "--compute-mode=0")


def test_persistence_off():
    facts = healthy()
    facts["gpus"][0]["persistence"] = False
    failed(facts, "persistence", "off on GPU 0", "nvidia-persistenced")


@pytest.mark.parametrize("reason", data("health.yaml")["throttle_fail"])
def test_a_gpu_that_hardware_slows_down(reason):
    facts = healthy()
    facts["gpus"][0]["throttle_reasons"] = ["gpu_idle", reason]
    failed(facts, "throttle", reason)


@pytest.mark.parametrize("reason", data("health.yaml")["throttle_warn"])
def test_a_gpu_at_its_power_limit(reason):
    facts = healthy()
    facts["gpus"][0]["throttle_reasons"] = [reason]
    failed(facts, "throttle", reason, state="warn")


def test_a_process_of_somebody_else():
    facts = healthy()
    facts["driver"]["holders"] = [
        {"pid": 900, "process": "nvidia-persiste", "deployment": None},
        {"pid": 901, "process": "VLLM::Worker", "deployment": "qwen"},
        {"pid": 902, "process": "python3", "deployment": None},
    ]
    failed(facts, "processes", "python3 (pid 902)", "only engines of this inventory")


def test_engines_of_ours_may_hold_gpus():
    facts = healthy()
    facts["driver"]["holders"] = [{"pid": 901, "process": "VLLM::Worker", "deployment": "qwen"}]
    assert rows(facts)["processes"].found == "GPUs are open in qwen"


def test_gpus_of_a_deployment_without_nvlink_between_them():
    facts = healthy()
    facts["links"][0][1] = "SYS"
    failed(facts, "topology", "GPU 0 and GPU 1 by SYS", expected={"gpu_groups": [[0, 1], [2, 3]]})


def test_gpus_of_a_deployment_on_two_nodes():
    failed(healthy("4xL40S"), "topology", "one NUMA node", expected={"gpu_groups": [[0, 1]]}, state="warn")


def test_one_gpu_has_no_topology():
    assert "topology" not in rows(healthy(), {"gpu_groups": [[0]]})


# ---- the report ----


def test_all_failures_are_told_at_once_the_worst_first():
    facts = healthy()
    facts["gpus"][0].update(ecc_enabled=False, persistence=False)
    facts["gpus"][1]["throttle_reasons"] = ["sw_power_cap"]
    report = health_report(facts)
    assert report["state"] == "fail"
    assert [line.split()[0] for line in report["table"]][:4] == ["fail", "fail", "warn", "ok"]
    assert [text.split(":")[0] for text in report["refusals"]] == ["ecc", "persistence"]
    assert all(" Needed: " in text and " Change: " in text for text in report["refusals"])


def test_a_warning_alone_lets_the_host_serve():
    facts = healthy()
    facts["driver"]["on_disk"] = None
    assert health_report(facts)["state"] == "warn"


def test_a_real_virtual_machine_with_one_h200():
    """Captured on one: no toolkit there, and the module is not on its disk."""
    facts = json.loads(REAL_HOSTS.read_text(encoding="utf-8"))
    states = {name: row.state for name, row in rows(facts).items() if row.state != "ok"}
    assert states == {"driver": "warn", "container_toolkit": "fail", "cdi": "fail"}


def test_probes_join_the_report():
    facts = healthy()
    found = rows(facts, probes=[passed_probe(facts)])
    assert found["cuda_probe"].found == "registry/vllm@sha256:1: CUDA works on 8 GPUs, also after a daemon-reload"


# ---- what the inventory may say ----


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"gpus": 8}, "the unknown field 'gpus'"),
        ({"gpu_count": "8"}, "gpu_count '8'"),
        ({"gpu_count": True}, "gpu_count True"),
        ({"gpu_pci_ids": "10de:2324"}, "gpu_pci_ids '10de:2324'"),
    ],
)
def test_expectations_that_cannot_be_read(values, text):
    with pytest.raises(Refusal, match=r"gpu_health_expected has .*Needed: .*Change: ") as refusal:
        read_expected(values)
    assert text in str(refusal.value)


def test_no_key_of_the_report_means_something_else_to_ansible():
    """A key `failed` that holds anything makes a failure of the task before its rows are shown."""
    assert not {"failed", "changed", "skipped", "unreachable", "msg"} & set(health_report(healthy()))
