#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: bring releases up, prove them, and go back by itself."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_rollout
short_description: Bring the releases of a host up, prove them by the gate, and go back when one is refused
description:
  - Writes the releases, makes them current, starts what does not run them, waits until the engines are ready, compares
    their capacity with the plan and runs the gate.
  - A release that has never passed the gate on this host and fails now is remembered as refused. The last good release
    becomes current again and is proven in turn. The module never fails for that; RV(outcomes) says it, so that the
    caller can show everything first.
  - Holds the lock of the host's deployments while it runs.
options:
  state:
    description:
      - V(rolled_out) brings up O(releases). V(rolled_back) makes another release of O(deployment) current.
        V(taken_back) does so for all of O(taken_up).
      - V(restarted) starts O(deployment) again. V(retired) stops it and keeps it from starting at boot.
    type: str
    choices: [rolled_out, rolled_back, taken_back, restarted, retired]
    default: rolled_out
  releases:
    description: Releases to run, each with C(deployment), C(release_id) and C(files).
    type: list
    elements: dict
    default: []
  deployment:
    description: The deployment, for V(rolled_back), V(restarted) and V(retired).
    type: str
  release_id:
    description: The release to go back to. Without it the last good one before the current one.
    type: str
  taken_up:
    description: With O(state=taken_back), the release that each deployment had before a rollout, by deployment.
    type: dict
    default: {}
  reason:
    description: Why a release is taken back, for the record.
    type: str
    default: rolled back by hand
  purge:
    description: With O(state=retired), whether to remove the releases of the deployment as well.
    type: bool
    default: false
  retry_refused:
    description: Whether to try a release again that was refused on this host.
    type: bool
    default: false
  keep:
    description: How many releases of a deployment stay on the host, beside what runs, was good, or was good before.
    type: int
    default: 5
  gate:
    description: How the gate is asked, C(checks), C(burst_size), C(hidden_routes), C(long_prompt_tokens),
      C(timeout_seconds), C(request_timeout_seconds), C(api_key_file).
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
- name: Bring up what the inventory asks for
  serving_rollout:
    releases: "{{ ansible_facts['serving_plan_releases'] }}"
    holder: ops@controller

- name: Go back to the last good release
  serving_rollout:
    state: rolled_back
    deployment: qwen
    holder: ops@controller
"""

RETURN = r"""
outcomes:
  description: For each deployment C(deployment), C(wanted), C(before), C(active), C(ok), C(message), C(lines),
    C(started), C(stopped), C(serving), C(seconds), C(gate), C(capacity), C(endpoint).
  returned: success
  type: list
  elements: dict
ansible_facts:
  description: C(serving_rollout) with C(outcomes), C(state), and C(check), whether it was a check run.
  returned: success
  type: dict
taken_up:
  description: By deployment, the release whose place another one has taken.
  returned: success
  type: dict
lines:
  description: What was done and seen, for printing.
  returned: success
  type: list
  elements: str
failures:
  description: The messages of the deployments that are not as wanted.
  returned: success
  type: list
  elements: str
"""

import contextlib
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.host_lock import HostBusyError, host_lock
from ansible.module_utils.metalserve_remote.retire import retire
from ansible.module_utils.metalserve_remote.rollout import Rollout
from ansible.module_utils.metalserve_remote.rollout_host import GateSettings, HostError, LocalHost
from ansible.module_utils.metalserve_remote.rollout_types import Wanted


def outcomes_of(module: AnsibleModule, root: Path) -> list:
    wanted = module.params
    host = LocalHost(
        ready_timeout_seconds=wanted["ready_timeout_seconds"],
        slowest_read_bytes_per_second=wanted["slowest_read_bytes_per_second"],
        settings=GateSettings(**wanted["gate"]),
    )
    rollout = Rollout(root, host, dry_run=module.check_mode, keep=wanted["keep"])
    if wanted["state"] == "rolled_out":
        items = [Wanted(each["deployment"], each["release_id"], each["files"]) for each in wanted["releases"]]
        return rollout.roll_out(items, retry_refused=wanted["retry_refused"])
    if wanted["state"] == "rolled_back":
        return [rollout.roll_back(wanted["deployment"], wanted["release_id"], wanted["reason"])]
    if wanted["state"] == "taken_back":
        return [
            rollout.roll_back(name, former, wanted["reason"]) for name, former in sorted(wanted["taken_up"].items())
        ]
    if wanted["state"] == "restarted":
        return [rollout.restart(wanted["deployment"])]
    return [retire(root, host, wanted["deployment"], purge=wanted["purge"], dry_run=module.check_mode)]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {
                "type": "str",
                "choices": ["rolled_out", "rolled_back", "taken_back", "restarted", "retired"],
                "default": "rolled_out",
            },
            "releases": {"type": "list", "elements": "dict", "default": []},
            "deployment": {"type": "str"},
            "release_id": {"type": "str"},
            "taken_up": {"type": "dict", "default": {}},
            "reason": {"type": "str", "default": "rolled back by hand"},
            "purge": {"type": "bool", "default": False},
            "retry_refused": {"type": "bool", "default": False},
            "keep": {"type": "int", "default": 5},
            "gate": {"type": "dict", "default": {}},
            "ready_timeout_seconds": {"type": "float", "default": 1800},
            "slowest_read_bytes_per_second": {"type": "int", "default": 200000000},
            "holder": {"type": "str", "required": True},
            "lock_timeout_seconds": {"type": "float", "default": 60},
            "root": {"type": "path", "default": "/etc/metalserve"},
        },
        required_if=[(("state"), state, ("deployment",)) for state in ("rolled_back", "restarted", "retired")],
        supports_check_mode=True,
    )
    root = Path(module.params["root"])
    # A check run writes nothing, not even a lock file on a bare host.
    lock = (
        contextlib.nullcontext()
        if module.check_mode
        else host_lock(root, module.params["holder"], module.params["lock_timeout_seconds"])
    )
    try:
        with lock:
            outcomes = outcomes_of(module, root)
    except (HostBusyError, HostError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=any(outcome.changed for outcome in outcomes),
        outcomes=[outcome.as_dict() for outcome in outcomes],
        ansible_facts={
            "serving_rollout": {
                "state": module.params["state"],
                "check": module.check_mode,
                "outcomes": [outcome.as_dict() for outcome in outcomes],
            }
        },
        taken_up={outcome.deployment: outcome.replaced for outcome in outcomes if outcome.replaced},
        lines=[line for outcome in outcomes for line in outcome.lines],
        failures=[outcome.message for outcome in outcomes if not outcome.ok],
        diff=[
            {
                "before_header": outcome.deployment,
                "after_header": outcome.deployment,
                "before": "",
                "after": "".join(f"{line}\n" for line in outcome.lines),
            }
            for outcome in outcomes
            if outcome.changed and outcome.lines
        ],
    )


if __name__ == "__main__":
    main()
