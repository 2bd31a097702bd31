import base64
import zlib
from functools import partial

import pytest
from host_machines import DATA, MIB, bare_machine, captured_h200, simulated

from metalserve.remote.host_nvml import load_pynvml
from metalserve.remote.host_probe import Output, ProbeError
from metalserve.remote.host_smi import parse_compute_capabilities, parse_nvlink_status, parse_topology, parse_xml


def xml(count=2):
    return (DATA / f"h200_x{count}" / "nvidia-smi-q.xml").read_text()


@pytest.mark.parametrize("count", [1, 2])
def test_nvidia_smi_says_the_same_as_nvml_on_the_real_machine(tmp_path, count):
    machine = captured_h200(tmp_path, count)
    by_nvml = machine.facts()
    machine.library = None
    by_smi = machine.facts()
    assert by_smi.pop("probe_errors") == [
        {"probe": "nvml", "error": "no NVML binding was given; nvidia-smi was asked instead"}
    ]
    by_nvml.pop("probe_errors")
    for one, other in zip(by_smi["gpus"], by_nvml["gpus"], strict=True):
        # nvidia-smi rounds to MiB, and the capture of NVML lacks three calls that the XML has.
        assert 0 <= other["memory_usable_bytes"] - one["memory_usable_bytes"] < MIB
        assert one["fabric_state"] == "completed" or count == 1
        assert one["recovery_action"] == "none"
        assert (one["sram_uncorrectable"], one["sram_threshold_exceeded"]) == (0, False)
        for name in (
            "memory_usable_bytes", "memory_reserved_bytes", "fabric_state", "recovery_action", "sram_uncorrectable",
            "sram_threshold_exceeded",
        ):  # fmt: skip
            del one[name], other[name]
    for facts in (by_smi, by_nvml):
        del facts["memory"], facts["disks"], facts["listening"]
    assert by_smi == by_nvml


def test_nvml_library_missing_falls_back(tmp_path):
    machine = captured_h200(tmp_path, 2)
    machine.library.init_error = 12
    facts = machine.facts()
    assert [gpu["name"] for gpu in facts["gpus"]] == ["NVIDIA H200"] * 2
    assert facts["probe_errors"][0]["error"].endswith("Not Found; nvidia-smi was asked instead")


def test_binding_that_does_not_run_falls_back(tmp_path):
    machine = captured_h200(tmp_path, 2)
    packed = base64.b64encode(zlib.compress(b"import no_such_module")).decode()
    facts = machine.facts(nvml=partial(load_pynvml, packed))
    assert [gpu["name"] for gpu in facts["gpus"]] == ["NVIDIA H200"] * 2
    assert facts["probe_errors"][0]["error"].startswith("pynvml cannot be used: ModuleNotFoundError")


def test_other_nvml_errors_do_not_fall_back(tmp_path):
    machine = captured_h200(tmp_path, 2)
    machine.library.init_error = 999
    facts = machine.facts()
    assert facts["probe_errors"] == [{"probe": "nvml", "error": "nvmlInit: Unknown Error"}]
    assert [gpu["source"] for gpu in facts["gpus"]] == ["pci", "pci"]


def test_nvidia_smi_reports_a_mismatch(tmp_path):
    machine = captured_h200(tmp_path, 2)
    machine.library = None
    text = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.178\n"
    machine.commands["nvidia-smi", "-q", "-x"] = Output(18, text, "")
    facts = machine.facts()
    assert facts["driver"]["state"] == "mismatch"
    assert facts["probe_errors"][1]["error"] == f"nvidia-smi -q -x: {text.splitlines()[0]}"


def test_nothing_to_ask_with(tmp_path):
    machine = simulated(tmp_path, "l40s_x4")
    machine.library = None
    facts = machine.facts()
    assert [error["error"] for error in facts["probe_errors"]] == [
        "no NVML binding was given; nvidia-smi was asked instead",
        "nvidia-smi: not installed",
    ]
    assert facts["driver"]["state"] == "ok"


