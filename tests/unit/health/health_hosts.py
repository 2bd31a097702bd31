"""Healthy hosts to break in one place."""

from __future__ import annotations

from typing import Any

from metalserve.catalogue import host_from_shape

DRIVER = "580.178.04"


def healthy(shape: str = "8xH800") -> dict[str, Any]:
    """The facts of a host on which nothing is wrong."""
    facts = host_from_shape(shape)
    for gpu in facts["gpus"]:
        gpu.update(
            persistence=True,
            compute_mode="default",
            throttle_reasons=["gpu_idle"],
            sram_uncorrectable=0,
            sram_threshold_exceeded=False,
            recovery_action="none",
            pcie_generation=1,
            pcie_max_generation=5,
            fabric_state="completed" if "H800" in shape else None,
            pci_driver="nvidia",
        )
    return {
        **facts,
        "driver": {
            "state": "ok",
            "loaded": DRIVER,
            "on_disk": DRIVER,
            "userland": DRIVER,
            "fabric_manager": DRIVER,
            "holders": [],
        },
        "nvswitch_count": 4,
        "services": {"nvidia-persistenced": "active", "nvidia-fabricmanager": "active"},
        "container_toolkit": {"version": "1.20.0"},
        "docker": {"version": "26.1.5", "cdi": True, "running": True},
        "cdi": {
            "specs": [
                {
                    "path": "/var/run/cdi/nvidia.yaml",
                    "driver_version": DRIVER,
                    "devices": [f"nvidia.com/gpu={gpu['index']}" for gpu in facts["gpus"]] + ["nvidia.com/gpu=all"],
                }
            ]
        },
        "xid_errors": [],
        "sxid_errors": [],
        "probe_errors": [],
    }


def passed_probe(facts: dict[str, Any], image: str = "registry/vllm@sha256:1") -> dict[str, Any]:
    """What the probe returns where it works."""
    answer = {
        "ok": True,
        "error": None,
        "library": f"/usr/lib/x86_64-linux-gnu/libcuda.so.{DRIVER}",
        "cuda": 13000,
        "devices": [
            {
                "index": place,
                "name": gpu["name"],
                "uuid": gpu["uuid"],
                "memory_total_bytes": gpu["memory_usable_bytes"],
                "memory_works": True,
            }
            for place, gpu in enumerate(facts["gpus"])
        ],
        "nodes": [f"nvidia{gpu['index']}" for gpu in facts["gpus"]],
    }
    return {
        "image": image,
        "steps": [
            {"when": "start", "answer": dict(answer), "error": None},
            {"when": "daemon_reload", "answer": dict(answer), "error": None},
        ],
    }
