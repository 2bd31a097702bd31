import pytest
from host_machines import KERNEL, Machine, bare_machine, simulated, simulated_address

from metalserve.remote.host_facts import collect
from metalserve.remote.host_probe import CommandMissingError, Output, ProbeError, run_in_tree

HEADERS = f"/lib/modules/{KERNEL}/build"


def test_kernel_headers_and_boot_id(tmp_path):
    machine = bare_machine(tmp_path)
    assert machine.facts()["kernel_headers"] is False
    machine.link(HEADERS, f"/usr/src/linux-headers-{KERNEL}")
    assert machine.facts()["kernel_headers"] is False, "a link that leads nowhere: the headers are not installed"
    machine.write(f"/usr/src/linux-headers-{KERNEL}/Makefile", "")
    facts = machine.facts()
    assert facts["kernel_headers"] is True
    assert facts["boot_id"] == "5c3e1b0a-0000-4000-8000-000000000001"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('ID=debian\nVERSION_ID="13"\n', {"id": "debian", "version_id": "13", "like": ["debian"]}),
        (
            '# EL\nID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.6"\n',
            {"id": "rocky", "version_id": "9.6", "like": ["rocky", "rhel", "centos", "fedora"]},
        ),
        ("ID=ubuntu\nID_LIKE=debian\nVERSION_ID='24.04'\n",
         {"id": "ubuntu", "version_id": "24.04", "like": ["ubuntu", "debian"]}),
        ("NAME=Nameless\n", {"id": "linux", "version_id": None, "like": ["linux"]}),
    ],
)  # fmt: skip
def test_operating_system(tmp_path, text, expected):
    machine = bare_machine(tmp_path)
    machine.write("/etc/os-release", text)
    assert machine.facts()["os"] == expected


def test_operating_system_of_the_vendors_file_or_unknown(tmp_path):
    machine = bare_machine(tmp_path)
    (tmp_path / "etc/os-release").unlink()
    machine.write("/usr/lib/os-release", "ID=debian\n")
    assert machine.facts()["os"]["id"] == "debian"
    (tmp_path / "usr/lib/os-release").unlink()
    facts = machine.facts()
    assert facts["os"] == {"id": None, "version_id": None, "like": []}
    assert facts["probe_errors"] == [
        {"probe": "os", "error": "/etc/os-release and /usr/lib/os-release: not readable"}
    ]  # fmt: skip


def test_virtualization(tmp_path):
    machine = bare_machine(tmp_path)
    assert machine.facts()["virtualization"] == "none"
    machine.commands["systemd-detect-virt",] = Output(0, "kvm\n", "")
    assert machine.facts()["virtualization"] == "kvm"
    machine.commands["systemd-detect-virt",] = Output(1, "", "Failed to check for VM: Permission denied\n")
    facts = machine.facts()
    assert facts["virtualization"] is None
    assert facts["probe_errors"][0]["error"] == "systemd-detect-virt: Failed to check for VM: Permission denied"
    del machine.commands["systemd-detect-virt",]
    facts = machine.facts()
    assert (facts["virtualization"], facts["probe_errors"]) == (None, [])


def test_systemd(tmp_path):
    machine = bare_machine(tmp_path)
    assert machine.facts()["systemd"] == 257
    machine.commands["systemctl", "--version"] = Output(1, "", "broken\n")
    facts = machine.facts()
    assert facts["systemd"] is None
    assert facts["probe_errors"] == [{"probe": "systemd", "error": "systemctl --version: broken"}]
    del machine.commands["systemctl", "--version"]
    facts = machine.facts()
    assert (facts["systemd"], facts["probe_errors"]) == (None, [])


def test_services(tmp_path):
    machine = bare_machine(tmp_path)
    machine.services({"nvidia-persistenced": "active", "nvidia-fabricmanager": "failed", "nvidia-imex": "activating"})
    assert machine.facts()["services"] == {
        "nvidia-persistenced": "active",
        "nvidia-fabricmanager": "failed",
        "nvidia-cdi-refresh": "missing",
        "nvidia-imex": "inactive",
    }


