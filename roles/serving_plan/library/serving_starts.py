#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: what a host keeps of its deployments' earlier starts."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_starts
short_description: Read what earlier starts of deployments left on the host
description:
  - Reads which release of each deployment is current, and what its engine and the one before measured. Changes nothing.
options:
  root:
    description: Where deployments keep their releases.
    type: path
    default: /etc/metalserve
  deployments:
    description: Names of the deployments.
    type: list
    elements: str
    required: true
author: [metalserve]
"""

EXAMPLES = r"""
- name: Read what earlier starts measured
  serving_starts:
    deployments: [qwen]
"""

RETURN = r"""
deployments:
  description: By name, C(release_id) of the current release, C(learned_from) of its plan, and the measured C(starts).
  returned: success
  type: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.starts import kept_starts


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/etc/metalserve"},
            "deployments": {"type": "list", "elements": "str", "required": True},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, deployments=kept_starts(Path(module.params["root"]), module.params["deployments"]))


if __name__ == "__main__":
    main()
