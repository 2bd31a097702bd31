#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: one model revision on disk, proven by SHA-256, fetched by a worker under systemd."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_weights
short_description: Put one model revision on disk, proven by SHA-256
description:
  - Fetches what is missing or damaged, proves every file against the manifest and publishes it all by one rename.
  - The fetch is a transient unit of systemd, which needs neither the connection nor the controller.
  - An action plugin of the same name turns I(step=fetch) into C(start) and C(status), and shows the progress.
options:
  step:
    description:
      - C(look) says what is missing and whether it fits, and changes nothing.
      - C(fetch) starts a fetch, or joins the one that runs, and watches it to its end.
      - C(install) puts the worker's program in place.
      - C(share) gives finished files to other hosts while they fetch.
      - C(start) and C(status) are what C(fetch) is made of.
    type: str
    choices: [look, fetch, share, install, start, status]
    default: look
  models_dir:
    description: Where models live.
    type: path
    required: true
  key:
    description: Name of the model; a directory level.
    type: str
  revision:
    description: The pinned revision; a directory level.
    type: str
  files:
    description: The manifest, a list of C(path), C(size_bytes) and C(sha256).
    type: list
    elements: dict
  sources:
    description: Base URLs (http, https, file) or absolute directories, tried in order for each file.
    type: list
    elements: str
  format:
    description: What the checkpoint must be, C(bf16) or the quant_method of its configuration.
    type: str
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
  connections:
    description: Files that are fetched at once.
    type: int
    default: 4
  rate_limit_bytes_per_second:
    description: Limit of all transfers of this model on this host together; 0 is none.
    type: int
    default: 0
  attempts:
    description: Tries of each source for each file that bring nothing.
    type: int
    default: 5
  patience_seconds:
    description: How long a source may make one file wait with Retry-After.
    type: int
    default: 3600
  read_timeout_seconds:
    description: How long a source may be silent.
    type: int
    default: 60
  tokens_path:
    description: A file of mode 0600 with tokens by host, for gated repositories.
    type: path
    default: /etc/metalserve/model_weights_tokens.json
  share_port:
    description: Where hosts give files to each other.
    type: int
    default: 8747
  share_idle_seconds:
    description: After how long without a request the sharing ends.
    type: int
    default: 900
  announced:
    description: With C(share), what this host is about to fetch, a list of C(key) and C(revision).
    type: list
    elements: dict
    default: []
  peers:
    description: Names of the hosts of the play, for C(fetch) and C(share). Read on the controller.
    type: list
    elements: str
  hosts_at_once:
    description: Hosts of a site that ask a source at once, for C(fetch). Read on the controller.
    type: int
  progress_seconds:
    description: How often C(fetch) says how far it is; 0 says nothing. Read on the controller.
    type: int
  timeout_seconds:
    description: How long C(fetch) watches. Read on the controller.
    type: int
  addresses:
    description: Who may ask, for C(share). Given by the action plugin.
    type: list
    elements: str
    default: []
  seed:
    description: Whether this host asks the sources first. Given by the action plugin.
    type: bool
    default: true
  peer_urls:
    description: The other hosts to ask. Given by the action plugin.
    type: list
    elements: str
    default: []
  worker:
    description: The worker's program, in base64. Given by the action plugin.
    type: str
author: [metalserve]
"""

EXAMPLES = r"""
- name: Fetch a model
  model_weights:
    step: fetch
    models_dir: /var/lib/metalserve/models
    key: lab-moe-tiny
    revision: 0123456789abcdef
    files:
      - {path: config.json, size_bytes: 2125, sha256: "{{ config_sha256 }}"}
    format: bf16
    sources: ["http://mirror:8080/lab-moe-tiny/0123456789abcdef"]
"""

RETURN = r"""
key:
  description: Name of the model.
  returned: look
  type: str
model:
  description: Its C(key) and C(revision).
  returned: look
  type: dict
path:
  description: The published directory.
  returned: look, fetch
  type: str
fetched_files:
  description: Files that came, or would come.
  returned: look, fetch
  type: list
fetched_bytes:
  description: Their size.
  returned: look
  type: int
healed_files:
  description: Published files that were damaged or missing and have been replaced.
  returned: look, fetch
  type: list
pending:
  description: Whether there is something to fetch or to write down.
  returned: look
  type: bool
message:
  description: What was done, in one sentence.
  returned: success
  type: str
job:
  description: State of the fetch, with bytes, rate and time left.
  returned: status, fetch
  type: dict
