#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: what belongs to the NVIDIA driver on a host, beside the facts."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_host
short_description: Packages, units, modules in use and initramfs of the NVIDIA driver
description:
  - Reads what the role nvidia_driver decides with, beside the facts of the module gpu_host. Changes nothing.
options:
  manager:
    description: Package manager of the host.
    type: str
    choices: [apt, dnf]
    default: apt
  newer_than:
    description: Configuration files that an initramfs must not be older than.
    type: list
    elements: path
    default: []
  services:
    description: Units, without their suffix, that hold the driver.
    type: list
    elements: str
    default: []
  root:
    description: Where the host's file system begins.
    type: path
    default: /
  device_root:
    description: Where C(/sys) begins. The default is O(root).
    type: path
author: [metalserve]
"""

EXAMPLES = r"""
- name: Look at the driver's packages
  driver_host:
    services: [nvidia-persistenced, nvidia-fabricmanager]
  register: driver
"""

RETURN = r"""
host:
  description:
    - packages (name, version, held), interrupted, runfile, engines, services, modules (name, users, references),
      initramfs_stale, next_kernel (kernel, version, signer), nvlink5, errors.
  returned: success
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.driver_host import read_driver_host


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "manager": {"type": "str", "choices": ["apt", "dnf"], "default": "apt"},
            "newer_than": {"type": "list", "elements": "path", "default": []},
            "services": {"type": "list", "elements": "str", "default": []},
            "root": {"type": "path", "default": "/"},
            "device_root": {"type": "path"},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    host = read_driver_host(
        wanted["root"],
        manager=wanted["manager"],
        newer_than=wanted["newer_than"],
        services=wanted["services"],
        device_root=wanted["device_root"],
    )
    if host["packages"] is None:
        reasons = "; ".join(entry["error"] for entry in host["errors"])
        module.fail_json(msg=f"The installed packages cannot be read: {reasons}", host=host)
    module.exit_json(changed=False, host=host)


if __name__ == "__main__":
    main()
