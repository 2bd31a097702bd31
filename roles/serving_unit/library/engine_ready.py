#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: wait for an engine, or fail at once when its unit has died."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_ready
short_description: Wait until an engine is ready, failing at once when its unit dies
description:
  - Asks the engine's readiness route and watches its systemd unit. A unit that died, or that systemd has started again,
    fails the task with the last lines of its journal; nobody waits for a time-out then.
options:
  unit:
    description: The systemd unit.
    type: str
    required: true
  url:
    description: The readiness route; 200 means ready.
    type: str
    required: true
  timeout_seconds:
    description: How long a living unit may take.
    type: int
    default: 1800
  journal_lines:
    description: How many of the journal's last lines a failure shows.
    type: int
    default: 40
author: [metalserve]
"""

EXAMPLES = r"""
- name: Wait until the engine answers
  engine_ready:
    unit: vllm@tiny.service
    url: http://127.0.0.1:8000/health
"""

RETURN = r"""
seconds:
  description: How long the wait took.
  returned: always
  type: float
journal:
  description: Last lines of the unit's journal.
  returned: failure
  type: list
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.readiness import wait_until_ready


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "url": {"type": "str", "required": True},
            "timeout_seconds": {"type": "int", "default": 1800},
            "journal_lines": {"type": "int", "default": 40},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    if module.check_mode:
        module.exit_json(changed=False, seconds=0.0)
    outcome = wait_until_ready(
        wanted["unit"], wanted["url"], wanted["timeout_seconds"], journal_lines=wanted["journal_lines"]
    )
    if outcome.ready:
        module.exit_json(changed=False, seconds=round(outcome.seconds, 1))
    module.fail_json(
        msg="\n".join([f"{outcome.message}. The last lines of its journal:", *outcome.journal]),
        seconds=round(outcome.seconds, 1),
        journal=list(outcome.journal),
    )


if __name__ == "__main__":
    main()
