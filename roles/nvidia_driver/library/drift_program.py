#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: put `metalserve-driver-drift` on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: drift_program
short_description: Put the program metalserve-driver-drift on a host
description:
  - Packs the code that compares a driver with what it is to be into one file that Python runs. The host
    needs Python 3.9 or newer and nothing else.
options:
  path:
    description: Where the program goes, mode 0755.
    type: path
    default: /usr/local/sbin/metalserve-driver-drift
author: [metalserve]
"""

EXAMPLES = r"""
- name: Install the program
  drift_program:
"""

RETURN = r"""
sha256:
  description: Digest of the program.
  returned: success
  type: str
"""

import hashlib
from pathlib import Path

from ansible.module_utils import metalserve_remote
from ansible.module_utils.basic import AnsibleModule

# Imported for what it brings: Ansible carries what a module imports, and this imports all that the program needs.
from ansible.module_utils.metalserve_remote import driver_drift  # noqa: F401
from ansible.module_utils.metalserve_remote.program_file import install_program, packed_program


def main() -> None:
    module = AnsibleModule(
        argument_spec={"path": {"type": "path", "default": "/usr/local/sbin/metalserve-driver-drift"}},
        supports_check_mode=True,
    )
    path = Path(module.params["path"])
    content = packed_program(metalserve_remote, "driver_drift")
    try:
        changed = install_program(path, content, check_mode=module.check_mode)
    except OSError as error:
        module.fail_json(msg=f"{path} cannot be written: {error.strerror}. Needed: its folder, writable.")
    module.exit_json(changed=changed, sha256=hashlib.sha256(content).hexdigest())


if __name__ == "__main__":
    main()
