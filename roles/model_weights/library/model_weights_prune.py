#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: remove revisions of models that nobody needs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_weights_prune
short_description: Remove revisions of models that no release names
description:
  - Keeps what is wanted, what any release below the root names, and the newest others of each model.
  - Also removes what interrupted fetches of other revisions of the wanted models left.
options:
  models_dir:
    description: Where models live.
    type: path
    required: true
  wanted:
    description: What must stay, a list of C(key) and C(revision).
    type: list
    elements: dict
    required: true
  keep:
    description: How many further revisions of each model stay although no release names them.
    type: int
    required: true
  releases_root:
    description: Where releases lie.
    type: path
    default: /etc/metalserve
author: [metalserve]
"""

EXAMPLES = r"""
- name: Remove old weights
  model_weights_prune:
    models_dir: /var/lib/metalserve/models
    wanted: [{key: lab-moe-tiny, revision: 0123456789abcdef}]
    keep: 2
"""

RETURN = r"""
removed:
  description: What went, or in check mode would go, with its size.
  returned: success
  type: list
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.weights_manifest import WeightsError
from ansible.module_utils.metalserve_remote.weights_prune import prune


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "models_dir": {"type": "path", "required": True},
            "wanted": {"type": "list", "elements": "dict", "required": True},
            "keep": {"type": "int", "required": True},
            "releases_root": {"type": "path", "default": "/etc/metalserve"},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        removed = prune(
            Path(given["models_dir"]),
            {(str(item["key"]), str(item["revision"])) for item in given["wanted"]},
            given["keep"],
            releases_root=Path(given["releases_root"]),
            dry_run=module.check_mode,
        )
    except WeightsError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error}. Needed: a models directory that root can write. Change: see the mount.")
    module.exit_json(changed=bool(removed), removed=removed)


if __name__ == "__main__":
    main()
