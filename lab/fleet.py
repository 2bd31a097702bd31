#!/usr/bin/env python3
"""Write trees of files that stand for GPU hosts, and an inventory over them: a preflight without any GPU host.

    lab/fleet.py /tmp/fleet 100x8xH800 20x4xL40S@535.261.03 2xcpu

Each tree has sysfs and proc as the kernel would show them, and small commands (nvidia-smi, docker, modinfo ...) that
answer as the real ones do. The role gpu_facts reads it when gpu_facts_root names it. Nothing here is a measurement of a
real GPU: figures come from the catalogue.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from metalserve import catalogue
from metalserve.catalogue import MIB, Gpu
from metalserve.driver_state import driver_branch, driver_data

KERNEL = "6.12.57+deb13-amd64"
_SHAPE = re.compile(r"^(?:(\d+)x)?(?:cpu|(\d+)x([A-Za-z0-9-]+?))(?:@(none|nouveau|[\d.]+))?$")
_SWITCHES = {"8.0": (6, "0x1af1"), "9.0": (4, "0x22a3")}


@dataclass(frozen=True)
class Shape:
    """Some hosts that are alike. `driver` is a version, `none` or `nouveau`."""

    hosts: int
    gpus: int
    card: Gpu | None
    driver: str


def read_shape(text: str) -> Shape:
    """A shape such as `100x8xH800`, `4xL40S@535.261.03`, `8xA100@nouveau` or `2xcpu`.

    Raises:
        SystemExit: it cannot be read.
    """
    match = _SHAPE.match(text)
    if not match:
        raise SystemExit(f"{text!r} is no shape. Needed: [HOSTSx]GPUSxGPU[@DRIVER] or [HOSTSx]cpu, such as 100x8xH800.")
    card = catalogue.gpu(match[3]) if match[3] else None
    # One number alone counts GPUs.
    return Shape(int(match[1] or 1), int(match[2] or 0), card, match[4] or str(driver_data()["default_version"]))


class Tree:
    """A host as files below a root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        """Write a file of the host."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def link(self, path: str, target: str) -> None:
        """Make a symbolic link of the host."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.symlink_to(target)

    def command(self, name: str, answers: dict[str, str], default: str = "exit 1") -> None:
        """A command that prints a text by what its arguments begin with."""
        cases = "".join(f"'{begin}'*) cat <<'END'\n{text}\nEND\n;;\n" for begin, text in answers.items())
        self.write(f"/usr/bin/{name}", f'#!/bin/sh\ncase "$*" in\n{cases}*) {default} ;;\nesac\n')
        (self.root / "usr/bin" / name).chmod(0o755)


def build_host(root: Path, shape: Shape) -> None:
    """Write one host."""
    tree = Tree(root)
    _machine(tree)
    if shape.card is not None:
        _bus(tree, shape, shape.card)
        if shape.driver not in ("none", "nouveau"):
            _driver(tree, shape, shape.card)


