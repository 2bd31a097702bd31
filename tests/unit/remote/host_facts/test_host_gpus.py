import json
import time

import pytest
from host_machines import (
    CLOSED,
    DATA,
    MIB,
    bare_machine,
    captured_h200,
    simulated,
    simulated_address,
)

GPU_KEYS = {
    "index", "uuid", "pci_address", "pci_id", "name", "memory_total_bytes", "memory_reserved_bytes",
    "memory_usable_bytes", "memory_used_bytes", "compute_capability", "mig_enabled", "ecc_enabled", "remapped_rows",
    "nvlink_active", "numa_node", "pcie_width", "pcie_max_width", "source", "fabric_state", "recovery_action",
    "pci_driver", "pcie_generation", "pcie_max_generation", "persistence", "compute_mode", "throttle_reasons",
    "sram_uncorrectable", "sram_threshold_exceeded",
}  # fmt: skip


def test_real_h200_pair(tmp_path):
    facts = captured_h200(tmp_path, 2).facts()
    assert facts["probe_errors"] == []
    assert facts["gpus"][1] == {
        "index": 1,
        "uuid": "GPU-00000000-0000-0000-0000-000000000001",
        "pci_address": "0000:00:07.0",
        "pci_id": "10de:2335",
        "name": "NVIDIA H200",
        "memory_total_bytes": 143771 * MIB,
        "memory_reserved_bytes": 644939776,
        "memory_usable_bytes": 150109880320,
        "memory_used_bytes": 0,
        "compute_capability": "9.0",
        "mig_enabled": False,
        "ecc_enabled": True,
        "remapped_rows": {"correctable": 0, "uncorrectable": 0, "pending": False, "failure": False},
        "nvlink_active": 18,
        "numa_node": 0,
        "pcie_width": 16,
        "pcie_max_width": 16,
        "pcie_generation": 5,
        "pcie_max_generation": 5,
        "persistence": True,
        "compute_mode": "default",
        "throttle_reasons": ["gpu_idle"],
        "sram_uncorrectable": None,
        "sram_threshold_exceeded": None,
        "fabric_state": None,
        "recovery_action": None,
        "pci_driver": "nvidia",
        "source": "nvml",
    }
    assert facts["links"] == [["X", "NV18"], ["NV18", "X"]]
    assert facts["driver"]["state"] == "ok"
    assert facts["driver"]["flavour"] == "open"
    assert facts["driver"]["loaded"] == facts["driver"]["userland"] == "580.159.04"
    assert facts["driver"]["cuda"] == "13.0"
    assert facts["nvswitch_count"] == 0, "a guest sees GPUs behind a switch, but not the switch"


def test_usable_memory_is_what_cuda_reported_on_the_real_machine(tmp_path):
    reported = json.loads((DATA / "h200_x2" / "nvml.json").read_text())["torch_mem_get_info"]
    gpus = captured_h200(tmp_path, 2).facts()["gpus"]
    assert [gpu["memory_usable_bytes"] for gpu in gpus] == [total for _free, total in reported]


def test_real_single_h200_has_no_links_and_that_is_no_error(tmp_path):
    facts = captured_h200(tmp_path, 1).facts()
    assert facts["gpus"][0]["nvlink_active"] is None
    assert facts["links"] == [["X"]]
    assert facts["probe_errors"] == []


