#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: write a release and make it the current one."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_release
short_description: Write a release of a deployment and make it current
description:
  - Writes the release's files under its id and, when asked, points C(current) at it. Both are one rename.
  - Tells which release the running container belongs to, so that a restart follows from state and not from "changed".
options:
  deployment:
    description: Name of the deployment.
    type: str
    required: true
  release_id:
    description: Id of the release.
    type: str
    required: true
  files:
    description: Text of each file, by name.
    type: dict
    required: true
  state:
    description: C(staged) writes the files, C(active) also makes the release current.
    type: str
    choices: [staged, active]
    default: active
  unit:
    description: The deployment's systemd unit, to look at.
    type: str
    required: true
  root:
    description: Where deployments keep their releases.
    type: path
    default: /etc/metalserve
author: [metalserve]
"""

EXAMPLES = r"""
- name: Make a release current
  serving_release:
    deployment: tiny
    release_id: 0123456789ab
    unit: vllm@tiny.service
    files: {release.json: "{}", engine.yaml: "model: /models/tiny", release.env: "METALSERVE_PORT=8000"}
"""

RETURN = r"""
unit:
  description: The unit, as given.
  returned: always
  type: str
release_id:
  description: The release, as given.
  returned: always
  type: str
directory:
  description: Where the release lies.
  returned: always
  type: str
active_before:
  description: The release that was current before, or null.
  returned: always
  type: str
running:
  description: The release that the running container was started from, or null.
  returned: always
  type: str
stale:
  description: Whether the unit must be started (again), because it does not run or runs another release.
  returned: always
  type: bool
unit_state:
  description: C(running), C(stopped), or C(failing) for a unit that failed or that systemd keeps starting again.
  returned: always
  type: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.readiness import run_command
from ansible.module_utils.metalserve_remote.releases import activate_release, active_release, stage_release

# Where a unit is healthy; everything else but a plain stop counts as failing.
RUNNING = ("active", "running")
STOPPED = ("inactive", "dead")
LABEL = '{{ index .Config.Labels "metalserve.release" }}'


def running_release(module: AnsibleModule, deployment: str) -> str | None:
    """The release of the deployment's container; None without one. Not being able to ask is no answer."""
    if module.get_bin_path("docker") is None:
        return None
    status, out, err = module.run_command(["docker", "inspect", "--format", LABEL, f"metalserve-{deployment}"])
    if status != 0 and "no such" not in err.lower():
        module.fail_json(
            msg=f"Docker does not say what runs for {deployment}: {err.strip()}. Needed: a Docker that answers."
        )
    return out.strip() or None if status == 0 else None


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "deployment": {"type": "str", "required": True},
            "release_id": {"type": "str", "required": True},
            "files": {"type": "dict", "required": True},
            "state": {"type": "str", "choices": ["staged", "active"], "default": "active"},
            "unit": {"type": "str", "required": True},
            "root": {"type": "path", "default": "/etc/metalserve"},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    root, name, release_id = Path(wanted["root"]), wanted["deployment"], wanted["release_id"]
    before = active_release(root, name)
    running = running_release(module, name)
    state = run_command(["systemctl", "show", wanted["unit"], "--property=ActiveState,SubState"])
    properties = dict(line.split("=", 1) for line in state.splitlines())
    pair = (properties.get("ActiveState", ""), properties.get("SubState", ""))
    try:
        changed = stage_release(root, name, release_id, wanted["files"], dry_run=module.check_mode)
        if wanted["state"] == "active":
            changed = activate_release(root, name, release_id, dry_run=module.check_mode) or changed
    except OSError as error:
        module.fail_json(msg=f"The release {release_id} of {name} could not be written: {error}.")
    unit_state = "running" if pair == RUNNING else "stopped" if pair in (STOPPED, ("", "")) else "failing"
    module.exit_json(
        changed=changed,
        stale=unit_state != "running" or running != release_id,
        unit=wanted["unit"],
        release_id=release_id,
        directory=str(root / name / "releases" / release_id),
        active_before=before,
        running=running,
        unit_state=unit_state,
        diff={"before": f"{name}: {before}\n", "after": f"{name}: {release_id}\n"} if before != release_id else {},
    )


if __name__ == "__main__":
    main()
