#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: hold or release the lock of a rollout. The action plugin of the same name says whose it is."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rollout_lock
short_description: Hold the lock of a rollout on a gateway or a host, or give it back
description:
  - A lease that names its holder. Holding it again renews it.
  - The action plugin of the same name adds who the holder is, and takes the lock over from a run on the same machine
    whose process is gone.
options:
  state:
    description: V(held) takes or renews it, V(released) gives it back when it is this run's.
    type: str
    choices: [held, released]
    required: true
  seconds:
    description: How long the lease lasts from now on.
    type: float
    default: 3600
  what:
    description: What the rollout does, for others.
    type: str
    default: ""
  take:
    description: Whether to take it from anybody.
    type: bool
    default: false
  directory:
    description: Where the lock lies.
    type: path
    default: /var/lib/metalserve/rollout
  holder:
    description: Who this is. Given by the action plugin.
    type: dict
    default: {}
  take_from:
    description: Token of a holder that is dead. Given by the action plugin.
    type: str
author: [metalserve]
"""

EXAMPLES = r"""
- name: Hold the lock
  rollout_lock:
    state: held
    seconds: 3600
    what: "2 of 3 hosts"
"""

RETURN = r"""
holder:
  description: When it was refused, the record of whoever holds it.
  returned: failure
  type: dict
replaced:
  description: The record of a holder whose lock was taken over, or whose lease was over.
  returned: O(state=held)
  type: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.rollout_lock import RolloutLockedError, describe, hold, release


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["held", "released"], "required": True},
            "seconds": {"type": "float", "default": 3600},
            "what": {"type": "str", "default": ""},
            "take": {"type": "bool", "default": False},
            "directory": {"type": "path", "default": "/var/lib/metalserve/rollout"},
            "holder": {"type": "dict", "default": {}},
            # A name of a run, no secret.
            "take_from": {"type": "str", "no_log": False},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    directory, holder = Path(wanted["directory"]), {**wanted["holder"], "what": wanted["what"]}
    if module.check_mode:
        module.exit_json(changed=False, replaced={})
    try:
        if wanted["state"] == "released":
            release(directory, holder["token"])
            module.exit_json(changed=False)
        replaced = hold(directory, holder, wanted["seconds"], take_from=wanted["take_from"], take=wanted["take"])
    except RolloutLockedError as error:
        module.fail_json(msg=str(error), holder=error.holder)
    except OSError as error:
        module.fail_json(
            msg=f"The lock in {directory} cannot be written: {error.strerror}. Needed: that folder, writable."
        )
    if replaced:
        module.warn(f"The lock was taken over from {describe(replaced)}.")
    module.exit_json(changed=False, replaced=replaced)


if __name__ == "__main__":
    main()
