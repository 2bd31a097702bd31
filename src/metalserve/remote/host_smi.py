"""GPU facts through nvidia-smi, for a host where the NVML binding could not be used.

The XML form is read: the banner changes with the driver, and its heading has been renamed before. Memory is
rounded to MiB there, so usable memory can come out up to 1 MiB below what NVML says.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

from .host_pci import link_width, pci_address
from .host_probe import Host, ProbeError

_MIB = 1024 * 1024
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# What stands in a leaf in place of a value: [N/A], ERR!, a note on a deprecation, a lost GPU.
_NO_VALUE = ("[", "ERR!", "Requested functionality", "GPU is lost")
_UNITS = {"": 1, "x": 1, "MiB": _MIB}


def read_smi(host: Host) -> dict[str, Any]:
    """The same data as host_nvml.read_nvml.

    Raises:
        ProbeError: nvidia-smi is missing, refuses or hangs, or its XML cannot be parsed.

    """
    answer = host.command("nvidia-smi", "-q", "-x")
    if answer.code != 0:
        # The message stands on standard output; the code alone says little.
        text = (answer.stdout + answer.stderr).strip() or f"exit status {answer.code}"
        raise ProbeError(f"nvidia-smi -q -x: {text.splitlines()[0]}")
    facts = parse_xml(answer.stdout)
    errors: list[str] = facts["errors"]
    extras = (
        ("--query-gpu=pci.bus_id,compute_cap", "--format=csv,noheader"),
        ("nvlink", "-s"),
        ("topo", "-m"),
    )
    texts = []
    for arguments in extras:
        try:
            more = host.command("nvidia-smi", *arguments)
            texts.append(more.stdout if more.code == 0 else "")
        except ProbeError as error:
            errors.append(str(error))
            texts.append("")
    capabilities = parse_compute_capabilities(texts[0])
    active = parse_nvlink_status(texts[1])
    for gpu in facts["gpus"]:
        gpu["compute_capability"] = capabilities.get(gpu["pci_address"])
        gpu["nvlink_active"] = active.get(gpu["index"])
    facts["links"] = parse_topology(texts[2], len(facts["gpus"]))
    return facts


def parse_xml(text: str) -> dict[str, Any]:
    """The facts in the output of `nvidia-smi -q -x` (document types v11 to v13)."""
    try:
        # The external document type that the text names is never fetched by this parser.
        log = ElementTree.fromstring(text)  # noqa: S314 - written by the host's own nvidia-smi
    except ElementTree.ParseError as error:
        raise ProbeError(f"nvidia-smi -q -x: not XML ({error})") from None
    return {
        "driver_version": _leaf(log, "driver_version"),
        "nvml_version": None,
        "cuda": _leaf(log, "cuda_version"),
        "gpus": [_gpu(element, index) for index, element in enumerate(log.findall("gpu"))],
        "links": None,
        "errors": [],
    }


def _gpu(gpu: ElementTree.Element, index: int) -> dict[str, Any]:
    total_bytes = _amount(gpu, "fb_memory_usage/total")
    # Drivers before 510 count the reserve as used and do not name it.
    reserved_bytes = _amount(gpu, "fb_memory_usage/reserved")
    known = total_bytes is not None and reserved_bytes is not None
    packed_id = _leaf(gpu, "pci/pci_device_id") or ""
    action = _leaf(gpu, "gpu_recovery_action")
    return {
        "index": index,
        "uuid": _leaf(gpu, "uuid"),
        "pci_address": pci_address(gpu.get("id") or ""),
        "pci_id": f"{packed_id[4:]}:{packed_id[:4]}".lower() if len(packed_id) == 8 else None,
        "name": _leaf(gpu, "product_name"),
        "memory_total_bytes": total_bytes,
        "memory_reserved_bytes": reserved_bytes,
        "memory_usable_bytes": (total_bytes or 0) - (reserved_bytes or 0) if known else None,
        "memory_used_bytes": _amount(gpu, "fb_memory_usage/used") if known else None,
        "compute_capability": None,
        "mig_enabled": _switch(gpu, "mig_mode/current_mig"),
        "ecc_enabled": _switch(gpu, "ecc_mode/current_ecc"),
        "remapped_rows": _remapped_rows(gpu),
        "nvlink_active": None,
        "pcie_width": link_width(_leaf(gpu, "pci/pci_gpu_link_info/link_widths/current_link_width")),
        "pcie_max_width": link_width(_leaf(gpu, "pci/pci_gpu_link_info/link_widths/max_link_width")),
        "pcie_generation": _amount(gpu, "pci/pci_gpu_link_info/pcie_gen/current_link_gen"),
        "pcie_max_generation": _amount(gpu, "pci/pci_gpu_link_info/pcie_gen/max_link_gen"),
        "persistence": _switch(gpu, "persistence_mode"),
        "compute_mode": _words(_leaf(gpu, "compute_mode")),
        "throttle_reasons": _throttle_reasons(gpu),
        "sram_uncorrectable": _sram_uncorrectable(gpu),
        "sram_threshold_exceeded": _switch(gpu, "ecc_errors/aggregate/sram_threshold_exceeded"),
        "fabric_state": _words(_leaf(gpu, "fabric/state")),
        "recovery_action": "none" if action is None and _has(gpu, "gpu_recovery_action") else _words(action),
        "source": "nvml",
    }


def _leaf(element: ElementTree.Element, path: str) -> str | None:
    """The text of a leaf. Any leaf may hold words in place of a value."""
    text = (element.findtext(path) or "").strip()
    if text in ("", "N/A", "None") or text.startswith(("[", "ERR!", "Requested functionality", "GPU is lost")):
        return None
    return text


def _has(element: ElementTree.Element, path: str) -> bool:
    return (element.findtext(path) or "").strip() == "None"


def _amount(element: ElementTree.Element, path: str) -> int | None:
    found = re.match(r"^(\d+) ?(x|MiB|)$", _leaf(element, path) or "")
    return int(found.group(1)) * _UNITS[found.group(2)] if found else None


def _switch(element: ElementTree.Element, path: str) -> bool | None:
    return {"Enabled": True, "Disabled": False, "Yes": True, "No": False}.get(_leaf(element, path) or "")


def _words(text: str | None) -> str | None:
    return None if text is None else re.sub(r"\W+", "_", text.strip().lower())


def _remapped_rows(gpu: ElementTree.Element) -> dict[str, Any] | None:
    # Under MIG the whole element is the text N/A.
    rows = {
        "correctable": _amount(gpu, "remapped_rows/remapped_row_corr"),
        "uncorrectable": _amount(gpu, "remapped_rows/remapped_row_unc"),
        "pending": _switch(gpu, "remapped_rows/remapped_row_pending"),
        "failure": _switch(gpu, "remapped_rows/remapped_row_failure"),
    }
    return None if None in rows.values() else rows


def _throttle_reasons(gpu: ElementTree.Element) -> list[str]:
    # Drivers before 535 say throttle where newer ones say event.
    for word in ("event", "throttle"):
        parent = gpu.find(f"clocks_{word}_reasons")
        if parent is not None:
            prefix = f"clocks_{word}_reason_"
            return [child.tag[len(prefix) :] for child in parent if (child.text or "").strip() == "Active"]
    return []


def _sram_uncorrectable(gpu: ElementTree.Element) -> int | None:
    """Over the GPU's life; since driver 550 in two numbers."""
    names = ("sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded")
    found = [
        number for name in names for number in [_amount(gpu, f"ecc_errors/aggregate/{name}")] if number is not None
    ]
    return sum(found) if found else None


