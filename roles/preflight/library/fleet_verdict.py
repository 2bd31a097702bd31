#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: the documentation of the action plugin fleet_verdict, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_verdict
short_description: Judge all hosts of a play and show one table
description:
  - Runs on the controller and touches no host; the facts of the role gpu_facts must be there.
  - >-
    Judges each host as the filter C(compatibility_verdict) does, prints a table host x check with every remedy below
    it, and fails once, at the end, when a host is refused.
  - A host without facts is a refused host.
options:
  hosts:
    description: The hosts to judge.
    type: list
    elements: str
    required: true
  variables:
    description: The names of the variables of each host on which its verdict depends, by what they mean to it.
    type: dict
    required: true
  json:
    description: A file on the controller for all verdicts as JSON.
    type: path
  junit:
    description: A file on the controller for all verdicts as JUnit XML.
    type: path
author: [metalserve]
"""

EXAMPLES = r"""
- name: Judge the hosts
  fleet_verdict:
    hosts: "{{ ansible_play_hosts_all }}"
    variables: "{{ __preflight_variables }}"
    json: /tmp/preflight.json
  run_once: true
"""

RETURN = r"""
msg:
  description: How many hosts got which verdict, or who is refused.
  returned: always
  type: str
known:
  description: The hosts that have releases already.
  returned: success
  type: list
  elements: str
releases:
  description: By host, C(deployment) and C(release_id) of what would be served.
  returned: success
  type: dict
"""