def _machine(tree: Tree) -> None:
    tree.write("/proc/sys/kernel/osrelease", KERNEL)
    tree.write("/proc/sys/kernel/arch", "x86_64")
    tree.write("/proc/sys/kernel/random/boot_id", "00000000-0000-4000-8000-000000000001")
    tree.write("/proc/cmdline", "root=/dev/sda1 ro iommu=pt")
    block = "processor\t: {}\nmodel name\t: Simulated\nphysical id\t: {}\ncore id\t: {}\nflags\t: avx2 avx512f\n"
    tree.write("/proc/cpuinfo", "\n".join(block.format(i, i // 8, i % 8) for i in range(16)))
    tree.write("/proc/meminfo", f"MemTotal: {2 << 30} kB\nMemAvailable: {2 << 30} kB\n")
    for node in (0, 1):
        tree.write(f"/sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal: {1 << 30} kB\n")
    tree.write("/sys/firmware/acpi/tables", "")
    tree.write("/sys/class/net/lo", "")
    tree.write("/etc/os-release", 'ID=debian\nVERSION_ID="13"\n')
    tree.write(f"/lib/modules/{KERNEL}/modules.dep", "")
    tree.write(f"/lib/modules/{KERNEL}/build/Makefile", "")
    versions = '{"Client":{"Version":"28.5.1","ApiVersion":"1.51"},"Server":{"Version":"28.5.1","ApiVersion":"1.51"}}'
    tree.command("docker", {"version": versions, "info": '["/etc/cdi","/var/run/cdi"]', "image": ""})
    tree.command("systemd-detect-virt", {"": "none"})
    tree.command("journalctl", {"-k -b -o cat --no-pager -q -n 1": "Linux version"})
    services = "\n\n".join(
        f"Id={name}.service\nLoadState={load}\nActiveState={state}"
        for name, load, state in (
            ("nvidia-persistenced", "loaded", "active"),
            ("nvidia-fabricmanager", "loaded", "active"),
            ("nvidia-cdi-refresh", "loaded", "inactive"),
            ("nvidia-imex", "not-found", "inactive"),
        )
    )
    tree.command("systemctl", {"show": services, "--version": "systemd 257 (257.9-1)"})


def _address(index: int) -> str:
    return f"0000:{0x10 + index:02x}:00.0"


def _bus(tree: Tree, shape: Shape, card: Gpu) -> None:
    bound = {"none": None, "nouveau": "nouveau"}.get(shape.driver, "nvidia")
    for index in range(shape.gpus):
        device = f"/sys/bus/pci/devices/{_address(index)}"
        values = {
            "vendor": "0x10de",
            "device": f"0x{card.pci_ids[0][5:]}",
            "class": "0x030200",
            "numa_node": str(int(index >= shape.gpus / 2)),
            "current_link_width": "16",
            "max_link_width": "16",
            "max_link_speed": "32.0 GT/s PCIe",
        }
        for name, value in values.items():
            tree.write(f"{device}/{name}", value)
        if bound:
            tree.link(f"{device}/driver", f"../../../bus/pci/drivers/{bound}")
    if card.nvlink_links and shape.gpus == 8 and card.compute_capability in _SWITCHES:
        count, device_id = _SWITCHES[card.compute_capability]
        for index in range(count):
            device = f"/sys/bus/pci/devices/0000:{0xC0 + index:02x}:00.0"
            for name, value in (("vendor", "0x10de"), ("device", device_id), ("class", "0x068000")):
                tree.write(f"{device}/{name}", value)


def _driver(tree: Tree, shape: Shape, card: Gpu) -> None:
    version = shape.driver
    tree.write("/sys/module/nvidia/version", version)
    line = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n"
    tree.write("/proc/driver/nvidia/version", line)
    library = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so"
    tree.write(f"{library}.{version}", "")
    tree.link(f"{library}.1", f"libnvidia-ml.so.{version}")
    tree.write(f"/lib/modules/{KERNEL}/modules.dep", "updates/dkms/nvidia.ko.xz:\n")
    tree.command("modinfo", {"": f"version:        {version}\nlicense:        Dual MIT/GPL"})
    tree.command("nvidia-ctk", {"--version": "NVIDIA Container Toolkit CLI version 1.20.0"})
    devices = "".join(f'- name: "{index}"\n' for index in range(shape.gpus))
    mount = f"containerEdits:\n  mounts:\n  - hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.{version}\n"
    spec = f"---\ncdiVersion: 0.7.0\nkind: nvidia.com/gpu\ndevices:\n{devices}{mount}"
    tree.write("/var/run/cdi/nvidia.yaml", spec)
    tree.command("nv-fabricmanager", {"--version": f"Fabric Manager version is : {version}"})
    tree.command("nvidia-smi", _smi(shape, card))


def _smi(shape: Shape, card: Gpu) -> dict[str, str]:
    count = shape.gpus
    levels = driver_data()["branches"]
    cuda = levels[max(number for number in levels if number <= driver_branch(shape.driver))]["cuda"]
    gpus = "".join(_xml(index, card) for index in range(count))
    xml = f"<?xml version='1.0'?>\n<nvidia_smi_log><driver_version>{shape.driver}</driver_version>"
    xml += f"<cuda_version>{cuda}</cuda_version>{gpus}</nvidia_smi_log>"
    capabilities = "\n".join(f"0000{_address(index)}, {card.compute_capability}" for index in range(count))
    links = "".join(
        f"GPU {index}: {card.name}\n" + "".join(f"\t Link {link}: 26.562 GB/s\n" for link in range(card.nvlink_links))
        for index in range(count)
    )
    half = count / 2

    def word(a: int, b: int) -> str:
        if a == b:
            return " X "
        return f"NV{card.nvlink_links}" if card.nvlink_links else "NODE" if (a < half) == (b < half) else "SYS"

    rows = [[word(a, b) for b in range(count)] for a in range(count)]
    topology = "\t" + "\t".join(f"GPU{index}" for index in range(count)) + "\n"
    topology += "\n".join("\t".join([f"GPU{index}", *row]) for index, row in enumerate(rows))
    return {
        "-q -x": xml,
        "--query-gpu=pci.bus_id,compute_cap": capabilities,
        "nvlink -s": links if card.nvlink_links and count > 1 else "",
        "topo -m": topology,
    }


def _xml(index: int, card: Gpu) -> str:
    reserved = (card.memory_total_bytes - card.memory_usable_bytes) // MIB
    total = card.memory_total_bytes // MIB
    ecc = "N/A" if "GeForce" in card.name else "Enabled"
    rows = "".join(
        f"<remapped_row_{name}>{value}</remapped_row_{name}>"
        for name, value in (("corr", "0"), ("unc", "0"), ("pending", "No"), ("failure", "No"))
    )
    fabric = "<fabric><state>Completed</state></fabric>" if card.compute_capability == "9.0" else ""
    width = "<current_link_width>16x</current_link_width><max_link_width>16x</max_link_width>"
    generation = "<max_link_gen>5</max_link_gen><current_link_gen>1</current_link_gen>"
    link = f"<pcie_gen>{generation}</pcie_gen><link_widths>{width}</link_widths>"
    return (
        f'<gpu id="0000{_address(index)}"><product_name>{card.name}</product_name>'
        f"<uuid>GPU-00000000-0000-0000-0000-{index:012d}</uuid>"
        f"<pci><pci_device_id>{card.pci_ids[0][5:].upper()}10DE</pci_device_id>"
        f"<pci_gpu_link_info>{link}</pci_gpu_link_info></pci>"
        f"<fb_memory_usage><total>{total} MiB</total><reserved>{reserved} MiB</reserved><used>0 MiB</used>"
        f"</fb_memory_usage>"
        f"<persistence_mode>Enabled</persistence_mode><compute_mode>Default</compute_mode>"
        f"<mig_mode><current_mig>Disabled</current_mig></mig_mode><ecc_mode><current_ecc>{ecc}</current_ecc></ecc_mode>"
        f"<clocks_event_reasons><clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle></clocks_event_reasons>"
        f"<remapped_rows>{rows}</remapped_rows>{fabric}<gpu_recovery_action>None</gpu_recovery_action></gpu>"
    )


def build_fleet(directory: Path, shapes: Sequence[Shape]) -> dict[str, Path]:
    """Write all hosts and `hosts.yml`; returns host -> tree."""
    trees: dict[str, Path] = {}
    for shape in shapes:
        word = f"{shape.gpus}x{shape.card.key}" if shape.card else "cpu"
        for _host in range(shape.hosts):
            name = f"{word.lower()}-{len(trees) + 1:03d}"
            trees[name] = directory.resolve() / name
            build_host(trees[name], shape)
    hosts = {name: {"gpu_facts_root": os.fspath(tree)} for name, tree in trees.items()}
    variables = {"ansible_connection": "local", "ansible_python_interpreter": "{{ ansible_playbook_python }}"}
    inventory = {"serving_hosts": {"hosts": hosts, "vars": variables}}
    (directory / "hosts.yml").write_text(yaml.safe_dump(inventory, sort_keys=False), encoding="utf-8")
    return trees


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("shapes", nargs="+", type=read_shape)
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    trees = build_fleet(given.directory, given.shapes)
    print(f"{len(trees)} hosts in {given.directory}, inventory {given.directory / 'hosts.yml'}")


if __name__ == "__main__":
    main()
