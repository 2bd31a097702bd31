#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: write a bundle. Runs on the controller, where the package is."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bundle
short_description: Write everything that hosts without a network need into one signed directory
description:
  - Engine images, weights, packages of the hosts' systems, and what the controller behind the gap needs.
  - What is there and right is kept, so that a run that was cut off goes on.
options:
  directory:
    description: Where the bundle goes.
    type: path
    required: true
  work_directory:
    description: What apt and pip keep between runs.
    type: path
    required: true
  signing_key:
    description: Key for C(ssh-keygen -Y sign); empty leaves the bundle unsigned.
    type: str
    default: ""
  deployments:
    description: The deployments of all hosts.
    type: list
    elements: dict
    required: true
  systems:
    description: Systems of the hosts, with C(name), C(sources) and C(packages).
    type: list
    elements: dict
    default: []
  requirements:
    description: Files of pip with hashes.
    type: list
    elements: path
    default: []
  collections:
    description: Ansible collections.
    type: list
    elements: str
    default: []
  insecure_registries:
    description: Registries that speak plain HTTP.
    type: list
    elements: str
    default: []
  tokens:
    description: Tokens for gated repositories, by host.
    type: dict
    default: {}
  mirrors:
    description: Mirrors by registry.
    type: dict
    default: {}
  image_keys:
    description: Public keys that must have signed an image, by pattern of its repository.
    type: dict
    default: {}
  models:
    description: Further entries of the catalogue of models.
    type: dict
    default: {}
  engines:
    description: Versions and images of engines.
    type: dict
    default: {}
  weight_sources:
    description: Where weights come from, by model.
    type: dict
    default: {}
  lock:
    description: The inventory's lock.
    type: dict
    required: true
author: [metalserve]
"""

EXAMPLES = r"""
- name: Write a bundle
  bundle:
    directory: /media/x
    work_directory: /media/x.work
    signing_key: ~/.ssh/id_ed25519
    deployments: [{name: qwen, engine: vllm, model: qwen3.6-35b-a3b-fp8, port: 8000}]
    lock: "{{ serving_lock }}"
"""

RETURN = r"""
files:
  description: How many files the bundle has.
  returned: success
  type: int
size_bytes:
  description: Their size.
  returned: success
  type: int
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from metalserve.bundle import MANIFEST
from metalserve.bundle_make import Recipe, make_bundle
from metalserve.deployments import Inputs
from metalserve.errors import MetalserveError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "directory": {"type": "path", "required": True},
            "work_directory": {"type": "path", "required": True},
            "signing_key": {"type": "str", "default": "", "no_log": False},
            "deployments": {"type": "list", "elements": "dict", "required": True},
            "systems": {"type": "list", "elements": "dict", "default": []},
            "requirements": {"type": "list", "elements": "path", "default": []},
            "collections": {"type": "list", "elements": "str", "default": []},
            "insecure_registries": {"type": "list", "elements": "str", "default": []},
            "tokens": {"type": "dict", "default": {}, "no_log": True},
            "mirrors": {"type": "dict", "default": {}},
            "image_keys": {"type": "dict", "default": {}, "no_log": False},
            "models": {"type": "dict", "default": {}},
            "engines": {"type": "dict", "default": {}},
            "weight_sources": {"type": "dict", "default": {}},
            "lock": {"type": "dict", "required": True},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    directory = Path(wanted["directory"])
    key = wanted["signing_key"]
    recipe = Recipe(
        work=Path(wanted["work_directory"]),
        systems=wanted["systems"],
        requirements=[Path(path) for path in wanted["requirements"]],
        collections=wanted["collections"],
        signing_key=Path(key).expanduser() if key else None,
        insecure_registries=wanted["insecure_registries"],
        mirrors=wanted["mirrors"],
        tokens=wanted["tokens"],
    )
    inputs = Inputs(
        models=wanted["models"],
        engines=wanted["engines"],
        lock=wanted["lock"],
        weight_sources=wanted["weight_sources"],
        models_dir="",
        image_keys=wanted["image_keys"],
    )
    if module.check_mode:
        module.exit_json(changed=True, msg=f"would bring {directory} to what the deployments need")
    try:
        before = (directory / MANIFEST).read_bytes() if (directory / MANIFEST).exists() else b""
        manifest = make_bundle(directory, wanted["deployments"], inputs, recipe)
        changed = (directory / MANIFEST).read_bytes() != before
    except (MetalserveError, OSError) as error:
        module.fail_json(msg=str(error))
    total = sum(entry["size_bytes"] for entry in manifest["files"])
    module.exit_json(changed=changed, files=len(manifest["files"]), size_bytes=total)


if __name__ == "__main__":
    main()
