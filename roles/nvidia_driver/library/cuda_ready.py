#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: wait until CUDA can be initialised on the host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cuda_ready
short_description: Wait until CUDA can be initialised
description:
  - Calls C(cuInit) of the host's C(libcuda.so.1) in a process of its own. On hosts with NVSwitches it answers 802 until
    the fabric is ready, on all generations.
  - Waits only for what passes by itself; a library that does not fit the loaded driver fails at once.
options:
  devices:
    description: How many GPUs CUDA must know.
    type: int
    default: 1
  timeout_seconds:
    description: How long the fabric may take.
    type: int
    default: 300
author: [metalserve]
"""

EXAMPLES = r"""
- name: Wait until CUDA is ready
  cuda_ready:
    devices: 8
"""

RETURN = r"""
seconds:
  description: How long the wait took.
  returned: always
  type: float
code:
  description: The last CUresult, null where the library could not be called.
  returned: always
  type: int
devices:
  description: GPUs that CUDA knows.
  returned: always
  type: int
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.cuda_ready import wait_for_cuda


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "devices": {"type": "int", "default": 1},
            "timeout_seconds": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )
    outcome = wait_for_cuda(module.params["devices"], module.params["timeout_seconds"])
    result = {"seconds": round(outcome.seconds, 1), "code": outcome.code, "devices": outcome.devices}
    if outcome.ready:
        module.exit_json(changed=False, **result)
    module.fail_json(
        msg=f"CUDA cannot be used on this host after {outcome.seconds:.0f} s: {outcome.message}. "
        f"Needed: cuInit to succeed and {module.params['devices']} GPUs. "
        "Change: what the journal of nvidia-fabricmanager and the kernel's messages name; "
        "nvidia_driver_ready_timeout_seconds if it only took longer.",
        **result,
    )


if __name__ == "__main__":
    main()
