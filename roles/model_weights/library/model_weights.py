#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: one model revision on disk, proven by SHA-256."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_weights
short_description: Put one model revision on disk, proven by SHA-256
description:
  - Fetches what is missing or damaged, proves every file against the manifest and publishes it all by one rename.
  - An interrupted run is continued; two runs on one revision wait for each other.
options:
  models_dir:
    description: Where models live.
    type: path
    required: true
  key:
    description: Name of the model; a directory level.
    type: str
    required: true
  revision:
    description: The pinned revision; a directory level.
    type: str
    required: true
  files:
    description: The manifest, a list of C(path), C(size_bytes) and C(sha256).
    type: list
    elements: dict
    required: true
  sources:
    description: Base URLs (http, https, file) or absolute directories, tried in order for each file.
    type: list
    elements: str
    required: true
  format:
    description: What the checkpoint must be, C(bf16) or the quant_method of its configuration.
    type: str
    required: true
  require_chat_template:
    description: Refuse a checkpoint without a chat template.
    type: bool
    default: true
  reserve_bytes:
    description: Free space that must remain on the disk.
    type: int
    default: 1073741824
  full_hash:
    description: Hash published files even when size and mtime are those of the last full hash.
    type: bool
    default: false
  read_timeout_seconds:
    description: How long a source may be silent.
    type: int
    default: 60
  lock_timeout_seconds:
    description: How long to wait for another run on the same revision.
    type: int
    default: 3600
author: [metalserve]
"""

EXAMPLES = r"""
- name: Fetch a model
  model_weights:
    models_dir: /var/lib/metalserve/models
    key: lab-moe-tiny
    revision: 0123456789abcdef
    files:
      - {path: config.json, size_bytes: 2125, sha256: "{{ config_sha256 }}"}
    format: bf16
    sources: ["http://mirror:8080/lab-moe-tiny/0123456789abcdef"]
"""

RETURN = r"""
path:
  description: The published directory.
  returned: success
  type: str
fetched_files:
  description: Files that came, or in check mode would come.
  returned: success
  type: list
fetched_bytes:
  description: Their size.
  returned: success
  type: int
healed_files:
  description: Published files that were damaged or missing and have been replaced.
  returned: success
  type: list
pending:
  description: In check mode, whether a real run has something to fetch or to write down.
  returned: success
  type: bool
message:
  description: What was done, in one sentence.
  returned: success
  type: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.weights import ensure_model
from ansible.module_utils.metalserve_remote.weights_content import Expectation
from ansible.module_utils.metalserve_remote.weights_download import Transfer
from ansible.module_utils.metalserve_remote.weights_manifest import WeightsError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "models_dir": {"type": "path", "required": True},
            "key": {"type": "str", "required": True},
            "revision": {"type": "str", "required": True},
            "files": {"type": "list", "elements": "dict", "required": True},
            "sources": {"type": "list", "elements": "str", "required": True},
            "format": {"type": "str", "required": True},
            "require_chat_template": {"type": "bool", "default": True},
            "reserve_bytes": {"type": "int", "default": 1 << 30},
            "full_hash": {"type": "bool", "default": False},
            "read_timeout_seconds": {"type": "int", "default": 60},
            "lock_timeout_seconds": {"type": "int", "default": 3600},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    try:
        outcome = ensure_model(
            Path(wanted["models_dir"]),
            wanted["key"],
            wanted["revision"],
            wanted["files"],
            wanted["sources"],
            dry_run=module.check_mode,
            full_hash=wanted["full_hash"],
            reserve_bytes=wanted["reserve_bytes"],
            lock_timeout_seconds=wanted["lock_timeout_seconds"],
            expected=Expectation(wanted["format"], wanted["require_chat_template"]),
            transfer=Transfer(read_timeout_seconds=wanted["read_timeout_seconds"], log=module.log),
        )
    except WeightsError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{wanted['key']}: {error}. Needed: a models directory that root can write.")
    module.exit_json(
        changed=outcome.changed,
        path=outcome.path,
        fetched_files=list(outcome.fetched_files),
        fetched_bytes=outcome.fetched_bytes,
        healed_files=list(outcome.healed_files),
        message=outcome.message,
        pending=bool(outcome.fetched_files) or outcome.record_stale,
    )


if __name__ == "__main__":
    main()
