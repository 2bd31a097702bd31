#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: what a host knows about its releases and deployments."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_state
short_description: Read what a host knows about its deployments; changes nothing
options:
  deployments:
    description: Names of the deployments to look at. An empty list is all that have releases here.
    type: list
    elements: str
    default: []
  diagnose:
    description: Whether to look at units, containers, endpoints and journals as well.
    type: bool
    default: false
  wanted:
    description: Release that the inventory asks for, by deployment. Tells which deployments are not in it, and which
      releases are refused here.
    type: dict
    default: {}
  root:
    description: Where deployments keep their releases.
    type: path
    default: /etc/metalserve
author: [metalserve]
"""

EXAMPLES = r"""
- name: List the releases
  serving_state:
  register: state
"""

RETURN = r"""
releases:
  description: One entry for each release.
  returned: success
  type: list
  elements: dict
table:
  description: The same as aligned lines.
  returned: success
  type: list
  elements: str
diagnosis:
  description: With O(diagnose), the lines about each deployment.
  returned: success
  type: list
  elements: str
unhealthy:
  description: With O(diagnose), the deployments that do not serve as they should.
  returned: success
  type: list
  elements: str
notices:
  description: With O(wanted), a sentence for each deployment that is not in it, and for each refused release.
  returned: success
  type: list
  elements: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.diagnose import diagnose
from ansible.module_utils.metalserve_remote.notices import notices
from ansible.module_utils.metalserve_remote.release_list import list_releases, release_table
from ansible.module_utils.metalserve_remote.releases import deployment_names


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "deployments": {"type": "list", "elements": "str", "default": []},
            "diagnose": {"type": "bool", "default": False},
            "wanted": {"type": "dict", "default": {}},
            "root": {"type": "path", "default": "/etc/metalserve"},
        },
        supports_check_mode=True,
    )
    asked, root = module.params, Path(module.params["root"])
    rows = list_releases(root, asked["deployments"])
    found = []
    if asked["diagnose"]:
        found = [diagnose(root, name) for name in asked["deployments"] or deployment_names(root)]
    module.exit_json(
        changed=False,
        releases=rows,
        table=release_table(rows),
        diagnosis=[line for each in found for line in each["lines"]],
        unhealthy=[each["deployment"] for each in found if not each["healthy"]],
        notices=notices(root, asked["wanted"]) if asked["wanted"] else [],
    )


if __name__ == "__main__":
    main()
