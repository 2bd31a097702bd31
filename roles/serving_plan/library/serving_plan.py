#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: the documentation of the action plugin serving_plan, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_plan
short_description: Turn deployments and host facts into releases, or refuse
description:
  - Runs on the controller. On a host with GPUs it reads what earlier starts measured; nothing is changed there.
  - Sizes every deployment, renders its engine's configuration and names its release by a hash of what runs.
options:
  deployments:
    description: What the host shall serve.
    type: list
    elements: dict
    required: true
  facts:
    description: The fact C(gpu_host) of the host.
    type: dict
    required: true
  models:
    description: Catalogue entries beside the built-in ones.
    type: dict
    default: {}
  engines:
    description: Version and image of an engine where they differ from the built-in pins.
    type: dict
    default: {}
  lock:
    description: Digests of images and manifests of models.
    type: dict
    default: {}
  weight_sources:
    description: Where weights come from, by model.
    type: dict
    default: {}
  image_keys:
    description: Public keys that must have signed an image, by pattern of its repository, or C(default).
    type: dict
    default: {}
  models_dir:
    description: Where models live on the host.
    type: path
    required: true
  root:
    description: Where deployments keep their releases on the host.
    type: path
    default: /etc/metalserve
  relearn:
    description:
      - Plan by what earlier starts measured even where that restarts an engine.
      - Without it a release that is still wanted stays, and a measurement counts when the release changes anyway.
    type: bool
    default: false
author: [metalserve]
"""

EXAMPLES = r"""
- name: Plan the deployments
  serving_plan:
    deployments: [{name: qwen, engine: vllm, model: qwen3.6-35b-a3b-fp8, port: 8000}]
    facts: "{{ ansible_facts['gpu_host'] }}"
    lock: "{{ serving_lock }}"
    models_dir: /var/lib/metalserve/models
"""

RETURN = r"""
ansible_facts:
  description: C(serving_plan_releases), one release a deployment.
  returned: success
  type: dict
"""