"""

import base64
import subprocess
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.weights import ensure_model
from ansible.module_utils.metalserve_remote.weights_content import Expectation
from ansible.module_utils.metalserve_remote.weights_job import (
    WORKER_PATH,
    announce,
    install_worker,
    job_state,
    last_words,
    launch_unit,
    start_job,
    stop_unit,
    unit_active,
    unit_name,
)
from ansible.module_utils.metalserve_remote.weights_manifest import WeightsError
from ansible.module_utils.metalserve_remote.weights_prune import removable_sentence
from ansible.module_utils.metalserve_remote.weights_share import UNIT, config_path, write_config

REQUEST = (
    "models_dir",
    "key",
    "revision",
    "files",
    "sources",
    "format",
    "require_chat_template",
    "reserve_bytes",
    "full_hash",
    "connections",
    "rate_limit_bytes_per_second",
    "attempts",
    "patience_seconds",
    "read_timeout_seconds",
    "tokens_path",
    "seed",
)


def look(wanted: dict[str, Any]) -> dict[str, Any]:
    models_dir = Path(wanted["models_dir"])
    outcome = ensure_model(
        models_dir,
        wanted["key"],
        wanted["revision"],
        wanted["files"],
        wanted["sources"],
        dry_run=True,
        full_hash=wanted["full_hash"],
        expected=Expectation(wanted["format"], wanted["require_chat_template"]),
        reserve_bytes=wanted["reserve_bytes"],
        removable=lambda: removable_sentence(models_dir, [(wanted["key"], wanted["revision"])]),
    )
    return {
        "changed": outcome.changed,
        "key": wanted["key"],
        "model": {"key": wanted["key"], "revision": wanted["revision"]},
        "path": outcome.path,
        "fetched_files": list(outcome.fetched_files),
        "fetched_bytes": outcome.fetched_bytes,
        "healed_files": list(outcome.healed_files),
        "message": outcome.message,
        "pending": bool(outcome.fetched_files) or outcome.record_stale,
    }


def worker_of(wanted: dict[str, Any]) -> bytes | None:
    return base64.b64decode(wanted["worker"]) if wanted["worker"] else None


def start(wanted: dict[str, Any]) -> dict[str, Any]:
    request = {**{name: wanted[name] for name in REQUEST}, "peers": wanted["peer_urls"]}
    word = start_job(request, worker_of(wanted))
    return {
        "changed": False,
        "joined": word == "joined",
        "message": f"{word} {unit_name(wanted['key'], wanted['revision'])}",
    }


def status(wanted: dict[str, Any]) -> dict[str, Any]:
    key, revision = wanted["key"], wanted["revision"]
    state = job_state(Path(wanted["models_dir"]), key, revision)
    unit = unit_name(key, revision)
    words = last_words(unit) if state["state"] == "died" else ""
    return {"changed": False, "job": state, "unit": unit, "last_words": words, "message": state["state"]}


def install(wanted: dict[str, Any]) -> dict[str, Any]:
    return {"changed": install_worker(worker_of(wanted), WORKER_PATH), "message": f"{WORKER_PATH} is in place"}


def share(wanted: dict[str, Any]) -> dict[str, Any]:
    config = {
        "models_dir": wanted["models_dir"],
        "port": wanted["share_port"],
        "addresses": wanted["addresses"],
        "idle_seconds": wanted["share_idle_seconds"],
    }
    for item in wanted["announced"]:
        announce({"models_dir": wanted["models_dir"], "key": item["key"], "revision": item["revision"]})
    renewed = install_worker(worker_of(wanted), WORKER_PATH)
    moved = write_config(config)
    if (renewed or moved) and unit_active(UNIT):
        stop_unit(UNIT)
    if not unit_active(UNIT):
        place = str(config_path(Path(wanted["models_dir"])))
        launch_unit(
            UNIT,
            ["Description=metalserve: weights for other hosts", "Nice=5", "NoNewPrivileges=yes"],
            ["/usr/bin/python3", str(WORKER_PATH), "share", place],
        )
    return {
        "changed": False,
        "message": f"gives files to {', '.join(wanted['addresses'])} on port {wanted['share_port']}",
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "step": {
                "type": "str",
                "default": "look",
                "choices": ["look", "fetch", "share", "install", "start", "status"],
            },
            "models_dir": {"type": "path", "required": True},
            "key": {"type": "str"},
            "revision": {"type": "str"},
            "files": {"type": "list", "elements": "dict"},
            "sources": {"type": "list", "elements": "str"},
            "format": {"type": "str"},
            "require_chat_template": {"type": "bool", "default": True},
            "reserve_bytes": {"type": "int", "default": 1 << 30},
            "full_hash": {"type": "bool", "default": False},
            "connections": {"type": "int", "default": 4},
            "rate_limit_bytes_per_second": {"type": "int", "default": 0},
            "attempts": {"type": "int", "default": 5},
            "patience_seconds": {"type": "int", "default": 3600},
            "read_timeout_seconds": {"type": "int", "default": 60},
            "tokens_path": {"type": "path", "default": "/etc/metalserve/model_weights_tokens.json"},
            "share_port": {"type": "int", "default": 8747},
            "share_idle_seconds": {"type": "int", "default": 900},
            "announced": {"type": "list", "elements": "dict", "default": []},
            "peers": {"type": "list", "elements": "str"},
            "hosts_at_once": {"type": "int"},
            "progress_seconds": {"type": "int"},
            "timeout_seconds": {"type": "int"},
            "addresses": {"type": "list", "elements": "str", "default": []},
            "seed": {"type": "bool", "default": True},
            "peer_urls": {"type": "list", "elements": "str", "default": []},
            "worker": {"type": "str"},
        },
        required_if=[
            ("step", "look", ["key", "revision", "files", "sources", "format"]),
            ("step", "start", ["key", "revision", "files", "sources", "format"]),
            ("step", "status", ["key", "revision"]),
        ],
        supports_check_mode=True,
    )
    wanted = module.params
    steps = {"look": look, "install": install, "share": share, "start": start, "status": status}
    if wanted["step"] == "fetch":
        module.fail_json(
            msg="step=fetch came to the host. Needed: the action plugin model_weights beside the module, which watches "
            "a fetch from the controller. Change: call it from the role model_weights."
        )
    if module.check_mode and wanted["step"] == "install":
        module.exit_json(changed=not WORKER_PATH.exists(), message=f"would put {WORKER_PATH} in place")
    if module.check_mode and wanted["step"] not in ("look", "status"):
        module.exit_json(changed=False, message="a check run starts nothing")
    try:
        result = steps[wanted["step"]](wanted)
    except WeightsError as error:
        module.fail_json(msg=str(error))
    except subprocess.CalledProcessError as error:
        module.fail_json(
            msg=f"systemd-run refused the worker: {error.stderr.strip()}. Needed: systemd as the host's init. "
            "Change: see `journalctl -b`, then run again."
        )
    except OSError as error:
        module.fail_json(msg=f"{wanted['key']}: {error}. Needed: a models directory that root can write.")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
