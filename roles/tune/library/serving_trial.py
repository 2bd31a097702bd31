#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: put releases on trial on a host, one after another, and bring the former one back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_trial
short_description: Put releases of a deployment on trial, measure them, and bring the former one back
description:
  - Writes down which release was there before anything changes. A trial that was killed is ended by the next one, and
    by a rollout.
  - A release on trial is proven by the gate and never counts as good, so nothing goes back to it.
  - A candidate that fails is an answer and no failure of the module. The module fails when the host cannot go on.
options:
  state:
    description:
      - V(healed) ends a trial that was killed. V(begun) begins one with the release that the inventory asks for.
      - V(tried) makes O(release) current, proves and measures it. V(ended) brings the former release back.
    type: str
    choices: [healed, begun, tried, ended]
    required: true
  deployment:
    description: Which deployment of the host.
    type: str
    required: true
  release:
    description: C(release_id) and C(files), for V(begun) and V(tried).
    type: dict
  workload:
    description: What is asked, a name of the benchmark's workloads. For V(tried), and for V(ended) with O(measure).
    type: str
  measure:
    description: Whether V(ended) measures the former release once more.
    type: bool
    default: false
  runs:
    description: Runs that count.
    type: int
    default: 3
  prompts:
    description: Requests of a run, instead of the workload's own.
    type: int
  concurrency:
    description: Requests at a time, instead of the workload's own.
    type: int
  force:
    description: Whether to go on while others use the deployment.
    type: bool
    default: false
  gate:
    description: How the gate is asked, as for M(serving_rollout).
    type: dict
    default: {}
  ready_timeout_seconds:
    description: How long an engine may take whose unit lives.
    type: float
    default: 1800
  slowest_read_bytes_per_second:
    description: The time to read the weights at this speed is added to O(ready_timeout_seconds).
    type: int
    default: 200000000
  holder:
    description: Who this is, for another run that finds the lock taken.
    type: str
    required: true
  lock_timeout_seconds:
    description: How long to wait for another run on this host.
    type: float
    default: 60
  root:
    description: Where deployments keep their releases.
    type: path
    default: /etc/metalserve
author: [metalserve]
"""

EXAMPLES = r"""
- name: End a trial that was killed
  serving_trial:
    state: healed
    deployment: qwen
    holder: ops@controller
"""

RETURN = r"""
healed:
  description: What was found of a trial that was killed.
  returned: O(state=healed)
  type: str
ok:
  description: Whether the release was proven and measured.
  returned: O(state=tried), O(state=ended)
  type: bool
stage:
  description: Where it ended otherwise, C(start), C(gate) or C(benchmark).
  returned: O(state=tried), O(state=ended)
  type: str
reason:
  description: Why.
  returned: O(state=tried), O(state=ended)
  type: str
result:
  description: The result of the benchmark.
  returned: O(state=tried), O(state=ended)
  type: dict
release:
  description: The release that is current again.
  returned: O(state=ended)
  type: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.benchmark import BenchmarkError, Settings
from ansible.module_utils.metalserve_remote.host_lock import HostBusyError, host_lock
from ansible.module_utils.metalserve_remote.rollout_host import GateSettings, HostError, LocalHost
from ansible.module_utils.metalserve_remote.rollout_types import Wanted
from ansible.module_utils.metalserve_remote.trial import Trial, TrialError


def act(wanted: dict) -> dict:
    host = LocalHost(
        ready_timeout_seconds=wanted["ready_timeout_seconds"],
        slowest_read_bytes_per_second=wanted["slowest_read_bytes_per_second"],
        settings=GateSettings(**wanted["gate"]),
    )
    trial = Trial(Path(wanted["root"]), host, wanted["deployment"])
    settings = Settings(
        [wanted["workload"]], wanted["runs"], wanted["prompts"], wanted["concurrency"], force=wanted["force"]
    )
    if wanted["state"] == "healed":
        healed = trial.heal()
        return {"changed": healed is not None, "healed": healed or ""}
    if wanted["state"] == "begun":
        trial.begin(wanted["release"]["release_id"], force=wanted["force"])
        return {"changed": False}
    if wanted["state"] == "tried":
        release = Wanted(wanted["deployment"], wanted["release"]["release_id"], wanted["release"]["files"])
        return {"changed": True, **trial.attempt(release, settings)}
    return {"changed": True, **trial.end(settings if wanted["measure"] else None)}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["healed", "begun", "tried", "ended"], "required": True},
            "deployment": {"type": "str", "required": True},
            "release": {"type": "dict"},
            "workload": {"type": "str"},
            "measure": {"type": "bool", "default": False},
            "runs": {"type": "int", "default": 3},
            "prompts": {"type": "int"},
            "concurrency": {"type": "int"},
            "force": {"type": "bool", "default": False},
            "gate": {"type": "dict", "default": {}},
            "ready_timeout_seconds": {"type": "float", "default": 1800},
            "slowest_read_bytes_per_second": {"type": "int", "default": 200000000},
            "holder": {"type": "str", "required": True},
            "lock_timeout_seconds": {"type": "float", "default": 60},
            "root": {"type": "path", "default": "/etc/metalserve"},
        },
        required_if=[
            ("state", "begun", ("release",)),
            ("state", "tried", ("release", "workload")),
            ("measure", True, ("workload",)),
        ],
    )
    wanted = module.params
    try:
        with host_lock(Path(wanted["root"]), wanted["holder"], wanted["lock_timeout_seconds"]):
            answer = act(wanted)
    except (BenchmarkError, HostBusyError, HostError, TrialError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
