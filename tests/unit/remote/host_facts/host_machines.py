"""Machines to look at: file trees, command answers and NVML answers; real captures and simulated machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from host_nvml_library import NvmlLibrary, binding, pynvml_over

from metalserve.remote.host_facts import collect
from metalserve.remote.host_platform import SERVICES
from metalserve.remote.host_probe import CommandMissingError, Output

DATA = Path(__file__).parent / "data"
MIB = 1024 * 1024
JOURNAL = ("journalctl", "-k", "-b", "-o", "cat", "--no-pager", "-q")
KERNEL = "6.1.0-32-amd64"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@)\nGCC version: 12\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Jan  7 20:47:29 UTC 2026\nGCC version: 12\n"

# Simulated, from published figures: PCI id, memory in MiB (A100 on 535: 869 MiB reserved; the other reserves are
# made up), NVLinks, NVSwitches in an HGX board of eight.
SIMULATED: dict[str, dict[str, Any]] = {
    "a100_sxm_x8": {
        "name": "NVIDIA A100-SXM4-80GB", "id": "20b2", "mib": 81920, "reserved": 869, "cc": [8, 0], "count": 8,
        "pcie": 4, "nvlinks": 12, "switches": 6, "switch_id": "1af1", "ecc": [1, 1], "mig": [0, 0],
    },
    "h800_sxm_x8": {
        "name": "NVIDIA H800", "id": "2324", "mib": 81559, "reserved": 600, "cc": [9, 0], "count": 8,
        "pcie": 5, "nvlinks": 8, "switches": 4, "switch_id": "22a3", "ecc": [1, 1], "mig": [0, 0],
        "fabric_state": 3, "recovery_action": 0,
    },
    "a100_pcie_x4": {
        "name": "NVIDIA A100 80GB PCIe", "id": "20b5", "mib": 81920, "reserved": 869, "cc": [8, 0], "count": 4,
        "pcie": 4, "ecc": [1, 1], "mig": [0, 0],
    },
    "h100_sxm_x8": {
        "name": "NVIDIA H100 80GB HBM3", "id": "2330", "mib": 81559, "reserved": 600, "cc": [9, 0], "count": 8,
        "pcie": 5, "nvlinks": 18, "switches": 4, "switch_id": "22a3", "ecc": [1, 1], "mig": [0, 0],
        "fabric_state": 3, "recovery_action": 0,
    },
    "l40s_x4": {
        "name": "NVIDIA L40S", "id": "26b9", "mib": 46068, "reserved": 600, "cc": [8, 9], "count": 4,
        "pcie": 4, "ecc": [1, 1],
    },
    "rtx4090_x2": {
        "name": "NVIDIA GeForce RTX 4090", "id": "2684", "mib": 24564, "reserved": 400, "cc": [8, 9], "count": 2,
        "pcie": 4,
    },
}  # fmt: skip


@dataclass
class Machine:
    """A root directory, the commands it has, and its NVML library (None: no binding reaches it)."""

    root: Path
    commands: dict[tuple[str, ...], Output | Exception] = field(default_factory=dict)
    library: NvmlLibrary | None = None

    def write(self, path: str, text: str | bytes) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)

    def link(self, path: str, target: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(target)

    def pci(self, address: str, driver: str | None = None, **attributes: str) -> None:
        device = f"/sys/bus/pci/devices/{address}"
        for name, value in attributes.items():
            self.write(f"{device}/{name.removesuffix('_')}", value + "\n")
        if driver:
            self.link(f"{device}/driver", f"../../../bus/pci/drivers/{driver}")

    def numa_nodes(self, count: int) -> None:
        for node in range(count):
            self.write(f"/sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal: 1048576 kB\n")

    def load_driver(self, version: str, flavour: str = OPEN) -> None:
        self.write("/sys/module/nvidia/version", version + "\n")
        self.write("/proc/driver/nvidia/version", flavour.format(version))

    def install_userland(self, version: str, directory: str = "/usr/lib/x86_64-linux-gnu") -> None:
        self.write(f"{directory}/libnvidia-ml.so.{version}", "")
        self.link(f"{directory}/libnvidia-ml.so.1", f"libnvidia-ml.so.{version}")

    def install_module(
        self, version: str, licence: str = "Dual MIT/GPL", kernel: str = KERNEL, name: str = "nvidia"
    ) -> None:
        file = f"updates/dkms/{name}.ko.xz"
        self.write(f"/lib/modules/{kernel}/modules.dep", f"kernel/a.ko:\nupdates/x-uvm.ko: {file}\n{file}:\n")
        answer = (
            f"filename: /lib/modules/{file}\nversion:        {version}\nlicense:        {licence}\nsrcversion: 0A\n"
        )
        self.commands["modinfo", "-k", kernel, name] = Output(0, answer, "")

    def services(self, states: dict[str, str]) -> None:
        """What systemd says of NVIDIA's services; those that are not named are not installed."""
        blocks = [
            f"Id={name}.service\nLoadState={'loaded' if name in states else 'not-found'}\n"
            f"ActiveState={states.get(name, 'inactive')}\n"
            for name in SERVICES
        ]
        self.commands["systemctl", "show"] = Output(0, "\n".join(blocks), "")

    def run(self, argv: Sequence[str], _limit_seconds: float) -> Output:
        for length in range(len(argv), 0, -1):
            answer = self.commands.get(tuple(argv[:length]))
            if isinstance(answer, Exception):
                raise answer
            if answer is not None:
                return answer
        raise CommandMissingError(f"{argv[0]}: not installed")

    def facts(self, disk_paths: Sequence[str] = ("/",), **options: Any) -> dict[str, Any]:
        binding()  # compiled once here, not in every probe
        nvml = partial(pynvml_over, self.library) if self.library else None
        return collect(str(self.root), disk_paths, **{"nvml": nvml, "run": self.run, **options})


