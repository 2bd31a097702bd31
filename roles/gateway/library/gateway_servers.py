#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: take servers out of a gateway, put them back, and watch them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gateway_servers
short_description: Take engines out of a gateway, put them back, and watch what they serve
description:
  - Talks to the running HAProxy over its runtime socket. The gateway remembers it over reloads and restarts.
  - Remembers beside it which servers a rollout has taken out. What a person has drained stays out until a person puts
    it back.
options:
  state:
    description:
      - V(looked) tells what is there.
      - V(drained) gives the servers nothing new, and does not wait.
      - V(idle) waits until they work on nothing.
      - V(healthy) waits until the gateway finds them well, drained as they are.
      - V(undrained) puts them back and waits until they are up.
      - V(watched) judges what they have served since O(before).
    type: str
    choices: [looked, drained, idle, healthy, undrained, watched]
    required: true
  servers:
    description: Names of servers, C(host:deployment). Those that this gateway does not have are passed over.
    type: list
    elements: str
    default: []
  host:
    description: All servers of this host as well. It must have some, or O(deployment).
    type: str
  deployment:
    description: With O(host), only this one.
    type: str
  by:
    description: Who drains. V(rollout) puts back only what a rollout has drained.
    type: str
    choices: [operator, rollout]
    default: operator
  keep:
    description: Servers of a pool that must be up without these, by pool.
    type: dict
    default: {}
  seconds:
    description: How long to wait, or to watch.
    type: float
    default: 0
  end_sessions:
    description: With O(state=idle), end what is left after that time.
    type: bool
    default: false
  before:
    description: RV(counters) of the moment from which is watched.
    type: dict
  limits:
    description: C(errors_percent), C(latency_factor) and C(min_requests), see RV(verdict).
    type: dict
    default: {errors_percent: 1, latency_factor: 0, min_requests: 20}
  socket:
    description: HAProxy's runtime socket.
    type: path
    default: /run/haproxy/admin.sock
  directory:
    description: Where it is kept what a rollout has drained.
    type: path
    default: /var/lib/metalserve/rollout
  keep_states:
    description: The program that has HAProxy's states kept over a restart.
    type: path
    default: /etc/haproxy/metalserve/keep-states
  lease:
    description: C(holder) and C(seconds) of the rollout's lock, which is renewed. Refused when another rollout has it
      by now.
    type: dict
  absent_ok:
    description: Whether a gateway on which nothing listens has no servers, and is no failure.
    type: bool
    default: false
author: [metalserve]
"""

EXAMPLES = r"""
- name: Take a host out
  gateway_servers:
    state: drained
    host: gpu-1

- name: Wait for its requests to end
  gateway_servers:
    state: idle
    host: gpu-1
    seconds: 600
"""

RETURN = r"""
present:
  description: Whether HAProxy listens.
  returned: always
  type: bool
servers:
  description: C(pool), C(name), C(status), C(up), C(running), C(drained_by) of each server.
  returned: O(state=looked)
  type: list
  elements: dict
chosen:
  description: The names that this gateway has.
  returned: success
  type: list
  elements: str
left:
  description: What the servers still work on, by name.
  returned: O(state=idle)
  type: dict
counters:
  description: HAProxy's counters, for O(before).
  returned: O(state=undrained)
  type: dict
verdict:
  description: C(ok), C(requests), C(errors), C(first_byte_ms), C(others_first_byte_ms), C(text).
  returned: O(state=watched)
  type: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.gateway_servers import Gateway, GatewayRefusalError
from ansible.module_utils.metalserve_remote.haproxy import Haproxy, HaproxyError
from ansible.module_utils.metalserve_remote.rollout_lock import RolloutLockedError, hold

SLICE_SECONDS = 60.0
STATES = ("looked", "drained", "idle", "healthy", "undrained", "watched")


