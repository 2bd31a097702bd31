#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: the documentation of the action plugin serving_tune, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_tune
short_description: Find the sizes of a deployment that serve a workload best, by trying them on a host
description:
  - Runs on the controller. It plans each candidate, and has the host try it by M(serving_trial).
  - Whatever happens, the host gets its former release back. A run that was killed is mended by the next one.
  - In check mode it tells what a first round would try.
options:
  deployment:
    description: Which of O(inputs)C(.deployments).
    type: str
    required: true
  facts:
    description: The fact C(gpu_host) of the host.
    type: dict
    required: true
  inputs:
    description: The arguments of M(serving_plan) by name, without C(facts) and C(root).
    type: dict
    required: true
  objective:
    description: What is to be best.
    type: str
    choices: [first_token, between_tokens, throughput]
    required: true
  workload:
    description: What is asked, a name of the benchmark's workloads.
    type: str
    required: true
  space:
    description: Values to try by field. Empty means those around the present ones.
    type: dict
    default: {}
  candidates:
    description: How many are started beside the present release.
    type: int
    required: true
  minutes:
    description: How long candidates are begun.
    type: float
    required: true
  results_dir:
    description: On the controller, where the result is put as JSON and as a page. Empty means nowhere.
    type: str
    default: ""
  trial:
    description: Arguments for M(serving_trial) that all of its calls have.
    type: dict
    required: true
author: [metalserve]
"""

EXAMPLES = r"""
- name: Tune for throughput
  serving_tune:
    deployment: qwen
    facts: "{{ ansible_facts['gpu_host'] }}"
    inputs:
      deployments: "{{ serving_deployments }}"
      lock: "{{ serving_lock }}"
      models_dir: /var/lib/metalserve/models
    objective: throughput
    workload: chat_short
    candidates: 12
    minutes: 120
    trial: {holder: ops@controller}
"""

RETURN = r"""
lines:
  description: The table, the verdict, and the deployment to paste.
  returned: success
  type: list
  elements: str
files:
  description: What was written on the controller.
  returned: success
  type: list
  elements: str
broken:
  description: Why it was broken off. Empty when it went to its end. The host has its former release again either way.
  returned: success
  type: str
"""