def bare_machine(root: Path) -> Machine:
    """A machine with one socket of two cores and four threads, and no NVIDIA device."""
    machine = Machine(root)
    machine.write("/proc/sys/kernel/osrelease", KERNEL + "\n")
    machine.write("/proc/sys/kernel/arch", "x86_64\n")
    block = (
        "processor\t: {}\nmodel name\t: Testium 9\nphysical id\t: 0\ncore id\t\t: {}\n"
        "flags\t\t: fpu smep avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n"
    )
    machine.write("/proc/cpuinfo", "\n".join(block.format(i, i % 2) for i in range(4)))
    machine.write("/proc/meminfo", "MemTotal:       2097152 kB\nMemFree: 1 kB\nMemAvailable:    1048576 kB\n")
    machine.write("/sys/firmware/acpi/tables", "")
    machine.write("/lib/modules/" + KERNEL + "/modules.dep", "kernel/a.ko:\n")
    machine.numa_nodes(1)
    machine.write("/etc/os-release", 'PRETTY_NAME="Debian 13"\nID=debian\nVERSION_ID="13"\n')
    machine.write("/proc/sys/kernel/random/boot_id", "5c3e1b0a-0000-4000-8000-000000000001\n")
    machine.commands["systemd-detect-virt",] = Output(1, "none\n", "")
    machine.services({})
    machine.commands["systemctl", "--version"] = Output(0, "systemd 257 (257.9-1~deb13u1)\n+PAM +AUDIT\n", "")
    machine.commands[JOURNAL] = Output(1, "", "")  # nothing fits the pattern
    machine.commands[*JOURNAL, "-n", "1"] = Output(0, "Linux version 6.1.0-32-amd64\n", "")
    return machine


