"""Answers of hosts and a gateway that are looked at, for lab/simulated; a host named `lost` cannot be reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metalserve import catalogue

READ = ("gpu_host", "serving_starts", "stat", "command", "slurp", "host_drift", "file")


def answer(host: str, module: str, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    assert module in READ, f"{module} is not for looking"
    assert module != "file" or arguments["_ansible_check_mode"]
    if host.startswith("lost"):
        return None
    if module == "gpu_host":
        facts = catalogue.host_from_shape("1xH200")
        return {"changed": False, "ansible_facts": {"gpu_host": {**facts, "docker": {"images": []}}}}
    if module == "serving_starts":
        return {"changed": False, "deployments": {}}
    if module == "stat":
        certificate = arguments["path"].endswith(".pem")
        return {"changed": False, "stat": {"exists": certificate, "isdir": False, "checksum": "c"}}
    if module == "slurp":
        return {"failed": True, "msg": "file not found"}
    if module == "command":
        texts = {"haproxy": "HAProxy version 2.6.12", "socat": "description: metalserve-other"}
        return {"changed": False, "rc": 0, "stdout": texts.get(arguments["argv"][0], ""), "stderr": ""}
    aspects = {"release": [], "units": [], "driver": None, "weights": [], "strays": []}
    aspects["release"] = [f"{name} is planned" for name in arguments["deployments"]]
    return {"changed": False, "aspects": aspects}
