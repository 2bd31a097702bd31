#!/usr/bin/env python3
"""How long the preflight of a large fleet takes, over hosts that are trees of files on this machine.

Here the hosts' own work is done by this machine's cores, too; a real fleet does it itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
MODEL = "qwen3.6-35b-a3b-fp8"
VARIABLES = {
    "serving_deployments": [{"name": "qwen", "engine": "vllm", "model": MODEL, "port": 8000}],
    "serving_lock": {
        "images": {"vllm/vllm-openai:v0.33.0": {"digest": "sha256:" + "d" * 64, "compressed_bytes": 1000}},
        "models": {MODEL: {"revision": "0123", "files": [{"path": "a", "size_bytes": 1000, "sha256": "a" * 64}]}},
    },
}


def main() -> None:
    """Build the fleet, run the playbook, print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=100)
    parser.add_argument("--shape", default="8xH800")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="metalserve-fleet-") as folder:
        fleet = [sys.executable, PROJECT / "lab/fleet.py", folder, f"{given.hosts}x{given.shape}"]
        subprocess.run(fleet, check=True, stdout=subprocess.DEVNULL)
        command = [
            Path(sys.executable).with_name("ansible-playbook"),
            PROJECT / "playbooks/preflight.yml",
            f"--inventory={folder}/hosts.yml",
            f"--extra-vars={json.dumps(VARIABLES)}",
        ]
        environment = {**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg")}
        load = os.getloadavg()[0]
        start = time.monotonic()
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - start
    if run.returncode or f"{given.hosts} ok" not in run.stdout:
        sys.exit(f"the preflight failed:\n{run.stdout[-3000:]}{run.stderr[-3000:]}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{given.hosts} hosts of {given.shape}: {seconds:.1f} s, {used.ru_utime + used.ru_stime:.1f} s of processor "
        f"time ({os.cpu_count()} cores, load before {load:.1f}, {platform.platform()})"
    )


if __name__ == "__main__":
    main()
