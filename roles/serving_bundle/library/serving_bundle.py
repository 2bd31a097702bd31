#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Documentation of the action plugin of the same name, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_bundle
short_description: Prove a bundle, and give it to hosts
description:
  - C(give) proves every file of a bundle against its signed manifest, and starts a server that ends with this run.
  - C(require) refuses a bundle that lacks what deployments need.
options:
  step:
    description: What to do.
    type: str
    choices: [give, require]
    required: true
  directory:
    description: The bundle.
    type: path
    required: true
  signers:
    description: Public keys, one of which must have signed.
    type: list
    elements: str
    default: []
  unsigned_allowed:
    description: Take an unsigned bundle where no signers are named.
    type: bool
    default: false
  full_hash:
    description: Hash every file, whatever is remembered of it.
    type: bool
    default: false
  port:
    description: Where to listen; 0 takes any.
    type: int
    default: 8748
  serve:
    description: Whether to start a server.
    type: bool
    default: true
  deployments:
    description: With C(require), the deployments of the host.
    type: list
    elements: dict
    default: []
  engines:
    description: Versions and images of engines.
    type: dict
    default: {}
  lock:
    description: The inventory's lock.
    type: dict
    default: {}
author: [metalserve]
"""

EXAMPLES = r"""
- name: Prove a bundle
  serving_bundle:
    step: give
    directory: /media/x
    signers: ["ssh-ed25519 AAAA... release"]
"""

RETURN = r"""
manifest:
  description: SHA-256 of the manifest.
  returned: give
  type: str
port:
  description: Where the server listens; 0 without one.
  returned: give
  type: int
systems:
  description: Systems for which there are packages.
  returned: give
  type: list
"""