def test_services_without_systemd(tmp_path):
    machine = bare_machine(tmp_path)
    del machine.commands["systemctl", "show"], machine.commands["systemctl", "--version"]
    assert set(machine.facts()["services"].values()) == {"missing"}
    text = "System has not been booted with systemd as init system (PID 1). Can't operate."
    machine.commands["systemctl", "show"] = Output(1, "", text + "\n")
    facts = machine.facts()
    assert set(facts["services"].values()) == {None}
    assert facts["probe_errors"] == [{"probe": "services", "error": f"systemctl show: {text}"}]
    machine.commands["systemctl", "show"] = ProbeError("systemctl show: no answer in 10 s")
    assert set(machine.facts()["services"].values()) == {None}


# DKMS and the key that it signs with


def test_dkms_of_both_forms(tmp_path):
    machine = bare_machine(tmp_path)
    machine.commands["dkms", "status"] = Output(
        0,
        "nvidia/580.178.04, 6.1.0-32-amd64, x86_64: installed (WARNING! Diff between built and installed module!)\n"
        "nvidia/570.195.03: added\n"
        "nvidia-current, 550.163.01, 6.1.0-30-amd64, x86_64: built\n"
        "zfs/2.3.1, 6.1.0-32-amd64, x86_64: installed\n",
        "",
    )
    assert machine.facts()["driver"]["dkms"] == [
        {"kernel": "6.1.0-32-amd64", "module": "nvidia/580.178.04", "state": "installed"},
        {"kernel": None, "module": "nvidia/570.195.03", "state": "added"},
        {"kernel": "6.1.0-30-amd64", "module": "nvidia-current/550.163.01", "state": "built"},
    ]


def test_dkms_that_fails(tmp_path):
    machine = bare_machine(tmp_path)
    machine.commands["dkms", "status"] = Output(2, "", "Error! Broken dkms.conf\n")
    facts = machine.facts()
    assert facts["driver"]["dkms"] == []
    assert facts["probe_errors"] == [{"probe": "dkms", "error": "dkms status: Error! Broken dkms.conf"}]


@pytest.mark.parametrize(
    ("answer", "enrolled"),
    [
        (Output(1, "/var/lib/dkms/mok.pub is already enrolled\n", ""), True),
        (Output(0, "/var/lib/dkms/mok.pub is not enrolled\n", ""), False),
        (Output(255, "", "EFI variables are not supported on this system\n"), None),
        (CommandMissingError("mokutil: not installed"), None),
    ],
)
def test_key_of_dkms(tmp_path, answer, enrolled):
    machine = bare_machine(tmp_path)
    assert machine.facts()["mok_enrolled"] is False, "without a key none can be enrolled"
    machine.write("/var/lib/dkms/mok.pub", b"0")
    machine.commands["mokutil", "--test-key", str(tmp_path / "var/lib/dkms/mok.pub")] = answer
    assert machine.facts()["mok_enrolled"] is enrolled


def test_key_that_dkms_was_told_to_use_comes_first(tmp_path):
    machine = bare_machine(tmp_path)
    machine.write("/var/lib/dkms/mok.pub", b"0")
    machine.write("/etc/pki/our.der", b"0")
    machine.write("/etc/dkms/framework.conf", "# mok_certificate=/none\n")
    machine.write("/etc/dkms/framework.conf.d/key.conf", 'mok_certificate="/etc/pki/our.der"\n')
    machine.commands["mokutil", "--test-key", str(tmp_path / "etc/pki/our.der")] = Output(
        0, "x is already enrolled", ""
    )
    assert machine.facts()["mok_enrolled"] is True


def test_signer_and_flavour_of_the_module_on_disk(tmp_path):
    machine = simulated(tmp_path, "l40s_x4")
    machine.install_module("570.195.03", "NVIDIA")
    answer = machine.commands["modinfo", "-k", KERNEL, "nvidia"]
    signed = Output(0, answer.stdout + "signer:         DKMS module signing key\n", "")
    machine.commands["modinfo", "-k", KERNEL, "nvidia"] = signed
    driver = machine.facts()["driver"]
    assert (driver["flavour"], driver["flavour_on_disk"]) == ("open", "proprietary")
    assert driver["signer"] == "DKMS module signing key"


# CDI

YAML = """\
---
cdiVersion: 0.5.0
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
  hooks:
  - args:
    - nvidia-cdi-hook
    hookName: createContainer
  mounts:
  - containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.580.178.04
    hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.580.178.04
    name: not-a-device
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
      name: neither
  name: "0"
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
  name: all
kind: nvidia.com/gpu
"""


