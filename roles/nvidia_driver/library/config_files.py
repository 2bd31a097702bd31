#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: put small text files on a host, all in one visit."""

from __future__ import annotations

DOCUMENTATION = r"""
module: config_files
short_description: Put small text files on a host, all in one visit
description:
  - Does for several files what C(ansible.builtin.copy) does for one, with the directories above them (mode 0755).
    A copy is three visits to the host, and this role has eight files.
options:
  files:
    description: The files.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Where it goes.
        type: path
        required: true
      content:
        description: Its text.
        type: str
        required: true
      wanted:
        description: Whether it is this host's matter; if not, it is left as it is.
        type: bool
        default: true
author: [metalserve]
"""

EXAMPLES = r"""
- name: Keep nouveau away
  config_files:
    files:
      - path: /etc/modprobe.d/nouveau.conf
        content: |
          blacklist nouveau
"""

RETURN = r"""
paths:
  description: The files that were not as they should be.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.config_files import put_files

FILE = {
    "path": {"type": "path", "required": True},
    "content": {"type": "str", "required": True},
    "wanted": {"type": "bool", "default": True},
}


def main() -> None:
    module = AnsibleModule(
        argument_spec={"files": {"type": "list", "elements": "dict", "required": True, "options": FILE}},
        supports_check_mode=True,
    )
    files = {file["path"]: file["content"] for file in module.params["files"] if file["wanted"]}
    try:
        changes = put_files(files, check_mode=module.check_mode)
    except OSError as error:
        module.fail_json(msg=f"{error.filename} cannot be written: {error.strerror}. Needed: its folder, writable.")
    module.exit_json(
        changed=bool(changes),
        paths=[change.path for change in changes],
        diff=[
            {
                "before_header": change.path,
                "before": change.before or "",
                "after_header": change.path,
                "after": change.after,
            }
            for change in changes
        ],
    )


if __name__ == "__main__":
    main()
