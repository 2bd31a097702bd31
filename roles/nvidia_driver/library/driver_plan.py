# Licensed under the Apache License, Version 2.0.
"""Documentation of the action plugin driver_plan, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_plan
short_description: Decide what has to happen to the NVIDIA driver of a host
description:
  - Decides from facts and from what else was seen on the host. Runs on the controller and touches nothing.
  - Fails with a sentence where something cannot work, and where the operator has to decide first.
options:
  facts:
    description: The fact C(gpu_host).
    type: dict
    required: true
  wishes:
    description:
      - >-
        version, flavour, source, repository_url, repository_key_fingerprints, package_revision, extra_packages,
        nvlsm_version, hold_kernel, end_of_life_allowed, reboot_allowed, reload_allowed; as the role's variables.
    type: dict
    required: true
  seen:
    description:
      - >-
        host (of the module driver_host), offers, simulated, key, key_origin, key_enrolled, headers_offered,
        unload_failed; what was not looked at is left out.
    type: dict
    required: true
author: [metalserve]
"""

EXAMPLES = r"""
- name: Decide
  driver_plan:
    facts: "{{ ansible_facts['gpu_host'] }}"
    wishes: {version: 580.178.04}
    seen:
      host: "{{ driver.host }}"
"""

RETURN = r"""
plan:
  description: gpu_count, step, packages, exact, install, hold, held.
  returned: success
  type: dict
"""