def test_cdi(tmp_path):
    machine = bare_machine(tmp_path)
    assert machine.facts()["cdi"] == {"specs": []}
    machine.link("/var/run", "/run")
    machine.write("/run/cdi/nvidia.yaml", YAML)
    machine.write("/etc/cdi/hand.yml", 'kind: "nvidia.com/gpu"\ndevices:\n  - name: "0"\n    annotations: {}\n')
    machine.write(
        "/etc/cdi/old.json", '{"kind": "nvidia.com/gpu", "devices": [{"name": "all"}], "x": "libcuda.so.535.1"}'
    )
    machine.write("/etc/cdi/broken.json", "{")
    machine.write("/etc/cdi/other.yaml", YAML.replace("nvidia.com/gpu", "vendor.com/net"))
    machine.write("/etc/cdi/README", YAML)
    facts = machine.facts()
    assert facts["cdi"]["specs"] == [
        {"path": "/etc/cdi/hand.yml", "driver_version": None, "devices": ["nvidia.com/gpu=0"]},
        {"path": "/etc/cdi/old.json", "driver_version": "535.1", "devices": ["nvidia.com/gpu=all"]},
        {
            "path": "/var/run/cdi/nvidia.yaml",
            "driver_version": "580.178.04",
            "devices": ["nvidia.com/gpu=0", "nvidia.com/gpu=all"],
        },
    ]
    assert facts["probe_errors"] == []


# Between the GPUs


def a_tree_of_bridges(machine, control):
    """Two GPUs below a switch below a root port, as sysfs links them."""
    root = "/sys/devices/pci0000:00/0000:00:01.0"
    for index, port in enumerate(("0000:02:01.0", "0000:02:02.0")):
        gpu = f"0000:{0x10 + index:02x}:00.0"
        way = f"{root}/0000:01:00.0/{port}/{gpu}"
        for name, value in (("vendor", "0x10de"), ("device", "0x26b9"), ("class", "0x030200")):
            machine.write(f"{way}/{name}", value)
        machine.link(f"/sys/bus/pci/devices/{gpu}", f"../../../..{way}")
    for place in ("", "/0000:01:00.0", "/0000:01:00.0/0000:02:01.0", "/0000:01:00.0/0000:02:02.0"):
        name = (root + place).rsplit("/", 1)[-1]
        bits = control.get(name)
        if bits is not None:
            space = bytearray(4096)
            # Advanced error reporting stands first and names the place of ACS.
            space[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")
            space[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
            space[0x14E:0x150] = bits.to_bytes(2, "little")
            machine.write(f"{root}{place}/config", bytes(space))
        machine.link(f"/sys/bus/pci/devices/{name}", f"../../../..{root}{place}")


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        ({}, []),
        ({"0000:02:01.0": 0x00, "0000:02:02.0": 0x11}, []),
        ({"0000:02:01.0": 0x1D, "0000:02:02.0": 0x08, "0000:00:01.0": 0x04},
         ["0000:00:01.0", "0000:02:01.0", "0000:02:02.0"]),
    ],
)  # fmt: skip
def test_bridges_with_acs_redirect(tmp_path, control, expected):
    machine = bare_machine(tmp_path)
    a_tree_of_bridges(machine, control)
    facts = machine.facts()
    assert len(facts["gpus"]) == 2
    assert facts["acs_redirect"] == expected


def test_configuration_space_that_leads_in_circles_or_is_cut_short(tmp_path):
    machine = bare_machine(tmp_path)
    a_tree_of_bridges(machine, {})
    circle = bytearray(4096)
    circle[0x100:0x104] = (0x0001 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    machine.write("/sys/devices/pci0000:00/0000:00:01.0/config", bytes(circle))
    machine.write("/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/config", bytes(64))
    facts = machine.facts()
    assert (facts["acs_redirect"], facts["probe_errors"]) == ([], [])


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"/sys/class/net/lo": ""}, "off"),
        ({"/sys/class/iommu/dmar0/x": "", "/proc/cmdline": "ro quiet iommu=pt"}, "pt"),
        ({"/sys/class/iommu/dmar0/x": "", "/proc/cmdline": "ro"}, "on"),
        ({"/sys/class/iommu/dmar0/x": "", "/sys/kernel/iommu_groups/0/type": "DMA-FQ",
          "/sys/kernel/iommu_groups/1/type": "identity"}, "on"),
        ({"/sys/class/iommu/dmar0/x": "", "/sys/kernel/iommu_groups/0/type": "DMA", "gpu": "identity"}, "pt"),
        ({"/sys/class/iommu/dmar0/x": "", "gpu": "DMA", "/proc/cmdline": "iommu=pt"}, "on"),
    ],
)  # fmt: skip
def test_iommu(tmp_path, files, expected):
    machine = simulated(tmp_path, "rtx4090_x2")
    for path, text in files.items():
        where = f"/sys/bus/pci/devices/{simulated_address(0)}/iommu_group/type" if path == "gpu" else path
        machine.write(where, text + "\n")
    assert machine.facts()["iommu"] == expected


