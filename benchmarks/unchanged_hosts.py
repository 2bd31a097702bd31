"""What the modules of `site.yml` answer on hosts on which nothing is to be done; for lab/simulated.

The facts lie in the file that FLEET_FACTS names. A module that is not named here answers that nothing has changed.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metalserve.driver_packages import driver_packages

TOOLKIT = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
# What commands say, by what they begin with.
COMMANDS = {
    "dockerd --version": "Docker version 28.5.1, build 1",
    "docker --version": "Docker version 28.5.1, build 1",
    "systemctl --version": "systemd 257 (257.9-1)",
    "systemctl show docker.service": "ActiveState=active\nActiveEnterTimestamp=@2000000000",
    "dpkg-query --show --showformat=${Package} ${Version}": "\n".join(
        f"{name} 1.20.0-1 installed hold" for name in TOOLKIT
    ),
    "sh -c": "1000000000000",
}


@functools.cache
def facts() -> dict[str, Any]:
    """The facts that all hosts have."""
    known: dict[str, Any] = json.loads(Path(os.environ["FLEET_FACTS"]).read_text(encoding="utf-8"))
    return known


@functools.cache
def driver_host() -> dict[str, Any]:
    """Packages of the driver that is loaded, all held, and nothing in the way."""
    names = driver_packages(facts(), facts()["driver"]["loaded"], source="distribution")["names"]
    packages = [{"name": name, "version": f"{version}-1", "held": True} for name, version in names.items()]
    return {
        "packages": packages,
        "interrupted": False,
        "runfile": False,
        "engines": [],
        "services": [],
        "modules": [],
        "initramfs_stale": [],
        "next_kernel": None,
        "nvlink5": False,
        "errors": [],
    }


def servers() -> list[dict[str, Any]]:
    """What a gateway gives to each host: all are up."""
    return [
        {"pool": "m", "name": f"{host}:qwen", "status": "UP", "up": True, "running": 0, "drained_by": None}
        for host in os.environ["FLEET_HOSTS"].split()
    ]


def outcomes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Every deployment is at its release and has passed the gate."""
    check = bool(arguments.get("_ansible_check_mode"))
    found = [
        {
            "deployment": each["deployment"],
            "wanted": each["release_id"],
            "before": each["release_id"],
            "active": each["release_id"],
            "ok": True,
            "message": f"{each['deployment']}: the release {each['release_id']} has passed the gate",
            "lines": [],
            "started": False,
            "stopped": False,
            "serving": not check,
            "seconds": 1.0,
            "gate": "15 of 15",
            "capacity": {},
            "endpoint": {},
        }
        for each in arguments["releases"]
    ]
    fact = {"state": "rolled_out", "check": check, "outcomes": found}
    return {"outcomes": found, "ansible_facts": {"serving_rollout": fact}, "taken_up": {}, "lines": [], "failures": []}


def answer(host: str, module: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of one module."""
    if module == "command":
        line = " ".join(map(str, arguments.get("argv") or [arguments.get("_raw_params", "")]))
        text = next((text for begin, text in COMMANDS.items() if line.startswith(begin)), "")
        return {"changed": False, "rc": 0, "stdout": text, "stderr": "", "cmd": line}
    answers = {
        "gpu_host": lambda: {"ansible_facts": {"gpu_host": facts()}},
        "gateway_servers": lambda: {"present": True, "chosen": [], "left": {}, "servers": servers()},
        "serving_starts": lambda: {"deployments": {}},
        "driver_host": lambda: {"host": driver_host()},
        "serving_rollout": lambda: outcomes(arguments),
        "engine_image": lambda: {"missing": [], "underived": [], "names": [], "sources": [], "removed": []},
        "model_weights": lambda: {"pending": False, "key": arguments.get("key"), "model": {}, "phase": "done"},
        "serving_state": lambda: {"releases": [], "table": [], "diagnosis": [], "notices": []},
        "cuda_probe": lambda: {"probes": []},
        "slurp": lambda: {"content": "e30=", "encoding": "base64"},
        "stat": lambda: {"stat": {"exists": True, "isdir": False, "checksum": "0", "mtime": 1.0, "mode": "0644"}},
        "find": lambda: {"files": [], "matched": 0},
        "config_files": lambda: {"paths": []},
    }
    return {"changed": False, **answers.get(module, dict)()}
