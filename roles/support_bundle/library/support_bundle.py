#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: an archive with what somebody needs who is to help with a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: support_bundle
short_description: Write an archive with what somebody needs who is to help with a host
description:
  - Journals of the engines, unit files, releases, what nvidia-smi, Docker and the kernel say, and the gateway's
    configuration. Every text is redacted; key files and the gateway's hashes of keys are never taken.
  - The archive is a new file in a directory for temporary files, and belongs to root alone. In check mode none is left.
options:
  documents:
    description: Further documents by file name, such as facts.
    type: dict
    default: {}
  journal_lines:
    description: How many lines of each unit's journal are taken at most.
    type: int
    default: 2000
  journal_hours:
    description: None older than that.
    type: int
    default: 48
  item_bytes:
    description: The most that is taken of one item.
    type: int
    default: 2000000
  total_bytes:
    description: The most that is taken of all, before they are compressed.
    type: int
    default: 30000000
author: [metalserve]
"""

EXAMPLES = r"""
- name: Write it
  support_bundle:
    documents:
      facts.json: "{{ ansible_facts['gpu_host'] }}"
"""

RETURN = r"""
path:
  description: The archive; empty in check mode.
  returned: success
  type: str
contents:
  description: A line for each item, with its size and how many places were redacted, or why it is not there.
  returned: success
  type: list
  elements: str
"""

import os
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.support_bundle import Limits, make_bundle


def main() -> None:
    limits = {
        "journal_lines": {"type": "int", "default": 2000},
        "journal_hours": {"type": "int", "default": 48},
        "item_bytes": {"type": "int", "default": 2000000},
        "total_bytes": {"type": "int", "default": 30000000},
    }
    module = AnsibleModule(
        argument_spec={"documents": {"type": "dict", "default": {}}, **limits}, supports_check_mode=True
    )
    descriptor, name = tempfile.mkstemp(prefix="metalserve-support-", suffix=".tar.gz", dir="/var/tmp")
    os.close(descriptor)
    try:
        contents = make_bundle(
            Path(name), module.params["documents"], Limits(**{key: module.params[key] for key in limits})
        )
    except OSError as error:
        Path(name).unlink()
        module.fail_json(
            msg=f"{name} cannot be written: {error.strerror}. Needed: room in /var/tmp. Change: free some."
        )
    if module.check_mode:
        Path(name).unlink()
        module.exit_json(changed=False, path="", contents=contents)
    module.exit_json(changed=False, path=name, contents=contents)


if __name__ == "__main__":
    main()
