#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: the documentation of the action plugin fleet_questions, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_questions
short_description: Find the hosts that have to be asked more than their facts tell
description:
  - Runs on the controller and touches no host; the facts of the role gpu_facts must be there. A host without
    facts is asked nothing.
options:
  hosts:
    description: The hosts to look through.
    type: list
    elements: str
    required: true
author: [metalserve]
"""

EXAMPLES = r"""
- name: Find the hosts whose facts leave something open
  fleet_questions:
    hosts: "{{ ansible_play_hosts_all }}"
  run_once: true
  register: open
"""

RETURN = r"""
hosts:
  description: Those of which anything is to be asked.
  returned: success
  type: list
  elements: str
docker:
  description: Those without a running Docker, whose package sources say which one they offer.
  returned: success
  type: list
  elements: str
driver:
  description: Those whose package sources and firmware decide whether the driver's module can be built and signed.
  returned: success
  type: list
  elements: str
"""
