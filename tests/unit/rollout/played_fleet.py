"""Answers of a fleet behind gateways, for lab/simulated: state and what was asked lie in one JSON file.

{hosts: {NAME: {current, previous, lost_at, lost, fails}},
 gateways: {NAME: {drained: {SERVER: by}, busy, lost_at, lost}}, asked: [...]}
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STATE = Path(os.environ["PLAYED_FLEET"])
ENDPOINT = {"name": "tiny", "model": "m", "served_names": [], "engine": "vllm", "thinking": "off", "url": "http://h:1"}


@contextmanager
def state() -> Iterator[dict[str, Any]]:
    with STATE.open("r+", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        known = json.load(stream)
        yield known
        stream.seek(0)
        stream.truncate()
        json.dump(known, stream)


def answer(host: str, module: str, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    with state() as known:
        words = [module, host, arguments.get("state"), *(arguments.get("servers") or ())]
        check = bool(arguments.get("_ansible_check_mode"))
        words += ["check"] * check
        known["asked"].append(" ".join(filter(None, words)))
        machine = {**known["hosts"], **known["gateways"]}[host]
        if not check and machine.get("lost_at") == f"{module} {arguments.get('state')}":
            machine["lost"] = True
        if machine.get("lost"):
            return None
        if module == "gateway_servers":
            return gateway(known, machine, arguments)
        if module == "serving_rollout":
            return rollout(machine, arguments)
        if module == "endpoint_gate":
            return {"changed": False, "passed": True, "msg": ""}
        if module == "rollout_lock":
            return {"changed": False, "replaced": {}}
        raise AssertionError(f"nobody thought of {module}")


def gateway(known: dict[str, Any], machine: dict[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    drained, names = machine["drained"], arguments.get("servers") or ()
    if arguments["state"] == "looked":
        rows = [
            {
                "pool": "m",
                "name": f"{host}:tiny",
                "status": "DRAIN" if f"{host}:tiny" in drained else "UP",
                "up": f"{host}:tiny" not in drained,
                "running": 0,
                "drained_by": drained.get(f"{host}:tiny"),
            }
            for host in known["hosts"]
        ]
        return {"changed": False, "present": True, "chosen": [], "servers": rows}
    if arguments["state"] == "drained":
        drained.update({name: "rollout" for name in names if name not in drained})
    if arguments["state"] == "undrained":
        for name in names:
            drained.pop(name, None)
    verdict = {"ok": True, "text": "9 requests, 0 failed"}
    left = dict.fromkeys(names, 3) if machine.get("busy") and arguments["state"] == "idle" else {}
    if arguments.get("end_sessions"):
        left = {}
    return {"changed": True, "chosen": list(names), "left": left, "counters": {}, "verdict": verdict}


def rollout(machine: dict[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    check, before, wanted = bool(arguments.get("_ansible_check_mode")), machine["current"], machine["current"]
    if arguments["state"] == "rolled_back":
        wanted = machine["previous"]
    if arguments["state"] == "retired":
        wanted = None
    if arguments["state"] == "taken_back":
        wanted = arguments["taken_up"].get("tiny")
    fails = bool(machine.get("fails")) and not check
    if not check and wanted:
        machine["current"] = wanted
    outcome = {
        "deployment": "tiny",
        "wanted": wanted,
        "before": before,
        "active": before if check or not wanted else wanted,
        "ok": before is not None and not fails,
        "message": "tiny: the engine is dead" if fails else "tiny is well" if before else "tiny is not here",
        "lines": [],
        "started": before is not None and arguments["state"] != "retired",
        "stopped": before is not None and arguments["state"] == "retired",
        "serving": not check and not fails and wanted is not None,
        "seconds": 1.0,
        "gate": "15 of 15",
        "capacity": {},
        "endpoint": {} if check else ENDPOINT,
    }
    # Of what was never taken up nothing is taken back.
    outcomes = [] if arguments["state"] == "taken_back" and wanted is None else [outcome]
    return {
        "changed": True,
        "outcomes": outcomes,
        "ansible_facts": {"serving_rollout": {"state": arguments["state"], "check": check, "outcomes": outcomes}},
        "taken_up": {},
        "lines": [],
        "failures": [] if outcome["ok"] else [outcome["message"]],
        "diff": [],
    }
