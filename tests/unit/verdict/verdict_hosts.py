"""Hosts to judge: the catalogue's simulated ones with the software of a good host, each fact changeable."""

from __future__ import annotations

import datetime as dt
from typing import Any

from metalserve import catalogue
from metalserve.deployments import Inputs
from metalserve.verdict.host import HostVerdict, host_verdict
from metalserve.verdict.options import read_options

TODAY = dt.date(2026, 11, 30)
WANTED = "580.178.04"
MODEL = "qwen3.6-35b-a3b-fp8"
IMAGE = "vllm/vllm-openai:v0.33.0"
DIGEST = "sha256:" + "d" * 64
GIB = 1 << 30
QWEN = {"name": "qwen", "engine": "vllm", "model": MODEL, "port": 8000}
LOCK = {
    "images": {IMAGE: {"digest": DIGEST, "compressed_bytes": 10 * GIB}},
    "models": {
        MODEL: {"revision": "0123abcd", "files": [{"path": "a", "size_bytes": 36 * GIB, "sha256": "a" * 64}]},
    },
}
INPUTS = Inputs(models={}, engines={}, lock=LOCK, weight_sources={}, models_dir="/var/lib/metalserve/models")


def a_driver(version: str | None = WANTED, **changes: Any) -> dict[str, Any]:
    """The facts of a driver that is the same on all levels."""
    return {
        "state": "ok" if version else "none",
        "loaded": version,
        "flavour": "open" if version else None,
        "on_disk": version,
        "flavour_on_disk": "open" if version else None,
        "on_disk_newest_kernel": None,
        "signer": None,
        "userland": version,
        "fabric_manager": version,
        "dkms": [],
        "cuda": "13.0",
        "holders": [],
        **changes,
    }


def a_host(shape: str = "8xH800", *, version: str | None = WANTED, **changes: Any) -> dict[str, Any]:
    """A host of that shape on which everything is right."""
    facts = catalogue.host_from_shape(shape)
    for gpu in facts["gpus"]:
        gpu.update(
            pci_driver="nvidia", pcie_generation=1, pcie_max_generation=5, persistence=True, compute_mode="default",
            throttle_reasons=["gpu_idle"], sram_uncorrectable=0, sram_threshold_exceeded=False,
            fabric_state="completed" if gpu["nvlink_active"] else None, recovery_action="none",
        )  # fmt: skip
    disks = [
        {"path": path, "mount": "/", "total_bytes": 4000 * GIB, "free_bytes": 1000 * GIB}
        for path in ("/", "/var/lib/docker", "/var/lib/metalserve/models")
    ]
    spec = {"path": "/var/run/cdi/nvidia.yaml", "driver_version": version, "devices": ["nvidia.com/gpu=0"]}
    return {
        **facts,
        "kernel_headers": True,
        "virtualization": "none",
        "secure_boot": False,
        "mok_enrolled": False,
        "nouveau_bound": False,
        "driver": a_driver(version),
        "nvswitch_count": 4 if "H800" in shape else 0,
        "services": {"nvidia-fabricmanager": "active" if "H800" in shape else "missing"},
        "acs_redirect": [],
        "iommu": "pt",
        "disks": disks,
        "models": [],
        "docker": {"version": "28.5.1", "api": "1.51", "cdi": True, "running": True, "images": []},
        "container_toolkit": {"version": "1.20.0"},
        "cdi": {"specs": [spec]},
        "xid_errors": [],
        "sxid_errors": [],
        "listening": [],
        "probe_errors": [],
        **changes,
    }


def bare(shape: str = "8xH800", **changes: Any) -> dict[str, Any]:
    """The same host before the driver: GPUs are seen on the PCI bus only, nothing of NVIDIA's is installed."""
    facts = a_host(shape, version=None, **changes)
    kept = ("index", "pci_address", "pci_id", "numa_node", "pcie_width", "pcie_max_width")
    for gpu in facts["gpus"]:
        for name in set(gpu) - set(kept):
            gpu[name] = None
        gpu["source"] = "pci"
    return {**facts, "links": None, "container_toolkit": {"version": None}, "cdi": {"specs": []}, **changes}


def judge(facts: dict[str, Any] | None, deployments: Any = (QWEN,), **options: Any) -> HostVerdict:
    """The verdict under these options."""
    return host_verdict(facts, list(deployments), INPUTS, read_options(options), TODAY)


def row(verdict: HostVerdict, name: str, level: str | None = None) -> Any:
    """The check of that name; there is exactly one (of that level)."""
    (found,) = [check for check in verdict.checks if check.name == name and level in (None, check.verdict)]
    return found


def problems(verdict: HostVerdict) -> list[tuple[str, str]]:
    """Name and level of every check that is not ok."""
    return [(check.name, check.verdict) for check in verdict.checks if check.verdict != "ok"]