def chosen_servers(module: AnsibleModule, servers: list) -> list:
    """The names that were asked for and are here; a host without any is refused."""
    wanted = module.params
    names = {server["name"] for server in servers}
    found = names & set(wanted["servers"])
    if wanted["host"]:
        mine = {
            name
            for name in names
            if name.partition(":")[0] == wanted["host"] and wanted["deployment"] in (None, "", name.partition(":")[2])
        }
        if not mine:
            which = f" for the deployment {wanted['deployment']}" if wanted["deployment"] else ""
            module.fail_json(
                msg=f"This gateway has no server of {wanted['host']}{which}. It has {', '.join(sorted(names))}. "
                "Needed: a host of the inventory that playbooks/gateway.yml has put there. Change: gateway_drain_host."
            )
        found |= mine
    return sorted(found)


def renew(module: AnsibleModule) -> None:
    lease = module.params["lease"]
    if lease and not module.check_mode:
        hold(Path(module.params["directory"]), lease["holder"], float(lease["seconds"]))


def wait_idle(module: AnsibleModule, gateway: Gateway, names: list) -> dict:
    """A long wait renews the lock."""
    left_seconds = module.params["seconds"]
    while True:
        slice_seconds = min(SLICE_SECONDS, left_seconds)
        left = gateway.wait_idle(names, slice_seconds)
        left_seconds -= slice_seconds
        if not left or left_seconds <= 0:
            return left
        renew(module)


def act(module: AnsibleModule, gateway: Gateway) -> dict:
    wanted, check = module.params, module.check_mode
    servers = gateway.look()
    names = chosen_servers(module, servers)
    answer = {"changed": False, "present": True, "chosen": names}
    if wanted["state"] == "looked":
        return {**answer, "servers": servers}
    if not names or (check and wanted["state"] not in ("drained", "undrained")):
        return {**answer, "left": {}}
    if wanted["state"] == "drained":
        return {**answer, "changed": gateway.drain(names, wanted["by"], wanted["keep"], dry_run=check)}
    if wanted["state"] == "undrained":
        changed = gateway.undrain(names, wanted["by"], wanted["seconds"], dry_run=check)
        return {**answer, "changed": changed, "counters": gateway.counters(names)}
    if wanted["state"] == "healthy":
        gateway.wait_healthy(names, wanted["seconds"])
        return answer
    if wanted["state"] == "watched":
        return {**answer, "verdict": gateway.watch(names, wanted["before"], wanted["seconds"], wanted["limits"])}
    left = wait_idle(module, gateway, names)
    if left and wanted["end_sessions"]:
        gateway.end_sessions(names)
        return {**answer, "changed": True, "left": {}}
    return {**answer, "left": left}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": list(STATES), "required": True},
            "servers": {"type": "list", "elements": "str", "default": []},
            "host": {"type": "str"},
            "deployment": {"type": "str"},
            "by": {"type": "str", "choices": ["operator", "rollout"], "default": "operator"},
            "keep": {"type": "dict", "default": {}},
            "seconds": {"type": "float", "default": 0},
            "end_sessions": {"type": "bool", "default": False},
            "before": {"type": "dict"},
            "limits": {"type": "dict", "default": {"errors_percent": 1, "latency_factor": 0, "min_requests": 20}},
            "socket": {"type": "path", "default": "/run/haproxy/admin.sock"},
            "directory": {"type": "path", "default": "/var/lib/metalserve/rollout"},
            "keep_states": {"type": "path", "default": "/etc/haproxy/metalserve/keep-states"},
            "lease": {"type": "dict"},
            "absent_ok": {"type": "bool", "default": False},
        },
        required_if=[("state", "watched", ("before",))],
        supports_check_mode=True,
    )
    socket = Path(module.params["socket"])
    if module.params["absent_ok"] and not socket.exists():
        module.exit_json(changed=False, present=False, servers=[], chosen=[])
    keep_states = Path(module.params["keep_states"])
    gateway = Gateway(Haproxy(socket), Path(module.params["directory"]), keep_states if keep_states.exists() else None)
    try:
        renew(module)
        module.exit_json(**act(module, gateway))
    except (GatewayRefusalError, HaproxyError, RolloutLockedError, OSError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
