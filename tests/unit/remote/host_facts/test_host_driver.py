import json

import pytest
from host_machines import CLOSED, KERNEL, bare_machine, captured_h200, simulated

from metalserve.remote.host_driver import driver_state
from metalserve.remote.host_probe import Output, ProbeError


def a_gpu(machine, driver=None):
    machine.pci("0000:3b:00.0", driver, vendor="0x10de", device="0x2330", class_="0x030200")
    return machine


def test_no_gpu_and_no_driver(tmp_path):
    facts = bare_machine(tmp_path).facts()
    assert facts["gpus"] == []
    assert facts["nouveau_bound"] is False
    assert facts["driver"] == {
        "state": "none", "loaded": None, "flavour": None, "flavour_on_disk": None, "on_disk": None,
        "on_disk_newest_kernel": None, "signer": None, "userland": None, "fabric_manager": None, "dkms": [],
        "cuda": None, "holders": [],
    }  # fmt: skip
    assert facts["probe_errors"] == []


def test_nouveau_bound(tmp_path):
    facts = a_gpu(bare_machine(tmp_path), "nouveau").facts()
    assert facts["nouveau_bound"] is True
    assert facts["driver"]["state"] == "nouveau"
    assert facts["gpus"][0]["pci_driver"] == "nouveau"


def test_nouveau_loaded_but_not_bound_is_not_nouveau(tmp_path):
    machine = a_gpu(bare_machine(tmp_path))
    machine.write("/sys/module/nouveau/refcnt", "0")
    facts = machine.facts()
    assert (facts["nouveau_bound"], facts["driver"]["state"]) == (False, "none")


def test_nouveau_bound_wins_over_an_installed_driver(tmp_path):
    machine = a_gpu(bare_machine(tmp_path), "nouveau")
    machine.install_module("580.178.04")
    machine.install_userland("580.178.04")
    driver = machine.facts()["driver"]
    assert (driver["state"], driver["on_disk"]) == ("nouveau", "580.178.04")


@pytest.mark.parametrize(("licence", "flavour"), [("Dual MIT/GPL", "open"), ("NVIDIA", "proprietary")])
def test_installed_but_not_loaded(tmp_path, licence, flavour):
    machine = a_gpu(bare_machine(tmp_path))
    machine.install_module("580.178.04", licence)
    machine.install_userland("580.178.04")
    driver = machine.facts()["driver"]
    assert driver["state"] == "not_loaded"
    assert (driver["on_disk"], driver["flavour"], driver["userland"]) == ("580.178.04", flavour, "580.178.04")
    assert driver["loaded"] is driver["cuda"] is None


@pytest.mark.parametrize("name", ["nvidia-current", "nvidia-current-open", "nvidia-tesla-535"])
def test_debian_names_of_the_module(tmp_path, name):
    machine = bare_machine(tmp_path)
    machine.install_module("550.163.01", name=name)
    assert machine.facts()["driver"]["on_disk"] == "550.163.01"


def test_driver_that_was_installed_by_half(tmp_path):
    """The libraries came, the build of the module did not."""
    machine = a_gpu(bare_machine(tmp_path))
    machine.install_userland("580.178.04")
    machine.commands["dkms", "status"] = Output(0, "nvidia/580.178.04: added\n", "")
    facts = machine.facts()
    driver = facts["driver"]
    assert (driver["state"], driver["loaded"], driver["on_disk"], driver["userland"]) == (
        "not_loaded", None, None, "580.178.04",
    )  # fmt: skip
    assert driver["dkms"] == [{"kernel": None, "module": "nvidia/580.178.04", "state": "added"}]
    assert facts["gpus"][0]["source"] == "pci"
    assert facts["probe_errors"] == []


def test_other_modules_of_the_driver_are_not_the_driver(tmp_path):
    machine = bare_machine(tmp_path)
    machine.write(
        f"/lib/modules/{KERNEL}/modules.dep", "updates/nvidia-uvm.ko:\nkernel/nvidiafb.ko.xz: updates/nvidia.ko\n"
    )
    facts = machine.facts()
    assert facts["driver"]["on_disk"] is None
    assert facts["probe_errors"] == [], "modinfo was not even needed"