def parse_compute_capabilities(text: str) -> dict[str | None, str]:
    """PCI address -> compute capability, which the XML does not have."""
    rows = (line.partition(",") for line in text.splitlines())
    return {
        pci_address(address): value.strip() for address, _comma, value in rows if re.match(r"^\d+\.\d$", value.strip())
    }


def parse_nvlink_status(text: str) -> dict[int, int]:
    """GPU index -> number of active links out of `nvidia-smi nvlink -s`.

    The command prints nothing where no GPU has links (or a guest does not see them).
    """
    active: dict[int, int] = {}
    index: int | None = None
    for line in text.splitlines():
        gpu = re.match(r"^GPU (\d+):", line)
        link = re.match(r"^\s+Link \d+: (.+)$", line)
        if gpu:
            index = int(gpu.group(1))
        elif link and index is not None:
            active[index] = active.get(index, 0) + bool(re.match(r"^\d", link.group(1)))
    return active


def parse_topology(text: str, gpu_count: int) -> list[list[str]] | None:
    """The matrix between GPUs out of `nvidia-smi topo -m`; network cards have columns and rows there too."""
    lines = [_ANSI.sub("", line).split("\t") for line in text.splitlines()]
    rows = [[cell.strip() for cell in cells] for cells in lines if re.match(r"^GPU\d+\s*$", cells[0])]
    matrix = [row[1 : gpu_count + 1] for row in rows]
    whole = gpu_count and len(matrix) == gpu_count and all(len(row) == gpu_count for row in matrix)
    return matrix if whole else None
