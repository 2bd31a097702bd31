#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: what a host has that differs from what it is to have."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_drift
short_description: Tell what a host has that differs from what it is to have
description:
  - Reads releases, units, driver, packages with their holds, and weights. Changes nothing and hashes nothing.
options:
  deployments:
    description: By name C(release_id) and C(engine) of what the host is to run.
    type: dict
    default: {}
  models:
    description: C(key), C(revision) and C(files) of the weights that it is to have.
    type: list
    elements: dict
    default: []
  models_dir:
    description: Where models live.
    type: path
    required: true
  driver_version:
    description: The version of the driver. Without it the driver is not looked at.
    type: str
  root:
    description: Where deployments keep their releases.
    type: path
    default: /etc/metalserve
author: [metalserve]
"""

EXAMPLES = r"""
- name: Tell what differs
  host_drift:
    deployments: {qwen: {release_id: 8bbf2423c000, engine: vllm}}
    models_dir: /var/lib/metalserve/models
"""

RETURN = r"""
aspects:
  description: C(release), C(units), C(driver), C(weights), C(strays), each with sentences; null is not looked at.
  returned: success
  type: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.host_drift import (
    driver_drift,
    release_drift,
    strays,
    unit_drift,
    weights_drift,
)
from ansible.module_utils.metalserve_remote.rollout_host import HostError, LocalHost, starts_at_boot


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "deployments": {"type": "dict", "default": {}},
            "models": {"type": "list", "elements": "dict", "default": []},
            "models_dir": {"type": "path", "required": True},
            "driver_version": {"type": "str"},
            "root": {"type": "path", "default": "/etc/metalserve"},
        },
        supports_check_mode=True,
    )
    asked, host = module.params, LocalHost(ready_timeout_seconds=0)
    root, wanted, version = Path(asked["root"]), asked["deployments"], asked["driver_version"]
    try:
        aspects = {
            "release": release_drift(root, wanted, host),
            "units": unit_drift(wanted, host, starts_at_boot),
            "driver": driver_drift(version) if version else None,
            "weights": weights_drift(Path(asked["models_dir"]), asked["models"]),
            "strays": strays(root, wanted, host),
        }
    except (HostError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, aspects=aspects)


if __name__ == "__main__":
    main()
