#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: engine images on a host, by digest."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_image
short_description: Have engine images on a host, by digest
description:
  - Takes an image from an OCI layout, a mirror or its registry. Docker proves every layer against the digest.
  - Derives an image with further Python packages from it, where such are named.
  - Removes images that nobody needs, with I(step=prune).
options:
  step:
    description: C(look) says what is missing; C(pull) brings it; C(prune) removes what no release names.
    type: str
    choices: [look, pull, prune]
    default: look
  images:
    description: A list of C(reference), C(digest), and where packages are added C(packages).
    type: list
    elements: dict
    required: true
  layouts:
    description: OCI layouts, asked first. Directories and tar files of the host, or URLs.
    type: list
    elements: str
    default: []
  mirrors:
    description: Mirrors by registry, asked before the registry itself.
    type: dict
    default: {}
  registry:
    description: Whether mirrors and registries may be asked.
    type: bool
    default: true
  port:
    description: Port of the loopback on which a layout is given to Docker.
    type: int
    default: 8749
  wheels:
    description: Directory of the host below which the wheels of each derived image lie, by its hash.
    type: path
    default: /var/lib/metalserve/wheels
  keep:
    description: With C(prune), how many further images of each repository stay although no release names them.
    type: int
    default: 1
  releases_root:
    description: Where releases lie.
    type: path
    default: /etc/metalserve
author: [metalserve]
"""

EXAMPLES = r"""
- name: Have an image
  engine_image:
    step: pull
    images: [{reference: "vllm/vllm-openai:v0.33.0", digest: "sha256:0123..."}]
    mirrors: {docker.io: [mirror.example.com]}
"""

RETURN = r"""
missing:
  description: Images that are not here, as they were given.
  returned: look
  type: list
underived:
  description: Images whose packages are not added here yet, as they were given, with their C(hash).
  returned: look
  type: list
names:
  description: The names of the images on this host.
  returned: pull
  type: list
sources:
  description: Where those came from that were not here.
  returned: pull
  type: list
removed:
  description: The names that went, or in check mode would go.
  returned: prune
  type: list
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.image_list import local_name, prune_images
from ansible.module_utils.metalserve_remote.image_names import DERIVED_REPOSITORY, derived_digest, repository_of
from ansible.module_utils.metalserve_remote.image_pull import (
    ImageError,
    Places,
    ensure_derived,
    ensure_image,
    remove_image,
)
from ansible.module_utils.metalserve_remote.readiness import run_command
from ansible.module_utils.metalserve_remote.release_names import UnreadableReleaseError


def pinned(image: dict[str, Any]) -> str:
    return f"{repository_of(image['reference'])}@{image['digest']}"


def derived(image: dict[str, Any]) -> str:
    return f"{DERIVED_REPOSITORY}@{derived_digest(image['digest'], image['packages'])}"


def look(wanted: dict[str, Any]) -> dict[str, Any]:
    missing = [image for image in wanted["images"] if local_name(pinned(image), run_command) is None]
    underived = [
        {**image, "hash": derived(image).rpartition(":")[2]}
        for image in wanted["images"]
        if image.get("packages") and local_name(derived(image), run_command) is None
    ]
    return {"changed": bool(missing or underived), "missing": missing, "underived": underived}


def pull(wanted: dict[str, Any]) -> dict[str, Any]:
    places = Places(wanted["layouts"], wanted["mirrors"], wanted["registry"], wanted["port"])
    names, sources = [], []
    for image in wanted["images"]:
        name, source = ensure_image(image["reference"], image["digest"], places)
        names.append(name)
        sources += [source] if source else []
        if image.get("packages"):
            wheels = Path(wanted["wheels"], derived(image).rpartition(":")[2])
            name, made = ensure_derived(name, image["digest"], image["packages"], wheels)
            names.append(name)
            sources += [str(wheels)] if made else []
    return {"changed": bool(sources), "names": names, "sources": sources}


def prune(wanted: dict[str, Any], *, dry_run: bool) -> dict[str, Any]:
    needed = [pinned(image) for image in wanted["images"]]
    needed += [derived(image) for image in wanted["images"] if image.get("packages")]
    root = Path(wanted["releases_root"])
    removed = prune_images(needed, wanted["keep"], run_command, remove_image, releases_root=root, dry_run=dry_run)
    return {"changed": bool(removed), "removed": removed}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "step": {"type": "str", "default": "look", "choices": ["look", "pull", "prune"]},
            "images": {"type": "list", "elements": "dict", "required": True},
            "layouts": {"type": "list", "elements": "str", "default": []},
            "mirrors": {"type": "dict", "default": {}},
            "registry": {"type": "bool", "default": True},
            "port": {"type": "int", "default": 8749},
            "wheels": {"type": "path", "default": "/var/lib/metalserve/wheels"},
            "keep": {"type": "int", "default": 1},
            "releases_root": {"type": "path", "default": "/etc/metalserve"},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    try:
        if wanted["step"] == "prune":
            result = prune(wanted, dry_run=module.check_mode)
        elif wanted["step"] == "pull" and not module.check_mode:
            result = pull(wanted)
        else:
            result = look(wanted)
    except (ImageError, UnreadableReleaseError) as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error}. Needed: a host on which root can run Docker and read its own files.")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
