#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: the documentation of the action plugin fleet_drift, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_drift
short_description: Show in one table what differs from the inventory
description:
  - Runs on the controller and touches no host; what the role drift and the role gateway have found must be there.
  - Prints a table host x aspect with every difference below it. A host without findings could not be looked at.
options:
  hosts:
    description: The hosts and gateways of the table.
    type: list
    elements: str
    required: true
  json:
    description: A file on the controller for everything as JSON.
    type: path
  fail:
    description: Whether to fail when anything differs or could not be looked at.
    type: bool
    default: false
author: [metalserve]
"""

EXAMPLES = r"""
- name: Show what differs
  fleet_drift:
    hosts: "{{ ansible_play_hosts_all }}"
    fail: true
  run_once: true
"""

RETURN = r"""
msg:
  description: How many hosts differ.
  returned: always
  type: str
"""