@pytest.mark.parametrize(
    ("kind", "links", "switches", "within", "across"),
    [
        ("a100_sxm_x8", 12, 6, "NV12", "NV12"),
        ("a100_pcie_x4", None, 0, "NODE", "SYS"),
        ("h100_sxm_x8", 18, 4, "NV18", "NV18"),
        ("h800_sxm_x8", 8, 4, "NV8", "NV8"),
        ("l40s_x4", None, 0, "NODE", "SYS"),
        ("rtx4090_x2", None, 0, "SYS", "SYS"),
    ],
)
def test_simulated_machines(tmp_path, kind, links, switches, within, across):
    facts = simulated(tmp_path, kind).facts()
    count = len(facts["gpus"])
    assert facts["probe_errors"] == []
    assert facts["nvswitch_count"] == switches
    assert [gpu["index"] for gpu in facts["gpus"]] == list(range(count))
    assert {gpu["nvlink_active"] for gpu in facts["gpus"]} == {links}
    assert [gpu["numa_node"] for gpu in facts["gpus"]] == [0] * (count // 2) + [1] * (count // 2)
    assert facts["links"][0][1] == within
    assert facts["links"][count - 1][0] == facts["links"][0][count - 1] == across
    assert {frozenset(gpu) for gpu in facts["gpus"]} == {frozenset(GPU_KEYS)}


def test_simulated_geforce_has_neither_mig_nor_ecc_nor_remapped_rows(tmp_path):
    gpu = simulated(tmp_path, "rtx4090_x2").facts()["gpus"][0]
    assert (gpu["mig_enabled"], gpu["ecc_enabled"], gpu["remapped_rows"]) == (None, None, None)
    assert gpu["memory_usable_bytes"] == (24564 - 400) * MIB


def test_fabric_state_and_recovery_action(tmp_path):
    machine = simulated(tmp_path, "h800_sxm_x8")
    machine.library.capture["devices"][1].update(fabric_state=2, recovery_action=1)
    gpus = machine.facts()["gpus"]
    assert (gpus[0]["fabric_state"], gpus[0]["recovery_action"]) == ("completed", "none")
    assert (gpus[1]["fabric_state"], gpus[1]["recovery_action"]) == ("in_progress", "reset")
    assert simulated(tmp_path / "a100", "a100_sxm_x8").facts()["gpus"][0]["fabric_state"] is None


def test_inactive_links_are_not_counted_and_lower_the_label(tmp_path):
    machine = simulated(tmp_path, "a100_sxm_x8")
    links = machine.library.capture["devices"][3]["nvlinks"]
    machine.library.capture["devices"][3]["nvlinks"] = [{"state": 0, "remote_device_type": 2}, *links[1:]]
    facts = machine.facts()
    assert facts["gpus"][3]["nvlink_active"] == 11
    assert facts["links"][0][3] == "NV11"
    assert facts["links"][0][1] == "NV12"


def test_direct_links_are_counted_for_the_pair_they_join(tmp_path):
    machine = simulated(tmp_path, "l40s_x4")
    devices = machine.library.capture["devices"]
    for one, other in ((0, 1), (1, 0)):
        remote = {"state": 1, "remote_device_type": 0, "remote_pci": f"0000{simulated_address(other)}"}
        devices[one]["nvlinks"] = [remote] * 4
    for pair in machine.library.capture["pairs"]:
        pair["p2p"]["nvlink"] = 0
    links = machine.facts()["links"]
    assert links[0] == ["X", "NV4", "SYS", "SYS"]
    assert links[2][3] == "NODE"


def test_links_without_peer_access_are_no_nvlink_connection(tmp_path):
    machine = simulated(tmp_path, "a100_sxm_x8")
    machine.library.capture["pairs"][0]["p2p"]["nvlink"] = 5
    facts = machine.facts()
    assert facts["links"][1][0] == "NODE"
    assert facts["links"][2][0] == "NV12"


def test_mig(tmp_path):
    machine = simulated(tmp_path, "a100_sxm_x8")
    machine.library.capture["devices"][2]["nvmlDeviceGetMigMode"] = [1, 1]
    machine.library.capture["devices"][2]["nvmlDeviceGetRemappedRows"] = {"error": 3}
    gpu = machine.facts()["gpus"][2]
    assert gpu["mig_enabled"] is True
    assert gpu["remapped_rows"] is None


def test_pending_mig_is_not_mig(tmp_path):
    machine = simulated(tmp_path, "a100_sxm_x8")
    machine.library.capture["devices"][0]["nvmlDeviceGetMigMode"] = [0, 1]
    assert machine.facts()["gpus"][0]["mig_enabled"] is False


def test_first_memory_structure_gives_the_total_only(tmp_path):
    machine = simulated(tmp_path, "a100_sxm_x8")
    machine.library.without = ("nvmlDeviceGetMemoryInfo_v2",)
    gpu = machine.facts()["gpus"][0]
    assert gpu["memory_total_bytes"] == 81920 * MIB
    assert gpu["memory_used_bytes"] is gpu["memory_usable_bytes"] is gpu["memory_reserved_bytes"] is None


def test_functions_an_old_library_lacks_are_null_without_an_error(tmp_path):
    machine = simulated(tmp_path, "h800_sxm_x8")
    machine.library.without = ("nvmlDeviceGetRemappedRows", "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetMigMode")
    facts = machine.facts()
    gpu = facts["gpus"][0]
    assert (gpu["remapped_rows"], gpu["fabric_state"], gpu["mig_enabled"]) == (None, None, None)
    assert facts["probe_errors"] == []


def test_gpu_that_fell_off_the_bus_and_lost_its_handle(tmp_path):
    machine = simulated(tmp_path, "a100_sxm_x8")
    machine.library.capture["devices"][3]["lost"] = True
    device = machine.root / "sys/bus/pci/devices" / simulated_address(3)
    (device / "current_link_width").write_text("63\n")
    facts = machine.facts()
    assert [gpu["index"] for gpu in facts["gpus"]] == [0, 1, 2, 4, 5, 6, 7, None]
    lost = facts["gpus"][-1]
    assert (lost["source"], lost["pci_address"], lost["pci_id"]) == ("pci", simulated_address(3), "10de:20b2")
    assert lost["pcie_width"] is None, "all ones on the bus is no link of 63 lanes"
    assert lost["name"] is lost["memory_total_bytes"] is None
    assert len(facts["links"]) == 7
    assert facts["probe_errors"] == [
        {"probe": "nvml", "error": "nvmlDeviceGetHandleByIndex of GPU 3: GPU is lost"},
        {"probe": "gpus", "error": "0000:13:00.0 (10de:20b2) is on the PCI bus, but not known to the driver"},
    ]


def test_gpu_given_to_a_virtual_machine_says_so(tmp_path):
    machine = simulated(tmp_path, "l40s_x4")
    machine.pci("0000:99:00.0", "vfio-pci", vendor="0x10de", device="0x26b9", class_="0x030200")
    facts = machine.facts()
    assert facts["gpus"][-1]["pci_driver"] == "vfio-pci"
    assert facts["probe_errors"][0]["error"].endswith("it is bound to vfio-pci")


def test_all_gpus_lost_are_still_listed(tmp_path):
    machine = simulated(tmp_path, "rtx4090_x2")
    machine.library.capture["devices"] = []
    facts = machine.facts()
    assert [(gpu["index"], gpu["source"]) for gpu in facts["gpus"]] == [(0, "pci"), (1, "pci")]
    assert len(facts["probe_errors"]) == 2
    assert facts["links"] is None


def test_lost_gpu_in_the_middle_of_the_questions(tmp_path):
    machine = simulated(tmp_path, "rtx4090_x2")
    machine.library.capture["devices"][1]["memory_v2"] = {"error": 15}
    machine.library.capture["devices"][1]["nvmlDeviceGetMemoryInfo"] = {"error": 15}
    facts = machine.facts()
    assert facts["gpus"][1]["memory_total_bytes"] is None
    assert {"probe": "nvml", "error": "nvmlDeviceGetMemoryInfo of GPU 1: GPU is lost"} in facts["probe_errors"]


def test_gpu_facts_without_a_driver_come_from_the_bus(tmp_path):
    machine = bare_machine(tmp_path)
    machine.numa_nodes(2)
    for address in ("0000:41:00.0", "0001:01:00.0"):
        machine.pci(
            address, vendor="0x10de", device="0x2324", class_="0x030200",
            numa_node="-1", current_link_width="16", max_link_width="16",
        )  # fmt: skip
    machine.pci("0000:c0:00.0", vendor="0x10de", device="0x22a3", class_="0x068000")
    facts = machine.facts()
    assert [(gpu["index"], gpu["pci_address"]) for gpu in facts["gpus"]] == [
        (0, "0000:41:00.0"),
        (1, "0001:01:00.0"),
    ]
    assert set(facts["gpus"][0]) == GPU_KEYS
    assert facts["gpus"][0]["numa_node"] is None, "-1 on a machine of two nodes tells nothing"
    assert facts["nvswitch_count"] == 1
    assert facts["driver"]["state"] == "none"
    assert facts["links"] is None
    assert facts["probe_errors"] == []


@pytest.mark.parametrize(
    ("device", "pci_class", "gpus", "switches"),
    [
        ("0x2684", "0x030000", 1, 0),  # a GeForce is a VGA controller
        ("0x22ba", "0x040300", 0, 0),  # its sound function
        ("0x22a3", "0x068000", 0, 1),  # an NVSwitch
        ("0x22b1", "0x060400", 0, 0),  # a bridge on a GB200 board
        ("0x22a8", "0x060400", 0, 0),  # a bridge function of an NVSwitch
        ("0x22ac", "0x068001", 0, 0),  # another kind of bridge: only exactly 0x068000 is an NVSwitch
    ],
)
def test_pci_classes(tmp_path, device, pci_class, gpus, switches):
    machine = bare_machine(tmp_path)
    machine.pci("0000:03:00.0", vendor="0x10de", device=device, class_=pci_class)
    machine.pci("0000:02:00.0", vendor="0x1a03", device="0x2000", class_="0x030000")  # a board's own graphics
    facts = machine.facts()
    assert (len(facts["gpus"]), facts["nvswitch_count"]) == (gpus, switches)


def test_virtual_functions_are_not_gpus(tmp_path):
    machine = bare_machine(tmp_path)
    machine.pci("0000:03:00.0", vendor="0x10de", device="0x20b2", class_="0x030200")
    machine.pci("0000:03:00.4", vendor="0x10de", device="0x20b2", class_="0x030200")
    machine.link("/sys/bus/pci/devices/0000:03:00.4/physfn", "../0000:03:00.0")
    assert len(machine.facts()["gpus"]) == 1


def test_eight_gpus_take_less_than_three_seconds(tmp_path):
    machine = simulated(tmp_path, "a100_sxm_x8")
    started = time.monotonic()
    machine.facts()
    assert time.monotonic() - started < 3


def test_proprietary_flavour(tmp_path):
    machine = simulated(tmp_path, "a100_sxm_x8", "535.261.03")
    machine.load_driver("535.261.03", CLOSED)
    driver = machine.facts()["driver"]
    assert (driver["flavour"], driver["cuda"], driver["state"]) == ("proprietary", "12.2", "ok")
