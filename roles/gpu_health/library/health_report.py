#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: the documentation of the action plugin health_report, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: health_report
short_description: Judge the health of a GPU host
description:
  - Runs on the controller and never touches the host.
  - One row for each check that applies to this host. A failed check does not fail the task; a wrong expectation does.
options:
  facts:
    description: The fact C(gpu_host) of the host.
    type: dict
    required: true
  expected:
    description: What the host should have, as C(gpu_health_expected), with C(gpu_groups).
    type: dict
    default: {}
  probes:
    description: What the module C(cuda_probe) returned.
    type: list
    elements: dict
    default: []
  diag:
    description: C(status) and C(output) of C(dcgmi diag -r 1).
    type: dict
author: [metalserve]
"""

EXAMPLES = r"""
- name: Judge the host
  health_report:
    facts: "{{ ansible_facts['gpu_host'] }}"
    expected: {gpu_count: 8}
"""

RETURN = r"""
state:
  description: That of the worst row, ok, warn or fail.
  returned: success
  type: str
rows:
  description: "The checks: name, state, found, needed, change."
  returned: success
  type: list
  elements: dict
table:
  description: The checks as aligned lines, the worst first.
  returned: success
  type: list
  elements: str
refusals:
  description: Each failed check as one sentence in three parts.
  returned: success
  type: list
  elements: str
"""
