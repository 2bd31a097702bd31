#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: initialise CUDA in a container of each image, before and after a daemon-reload."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cuda_probe
short_description: Initialise CUDA in containers that get their GPUs as engines do
description:
  - Starts a container of each image with CDI devices, runs a small program in it that initialises CUDA and writes to
    each GPU, reloads systemd, and runs the program again in the same container. The container is always removed.
  - An image that has passed in this boot with the same driver and CDI specification is not probed again.
  - Beside running engines nothing is probed. What the answers mean is judged elsewhere; none of them is a failure here.
options:
  images:
    description: Images by digest. They are not pulled.
    type: list
    elements: str
    required: true
  devices:
    description: CDI devices of the container.
    type: list
    elements: str
    default: [nvidia.com/gpu=all]
  specs:
    description: Paths of the CDI specifications, which are part of what a probe proves.
    type: list
    elements: str
    default: []
  uuids:
    description: UUIDs of the GPUs that the containers should see. Empty where it is not known.
    type: list
    elements: str
    default: []
  busy:
    description: Deployments that hold the GPUs.
    type: list
    elements: str
    default: []
  proofs_path:
    description: Where passed probes are kept.
    type: path
    default: /var/lib/metalserve/cuda_proofs.json
  timeout_seconds:
    description: Time limit of each command. CUDA on eight GPUs takes some seconds to start.
    type: int
    default: 180
author: [metalserve]
"""

EXAMPLES = r"""
- name: Initialise CUDA in the engine's image
  cuda_probe:
    images: ["registry.example.com/vllm@sha256:0123..."]
"""

RETURN = r"""
probes:
  description: >-
    One entry for each image: image, steps (when, answer, error), proven (it has passed before), postponed (deployments
    that hold the GPUs). In check mode only images that need no probe are listed.
  returned: always
  type: list
  elements: dict
"""

import subprocess
from collections.abc import Sequence

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.container_probe import (
    has_passed,
    probe_container,
    proof_key,
    read_proofs,
    write_proofs,
)
from ansible.module_utils.metalserve_remote.image_list import local_name


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "images": {"type": "list", "elements": "str", "required": True},
            "devices": {"type": "list", "elements": "str", "default": ["nvidia.com/gpu=all"]},
            "specs": {"type": "list", "elements": "str", "default": []},
            "uuids": {"type": "list", "elements": "str", "default": []},
            "busy": {"type": "list", "elements": "str", "default": []},
            "proofs_path": {"type": "path", "default": "/var/lib/metalserve/cuda_proofs.json"},
            "timeout_seconds": {"type": "int", "default": 180},
        },
        supports_check_mode=True,
    )
    wanted = module.params

    def run(argv: Sequence[str], stdin: str | None) -> tuple[int, str, str]:
        try:
            process = subprocess.run(
                argv, input=stdin, capture_output=True, text=True, check=False, timeout=wanted["timeout_seconds"]
            )
        except FileNotFoundError:
            return 127, "", f"{argv[0]}: not installed"
        except subprocess.TimeoutExpired:
            return 124, "", f"no answer in {wanted['timeout_seconds']} s: {' '.join(argv[:2])}"
        return process.returncode, process.stdout, process.stderr

    proofs = read_proofs(wanted["proofs_path"])
    probes = []
    changed = False
    for image in wanted["images"]:
        key = proof_key(image, wanted["devices"], wanted["specs"])
        if proofs.get(image) == key:
            probes.append({"image": image, "steps": [], "proven": True, "postponed": []})
            continue
        if wanted["busy"]:
            probes.append({"image": image, "steps": [], "proven": False, "postponed": wanted["busy"]})
            continue
        changed = True
        if module.check_mode:
            continue
        steps = probe_container(local_name(image, lambda argv: run(argv, None)[1]) or image, wanted["devices"], run)
        probes.append({"image": image, "steps": [step.as_dict() for step in steps], "proven": False, "postponed": []})
        if has_passed(steps, wanted["uuids"]):
            proofs[image] = key
            write_proofs(wanted["proofs_path"], {name: proofs[name] for name in proofs if name in wanted["images"]})
    module.exit_json(changed=changed, probes=probes)


if __name__ == "__main__":
    main()