def test_nothing_is_asked_while_no_driver_is_loaded(tmp_path):
    machine = bare_machine(tmp_path)
    machine.commands["nvidia-smi",] = ProbeError("nvidia-smi was run")
    assert machine.facts()["probe_errors"] == []


def test_every_leaf_may_be_words():
    text = xml()
    for was, now in [
        ("<total>143771 MiB</total>", "<total>N/A</total>"),
        ("<current_ecc>Enabled</current_ecc>", "<current_ecc>N/A</current_ecc>"),
        ("<current_mig>Disabled</current_mig>", "<current_mig>[N/A]</current_mig>"),
        ("<current_link_width>16x</current_link_width>", "<current_link_width>ERR!</current_link_width>"),
        (
            "<gpu_recovery_action>None</gpu_recovery_action>",
            "<gpu_recovery_action>Requested functionality has been deprecated</gpu_recovery_action>",
        ),
    ]:
        assert was in text
        text = text.replace(was, now)
    gpu = parse_xml(text)["gpus"][0]
    for name in (
        "memory_total_bytes", "memory_usable_bytes", "memory_used_bytes", "ecc_enabled", "mig_enabled", "pcie_width",
        "recovery_action",
    ):  # fmt: skip
        assert gpu[name] is None, name


def test_remapped_rows_may_be_one_text_under_mig():
    text = xml(1)
    start, end = text.index("<remapped_rows>"), text.index("</remapped_rows>")
    assert parse_xml(text)["gpus"][0]["remapped_rows"] is not None
    changed = text[:start] + "<remapped_rows>N/A" + text[end:]
    assert parse_xml(changed)["gpus"][0]["remapped_rows"] is None


def test_driver_that_counts_the_reserve_as_used():
    gpu = parse_xml(xml(1).replace("<reserved>616 MiB</reserved>", ""))["gpus"][0]
    assert gpu["memory_total_bytes"] == 143771 * MIB
    assert gpu["memory_usable_bytes"] is gpu["memory_used_bytes"] is None


def test_recovery_action_with_a_value():
    text = xml(1).replace("<gpu_recovery_action>None<", "<gpu_recovery_action>Drain and Reset<")
    assert parse_xml(text)["gpus"][0]["recovery_action"] == "drain_and_reset"


def test_older_document_without_newer_elements():
    text = xml(1).replace("nvsmi_device_v13", "nvsmi_device_v12")
    text = text.replace("<gpu_recovery_action>None</gpu_recovery_action>", "")
    start, end = text.index("<fabric>"), text.index("</fabric>") + len("</fabric>")
    gpu = parse_xml(text[:start] + text[end:])["gpus"][0]
    assert gpu["recovery_action"] is gpu["fabric_state"] is None
    assert gpu["name"] == "NVIDIA H200"


def test_text_that_is_no_xml():
    with pytest.raises(ProbeError, match="not XML"):
        parse_xml("No devices were found\n")


def test_compute_capabilities():
    text = "00000000:00:06.0, 9.0\n00000000:41:00.0, [N/A]\n"
    assert parse_compute_capabilities(text) == {"0000:00:06.0": "9.0"}


def test_nvlink_status():
    text = "GPU 0: NVIDIA H800 (UUID: GPU-0)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\nGPU 1: X (UUID: G)\n"
    assert parse_nvlink_status(text) == {0: 1}
    assert parse_nvlink_status("") == {}


def test_topology_with_colours_and_network_cards():
    text = (
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
        "GPU0\t X \tNV8\tPIX\t0-31\t0\t\tN/A\nGPU1\tNV8\t X \tSYS\t32-63\t1\t\tN/A\nNIC0\tPIX\tSYS\t X \n\n"
        "Legend:\n\n  X    = Self\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
    )
    assert parse_topology(text, 2) == [["X", "NV8"], ["NV8", "X"]]
    assert parse_topology(text, 3) is None, "a matrix that does not fit the GPUs is none"
    assert parse_topology("", 0) is None