def test_pcie_generation_from_the_bus(tmp_path):
    machine = bare_machine(tmp_path)
    machine.pci(
        "0000:03:00.0", vendor="0x10de", device="0x26b9", class_="0x030200",
        current_link_speed="2.5 GT/s PCIe", max_link_speed="16.0 GT/s PCIe",
    )  # fmt: skip
    machine.pci("0000:04:00.0", vendor="0x10de", device="0x26b9", class_="0x030200", max_link_speed="Unknown")
    gpus = machine.facts()["gpus"]
    assert (gpus[0]["pcie_generation"], gpus[0]["pcie_max_generation"]) == (1, 4)
    assert (gpus[1]["pcie_generation"], gpus[1]["pcie_max_generation"]) == (None, None)


# A host that is only a tree of files


def a_command(machine: Machine, path: str, text: str) -> None:
    machine.write(path, f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    (machine.root / path.lstrip("/")).chmod(0o755)


def test_commands_of_a_tree_come_from_the_tree(tmp_path):
    machine = bare_machine(tmp_path)
    a_command(machine, "/usr/bin/docker", '{"Client":{"Version":"28.2.2"},"Server":{"Version":"28.2.2"}}')
    a_command(machine, "/usr/sbin/dkms", "nvidia/580.178.04: added")
    machine.write("/usr/bin/nv-fabricmanager", "not to be run")
    facts = collect(str(tmp_path))
    assert facts["docker"]["version"] == "28.2.2"
    assert facts["driver"]["dkms"][0]["module"] == "nvidia/580.178.04"
    assert facts["driver"]["fabric_manager"] is None
    assert facts["virtualization"] is None, "this machine's systemd does not answer for the tree"


def test_absolute_command_of_a_tree(tmp_path):
    machine = bare_machine(tmp_path)
    a_command(machine, "/usr/bin/nv-fabricmanager", "Fabric Manager version is : 580.178.04")
    assert run_in_tree(str(tmp_path), ["/usr/bin/nv-fabricmanager"], 5).stdout.endswith("580.178.04\n")
    with pytest.raises(CommandMissingError, match="/bin/sh: not installed"):
        run_in_tree(str(tmp_path), ["/bin/sh", "-c", "true"], 5)


# What the driver says of each GPU


def test_state_of_a_gpu(tmp_path):
    machine = simulated(tmp_path, "a100_sxm_x8")
    machine.library.capture["devices"][1].update(
        nvmlDeviceGetPersistenceMode=0,
        nvmlDeviceGetComputeMode=3,
        nvmlDeviceGetCurrentClocksEventReasons=0x48,
        sram={"aggregateUncParity": 2, "aggregateUncSecDed": 1, "volatileUncParity": 9, "bThresholdExceeded": 1},
    )
    good, bad = machine.facts()["gpus"][:2]
    names = ("persistence", "compute_mode", "throttle_reasons", "sram_uncorrectable", "sram_threshold_exceeded")
    assert [good[name] for name in names] == [True, "default", ["gpu_idle"], 0, False]
    assert [bad[name] for name in names] == [
        False,
        "exclusive_process",
        ["hw_slowdown", "hw_thermal_slowdown"],
        3,
        True,
    ]
    assert (good["pcie_generation"], good["pcie_max_generation"]) == (1, 4)


def test_state_of_a_gpu_under_an_old_driver(tmp_path):
    machine = simulated(tmp_path, "a100_sxm_x8", "525.147.05")
    machine.library.without = ("nvmlDeviceGetSramEccErrorStatus", "nvmlDeviceGetCurrentClocksEventReasons")
    machine.library.capture["devices"][0]["sram"] = {"aggregateUncParity": 4}
    facts = machine.facts()
    gpu = facts["gpus"][0]
    assert (gpu["sram_uncorrectable"], gpu["sram_threshold_exceeded"]) == (4, None)
    assert gpu["throttle_reasons"] == ["gpu_idle"]
    assert facts["probe_errors"] == []
