#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: the lock file of an inventory. Runs on the controller, where the package is."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_lock
short_description: Resolve tags to digests and revisions to manifests, once
description:
  - Writes the variable C(serving_lock) to a file of the inventory. What is locked stays as it is unless I(refresh).
  - A model is locked again when another revision is asked for.
options:
  path:
    description: The lock file.
    type: path
    required: true
  images:
    description: Image references with a tag.
    type: list
    elements: str
    default: []
  models:
    description:
      - Models, a list of C(key), C(revision) and C(sources).
      - A LoRA adapter is one with C(adapter), and what its configuration says is locked with it.
    type: list
    elements: dict
    default: []
  revisions:
    description: Revision to serve, by model; where hubs differ, a mapping from the hub to its revision.
    type: dict
    default: {}
  unpinned:
    description: Models for which a branch of Hugging Face may be named; it is locked to the commit that it is now.
    type: list
    elements: str
    default: []
  manifests:
    description: Manifest file or URL, by model.
    type: dict
    default: {}
  insecure_registries:
    description: Registries that speak plain HTTP.
    type: list
    elements: str
    default: []
  mirrors:
    description: Mirrors by registry, asked before the registry itself.
    type: dict
    default: {}
  refresh:
    description: Resolve again what is already locked.
    type: bool
    default: false
author: [metalserve]
"""

EXAMPLES = r"""
- name: Lock an image
  serving_lock:
    path: inventories/prod/group_vars/all/lock.yml
    images: ["vllm/vllm-openai:v0.33.0"]
"""

RETURN = r"""
lock:
  description: The whole lock, as written.
  returned: success
  type: dict
"""

from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.basic import AnsibleModule

from metalserve.errors import MetalserveError
from metalserve.hubs import COMMIT
from metalserve.lock import lock_image, lock_model

HEADER = (
    "---\n# Written by playbooks/ops/lock.yml: exact bytes behind tags and revisions. Keep it in version control.\n"
)


def read(path: Path) -> dict[str, Any]:
    loaded = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    lock = (loaded or {}).get("serving_lock") or {}
    return {"images": dict(lock.get("images") or {}), "models": dict(lock.get("models") or {})}


def is_stale(locked: dict[str, Any], revision: Any, unpinned: bool) -> bool:
    """Whether another revision is asked for than the locked one; a branch stays at the commit that it was locked to."""
    if revision is None or (unpinned and not isinstance(revision, dict) and not COMMIT.fullmatch(str(revision))):
        return False
    if isinstance(revision, dict):
        known = locked.get("hub_revisions") or {}
        return any(known.get(hub) != str(wanted) for hub, wanted in revision.items())
    return bool(locked.get("revision") != str(revision))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "images": {"type": "list", "elements": "str", "default": []},
            "models": {"type": "list", "elements": "dict", "default": []},
            "revisions": {"type": "dict", "default": {}},
            "manifests": {"type": "dict", "default": {}},
            "unpinned": {"type": "list", "elements": "str", "default": []},
            "insecure_registries": {"type": "list", "elements": "str", "default": []},
            "mirrors": {"type": "dict", "default": {}},
            "refresh": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    path = Path(wanted["path"])
    try:
        lock = read(path)
        for reference in wanted["images"]:
            if wanted["refresh"] or reference not in lock["images"]:
                lock["images"][reference] = lock_image(reference, wanted["insecure_registries"], wanted["mirrors"])
        for request in wanted["models"]:
            key = request["key"]
            revision = wanted["revisions"].get(key)
            if request.get("adapter"):
                # Declared in a deployment, with its revision beside its name.
                revision = revision or request["revision"]
                if "adapter" not in lock["models"].get(key, {"adapter": None}):
                    del lock["models"][key]
            unpinned = key in wanted["unpinned"]
            if wanted["refresh"] or key not in lock["models"] or is_stale(lock["models"][key], revision, unpinned):
                lock["models"][key] = lock_model(request, revision, wanted["manifests"].get(key), unpinned=unpinned)
        text = HEADER + yaml.safe_dump({"serving_lock": lock}, sort_keys=True, allow_unicode=True, width=120)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if text != before and not module.check_mode:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.new")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
    except (MetalserveError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=text != before, lock=lock, diff={"before": before, "after": text})


if __name__ == "__main__":
    main()