def test_userland_of_another_version_than_the_loaded_module(tmp_path):
    machine = simulated(tmp_path, "l40s_x4", "580.159.04")
    (tmp_path / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").unlink()
    machine.install_userland("580.178.04")
    machine.install_module("580.178.04")
    machine.library.init_error = 18
    facts = machine.facts()
    driver = facts["driver"]
    assert driver["state"] == "mismatch"
    assert (driver["loaded"], driver["on_disk"], driver["userland"]) == ("580.159.04", "580.178.04", "580.178.04")
    assert [gpu["source"] for gpu in facts["gpus"]] == ["pci"] * 4
    assert facts["links"] is None
    assert facts["probe_errors"] == [
        {"probe": "nvml", "error": "nvmlInit: RM has detected an NVML/RM version mismatch."}
    ]


def test_mismatch_that_only_nvml_sees(tmp_path):
    machine = simulated(tmp_path, "l40s_x4")
    machine.library.init_error = 18
    assert machine.facts()["driver"]["state"] == "mismatch"


def test_new_module_on_disk_waiting_for_a_reload_is_not_a_mismatch(tmp_path):
    machine = simulated(tmp_path, "l40s_x4", "580.159.04")
    machine.install_module("580.178.04")
    driver = machine.facts()["driver"]
    assert (driver["state"], driver["on_disk"]) == ("ok", "580.178.04")


def test_loaded_module_without_any_userland(tmp_path):
    machine = a_gpu(bare_machine(tmp_path), "nvidia")
    machine.load_driver("580.178.04")
    driver = machine.facts()["driver"]
    assert (driver["state"], driver["userland"]) == ("mismatch", None)


def test_loaded_version_from_proc_when_sysfs_has_none(tmp_path):
    machine = bare_machine(tmp_path)
    machine.write("/proc/driver/nvidia/version", CLOSED.format("470.256.02"))
    driver = machine.facts()["driver"]
    assert (driver["loaded"], driver["flavour"]) == ("470.256.02", "proprietary")


def test_userland_version_from_nvml_when_the_file_name_tells_none(tmp_path):
    machine = captured_h200(tmp_path, 1)
    (tmp_path / "usr/local/nvidia/lib64/libnvidia-ml.so.1").unlink()
    machine.write("/usr/local/nvidia/lib64/libnvidia-ml.so.1", "")
    driver = machine.facts()["driver"]
    assert (driver["userland"], driver["state"]) == ("580.159.04", "ok")


def test_userland_is_the_library_that_the_loader_would_take(tmp_path):
    machine = bare_machine(tmp_path)
    machine.install_userland("535.54.03")
    machine.install_userland("580.178.04", "/opt/driver/lib")
    machine.install_userland("390.157", "/usr/lib/i386-linux-gnu")
    machine.commands["ldconfig", "-p"] = Output(
        0,
        "2 libs found in cache\n"
        "\tlibnvidia-ml.so.1 (libc6) => /usr/lib/i386-linux-gnu/libnvidia-ml.so.1\n"
        "\tlibnvidia-ml.so.1 (libc6,x86-64) => /opt/driver/lib/libnvidia-ml.so.1\n"
        "\tlibnvidia-ml.so (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libnvidia-ml.so\n",
        "",
    )
    assert machine.facts()["driver"]["userland"] == "580.178.04"


def test_userland_behind_absolute_links_stays_inside_the_root(tmp_path):
    machine = bare_machine(tmp_path)
    machine.write("/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.550.163.01", "")
    machine.link("/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.1", "libnvidia-ml.so.550.163.01")
    alternative = "/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.1"
    machine.link("/etc/alternatives/nvidia--libnvidia-ml.so.1", alternative)
    machine.link("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "/etc/alternatives/nvidia--libnvidia-ml.so.1")
    assert machine.facts()["driver"]["userland"] == "550.163.01"


def test_newer_kernel_without_the_module_is_told(tmp_path):
    machine = simulated(tmp_path, "l40s_x4")
    machine.write("/lib/modules/6.1.0-9-amd64/modules.dep", "")
    machine.write("/lib/modules/6.1.0-101-amd64/modules.dep", "kernel/a.ko:\n")
    machine.write("/lib/modules/6.1.0-200-amd64/updates/dkms/nvidia.ko", "")  # left over of a removed kernel
    driver = machine.facts()["driver"]
    assert driver["on_disk_newest_kernel"] == {"kernel": "6.1.0-101-amd64", "version": None}
    machine.install_module("580.178.04", kernel="6.1.0-101-amd64")
    assert machine.facts()["driver"]["on_disk_newest_kernel"]["version"] == "580.178.04"


def test_older_kernels_do_not_matter(tmp_path):
    machine = simulated(tmp_path, "l40s_x4")
    machine.write("/lib/modules/6.1.0-9-amd64/modules.dep", "")
    assert machine.facts()["driver"]["on_disk_newest_kernel"] is None


def test_fabric_manager(tmp_path):
    machine = simulated(tmp_path, "a100_sxm_x8")
    machine.write("/usr/bin/nv-fabricmanager", "")
    answer = Output(0, "Fabric Manager version is : 580.178.04\n", "")
    machine.commands["/usr/bin/nv-fabricmanager", "--version"] = answer
    assert machine.facts()["driver"]["fabric_manager"] == "580.178.04"
    machine.commands["/usr/bin/nv-fabricmanager", "--version"] = Output(1, "", "cannot execute")
    facts = machine.facts()
    assert facts["driver"]["fabric_manager"] is None
    assert facts["probe_errors"] == [
        {"probe": "driver", "error": "/usr/bin/nv-fabricmanager --version: no version in the answer"}
    ]


def test_one_failing_command_costs_only_its_own_value(tmp_path):
    machine = simulated(tmp_path, "l40s_x4")
    machine.commands["modinfo", "-k", KERNEL, "nvidia"] = ProbeError("modinfo: no answer in 10 s")
    facts = machine.facts()
    assert (facts["driver"]["state"], facts["driver"]["on_disk"]) == ("ok", None)
    assert facts["probe_errors"] == [{"probe": "driver", "error": "modinfo: no answer in 10 s"}]


def test_gpus_simulated_in_a_tree_of_their_own(tmp_path):
    host = bare_machine(tmp_path / "host")
    devices = simulated(tmp_path / "devices", "a100_sxm_x8")
    host.library = devices.library
    host.install_userland("580.178.04")
    facts = host.facts(device_root=str(devices.root))
    assert len(facts["gpus"]) == 8
    assert facts["driver"]["state"] == "ok"
    assert facts["cpu"]["model"] == "Testium 9"


@pytest.mark.parametrize(
    ("loaded", "on_disk", "userland", "nouveau", "nvml_mismatch", "state"),
    [
        (None, None, None, False, False, "none"),
        (None, None, None, True, False, "nouveau"),
        (None, "1.1", None, False, False, "not_loaded"),
        (None, None, "1.1", False, False, "not_loaded"),
        ("1.1", "1.1", "1.2", False, False, "mismatch"),
        ("1.1", "1.1", "1.1", False, True, "mismatch"),
        ("1.1", None, "1.1", True, False, "ok"),
    ],
)
def test_driver_state(loaded, on_disk, userland, nouveau, nvml_mismatch, state):
    driver = {"loaded": loaded, "on_disk": on_disk, "userland": userland}
    assert driver_state(driver, nouveau_bound=nouveau, nvml_mismatch=nvml_mismatch) == state


def test_facts_are_plain_json(tmp_path):
    facts = simulated(tmp_path, "h800_sxm_x8").facts()
    assert json.loads(json.dumps(facts)) == facts
