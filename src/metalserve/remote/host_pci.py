"""NVIDIA devices on the PCI bus, as sysfs shows them: needs no driver and survives a broken one."""

from __future__ import annotations

import re
from typing import Any

from .host_probe import Host

_DEVICES = "/sys/bus/pci/devices"
_NVIDIA = "0x10de"
# PCI class codes: 3D controller and VGA controller. The last byte is the programming interface.
_GPU_CLASSES = ("0x0302", "0x0300")
# The class by which NVIDIA's own kernel driver finds an NVSwitch
# (open-gpu-kernel-modules, kernel-open/nvidia/linux_nvswitch.c). The NVSwitch's bridge functions are 0x0604.
_NVSWITCH_CLASS = "0x068000"
# A device that fell off the bus answers all ones, which reads as a link of 63 lanes.
_LINK_WIDTHS = (1, 2, 4, 8, 12, 16, 32)


def pci_address(text: str) -> str | None:
    """A PCI address as sysfs writes it: four-digit domain, small letters, with the function.

    NVML and nvidia-smi use eight digits for the domain; Xid messages leave the function out.
    """
    found = re.match(r"^(?:PCI:)?([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?$", text.strip(), re.I)
    if not found:
        return None
    domain, bus, device, function = found.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function or 0}".lower()


def link_width(value: int | str | None) -> int | None:
    """The number of PCIe lanes, or None when it is none that exists."""
    digits = re.match(r"^\d+", str(value)) if value is not None else None
    width = int(digits.group()) if digits else 0
    return width if width in _LINK_WIDTHS else None


def read_pci(host: Host) -> dict[str, Any]:
    """The GPUs and the number of NVSwitches on the PCI bus.

    Virtual functions (vGPU) are parts of a GPU and are left out.
    """
    gpus = []
    nvswitch_count = 0
    numa_nodes = [name for name in host.files.names("/sys/devices/system/node") if name[4:].isdigit()]
    for address in host.devices.names(_DEVICES):
        device = f"{_DEVICES}/{address}"
        if host.devices.read(f"{device}/vendor") != _NVIDIA:
            continue
        pci_class = host.devices.read(f"{device}/class") or ""
        nvswitch_count += pci_class == _NVSWITCH_CLASS
        if not pci_class.startswith(_GPU_CLASSES) or host.devices.link(f"{device}/physfn"):
            continue
        driver = host.devices.link(f"{device}/driver")
        gpus.append(
            {
                "pci_address": pci_address(address),
                "pci_id": "10de:" + (host.devices.read(f"{device}/device") or "0x")[2:].lower(),
                "pci_driver": driver.rsplit("/", 1)[-1] if driver else None,
                "numa_node": _numa_node(host.devices.read(f"{device}/numa_node"), len(numa_nodes)),
                "pcie_width": link_width(host.devices.read(f"{device}/current_link_width")),
                "pcie_max_width": link_width(host.devices.read(f"{device}/max_link_width")),
            }
        )
    return {"gpus": gpus, "nvswitch_count": nvswitch_count}


def _numa_node(text: str | None, node_count: int) -> int | None:
    """The kernel writes -1 where the firmware names no node; on a machine of one node that is node 0."""
    if text is None or not re.match(r"^-?\d+$", text):
        return None
    node = int(text)
    if node >= 0:
        return node
    return 0 if node_count == 1 else None
