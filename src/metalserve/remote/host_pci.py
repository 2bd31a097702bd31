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
# PCI Express Base Specification: what sysfs calls "16.0 GT/s PCIe" is the fourth generation.
_LINK_GENERATIONS = {"2.5": 1, "5": 2, "5.0": 2, "8": 3, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
_ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
# Extended capability 0x000d, its control register six bytes further; bits: request redirect, completion redirect
# (linux/include/uapi/linux/pci_regs.h: PCI_EXT_CAP_ID_ACS, PCI_ACS_CTRL, PCI_ACS_RR, PCI_ACS_CR).
_EXTENDED_CAPABILITIES = 0x100
_ACS = 0x000D
_ACS_CONTROL = 6
_ACS_REDIRECT = 0x04 | 0x08


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


def link_generation(speed: str | None) -> int | None:
    """The PCIe generation of a link speed as sysfs writes it; None for "Unknown" and the like."""
    return _LINK_GENERATIONS.get((speed or "").split(" ")[0])


def read_pci(host: Host) -> dict[str, Any]:
    """The GPUs, the number of NVSwitches, and what stands between the GPUs on the PCI bus.

    Virtual functions (vGPU) are parts of a GPU and are left out.
    """
    gpus = []
    gpu_names = []
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
                "pcie_generation": link_generation(host.devices.read(f"{device}/current_link_speed")),
                "pcie_max_generation": link_generation(host.devices.read(f"{device}/max_link_speed")),
            }
        )
        gpu_names.append(address)
    return {
        "gpus": gpus,
        "nvswitch_count": nvswitch_count,
        "acs_redirect": _acs_redirect(host, gpu_names),
        "iommu": _iommu(host, gpu_names),
    }


def _acs_redirect(host: Host, gpu_names: list[str]) -> list[str]:
    """The bridges above GPUs that send traffic between devices up to the root complex.

    The extended configuration space is for root only; without it no bridge is named.
    """
    bridges: set[str] = set()
    for name in gpu_names:
        # The link's target names the way from the root port down to the device.
        way = host.devices.resolve(f"{_DEVICES}/{name}").split("/")
        bridges.update(step for step in way if _ADDRESS.match(step) and step != name)
    found = []
    for bridge in sorted(bridges):
        space = host.devices.read_bytes(host.devices.resolve(f"{_DEVICES}/{bridge}") + "/config") or b""
        control = _acs_control(space)
        if control is not None and control & _ACS_REDIRECT:
            found.append(bridge)
    return found


def _acs_control(space: bytes) -> int | None:
    place = _EXTENDED_CAPABILITIES
    # Each capability names the next one; a broken device must not lead in circles.
    for _step in range(64):
        if place < _EXTENDED_CAPABILITIES or place + 8 > len(space):
            return None
        header = int.from_bytes(space[place : place + 4], "little")
        if header & 0xFFFF == _ACS:
            return int.from_bytes(space[place + _ACS_CONTROL : place + _ACS_CONTROL + 2], "little")
        place = header >> 20
    return None


def _iommu(host: Host, gpu_names: list[str]) -> str | None:
    """off, pt (devices address memory directly) or on (every access is translated); None where it is not visible.

    The groups of the GPUs tell what is in force; the kernel's command line only what was asked for.
    """
    if not host.devices.names("/sys/class"):
        return None
    units = host.devices.names("/sys/class/iommu")
    groups = host.devices.names("/sys/kernel/iommu_groups")
    if not units and not groups:
        return "off"
    own = [host.devices.read(f"{_DEVICES}/{name}/iommu_group/type") for name in gpu_names]
    types = {kind for kind in own if kind} or {
        kind for kind in (host.devices.read(f"/sys/kernel/iommu_groups/{group}/type") for group in groups) if kind
    }
    if types:
        return "pt" if types == {"identity"} else "on"
    words = (host.files.read("/proc/cmdline") or "").split()
    return "pt" if "iommu=pt" in words or "iommu.passthrough=1" in words else "on"


def _numa_node(text: str | None, node_count: int) -> int | None:
    """The kernel writes -1 where the firmware names no node; on a machine of one node that is node 0."""
    if text is None or not re.match(r"^-?\d+$", text):
        return None
    node = int(text)
    if node >= 0:
        return node
    return 0 if node_count == 1 else None
