#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: put `metalserve-host` on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_program
short_description: Put the program metalserve-host on a host
description:
  - Packs the code that the modules of this project carry into one file that Python runs. The host needs Python 3.9 or
    newer and nothing else.
options:
  path:
    description: Where the program goes, mode 0755.
    type: path
    default: /usr/local/bin/metalserve-host
author: [metalserve]
"""

EXAMPLES = r"""
- name: Install the program
  host_program:
"""

RETURN = r"""
sha256:
  description: Digest of the program.
  returned: success
  type: str
"""

from ansible.module_utils import metalserve_remote
from ansible.module_utils.basic import AnsibleModule

# Imported for what it brings: Ansible carries what a module imports, and this imports all that the program needs.
from ansible.module_utils.metalserve_remote import host_command  # noqa: F401
from ansible.module_utils.metalserve_remote.program_file import place_program


def main() -> None:
    module = AnsibleModule(
        argument_spec={"path": {"type": "path", "default": "/usr/local/bin/metalserve-host"}},
        supports_check_mode=True,
    )
    place_program(module, metalserve_remote, "host_command")


if __name__ == "__main__":
    main()