def captured_h200(root: Path, count: int) -> Machine:
    """The real machine with one or two H200."""
    data = DATA / f"h200_x{count}"
    machine = bare_machine(root)
    for section in (data / "sysfs-pci.txt").read_text().split("== ")[1:]:
        head, *lines = section.splitlines()
        values = dict(line.partition("=")[::2] for line in lines if "=" in line)
        driver = values.pop("driver").rsplit("/", 1)[-1]
        values["class_"] = values.pop("class")
        machine.pci(head.split()[0].rsplit("/", 1)[-1], driver, **values)
    machine.load_driver("580.159.04")
    machine.write("/proc/driver/nvidia/version", (data / "proc-driver-nvidia-version.txt").read_text())
    machine.install_userland("580.159.04", "/usr/local/nvidia/lib64")
    machine.library = NvmlLibrary(json.loads((data / "nvml.json").read_text()))
    smi = {
        ("-q", "-x"): "nvidia-smi-q.xml",
        ("nvlink", "-s"): "nvidia-smi-nvlink-s.txt",
        ("topo", "-m"): "nvidia-smi-topo-m.txt",
    }
    for arguments, name in smi.items():
        machine.commands["nvidia-smi", *arguments] = Output(0, (data / name).read_text(), "")
    capabilities = "".join(f"00000000:00:0{6 + index}.0, 9.0\n" for index in range(count))
    machine.commands["nvidia-smi", "--query-gpu=pci.bus_id,compute_cap"] = Output(0, capabilities, "")
    return machine


def simulated_address(index: int) -> str:
    return f"0000:{0x10 + index:02x}:00.0"


def simulated(root: Path, kind: str, version: str = "580.178.04") -> Machine:
    """A simulated machine with a good driver; GPUs alternate between two NUMA nodes by halves."""
    spec = SIMULATED[kind]
    machine = bare_machine(root)
    machine.numa_nodes(2)
    devices = []
    for index in range(spec["count"]):
        address = simulated_address(index)
        machine.pci(
            address, "nvidia", vendor="0x10de", device=f"0x{spec['id']}", class_="0x030200",
            numa_node=str(int(index >= spec["count"] / 2)), current_link_width="16", max_link_width="16",
        )  # fmt: skip
        total, reserved = spec["mib"] * MIB, spec["reserved"] * MIB
        device = {
            "nvmlDeviceGetName": spec["name"],
            "nvmlDeviceGetUUID": f"GPU-00000000-0000-0000-0000-{index:012d}",
            "nvmlDeviceGetPciInfo_v3": {
                "busId": f"0000{address}".upper(), "pciDeviceId": int(spec["id"], 16) << 16 | 0x10DE,
            },
            "nvmlDeviceGetCudaComputeCapability": spec["cc"],
            "nvmlDeviceGetMemoryInfo": {"total": total, "free": total - reserved, "used": reserved},
            "memory_v2": {
                "version": 33554472, "total": total, "reserved": reserved, "free": total - reserved, "used": 0,
            },
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetCurrPcieLinkGeneration": 1,  # an idle card saves power
            "nvmlDeviceGetMaxPcieLinkGeneration": spec["pcie"],
            "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetComputeMode": 0,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x1,
            "nvlinks": [{"state": 1, "remote_device_type": 2}] * spec.get("nvlinks", 0),
            "fabric_state": spec.get("fabric_state", {"error": 3}),
            "recovery_action": spec.get("recovery_action"),
        }  # fmt: skip
        if "ecc" in spec:
            device["nvmlDeviceGetEccMode"] = spec["ecc"]
            device["nvmlDeviceGetRemappedRows"] = [0, 0, 0, 0]
            device["sram"] = {}
        if "mig" in spec:
            device["nvmlDeviceGetMigMode"] = spec["mig"]
        devices.append(device)
    for switch in range(spec.get("switches", 0)):
        address = f"0000:{0xC0 + switch:02x}:00.0"
        machine.pci(address, "nvidia-nvswitch", vendor="0x10de", device=f"0x{spec['switch_id']}", class_="0x068000")
    half = spec["count"] / 2
    pairs = [
        {
            "a": a, "b": b, "topology_common_ancestor": 40 if (a < half) == (b < half) else 50,
            "p2p": {"nvlink": 0 if spec.get("nvlinks") else 5},
        }
        for a in range(spec["count"]) for b in range(a)
    ]  # fmt: skip
    major, minor = (13, 0) if int(version.split(".")[0]) >= 580 else (12, 2)
    machine.library = NvmlLibrary(
        {
            "nvmlSystemGetDriverVersion": version,
            "nvmlSystemGetNVMLVersion": f"{major}.{version}",
            "nvmlSystemGetCudaDriverVersion_v2": major * 1000 + minor * 10,
            "devices": devices,
            "pairs": pairs,
        }
    )
    machine.load_driver(version)
    machine.install_userland(version)
    machine.install_module(version)
    return machine
