#!/usr/bin/env python3
"""How a controller copes with a large fleet: `site.yml` without a change, and the plan of a rollout.

    python benchmarks/fleet_scale.py --hosts 100
    python benchmarks/fleet_scale.py --hosts 10 --profile     where the time of the controller's main process goes

The hosts are functions (lab/simulated): each module is packed and addressed as ever, and is answered at once, as by a
host on which nothing is to be done; one gateway is in front of them. So this is the controller's own time, to which a
real fleet adds its network and the work of its hosts, `forks` of them at a time. Nothing of it says how long an engine
takes.
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

import yaml

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT / "lab"))

from fleet import build_host, read_shape  # noqa: E402
from metalserve.remote.host_facts import collect  # noqa: E402

MODEL = "qwen3.6-35b-a3b-fp8"
DIGEST = "sha256:" + "d" * 64
VARIABLES = {
    "serving_deployments": [{"name": "qwen", "engine": "vllm", "model": MODEL, "port": 8000}],
    "serving_lock": {
        "images": {"vllm/vllm-openai:v0.33.0": {"digest": DIGEST, "compressed_bytes": 1000}},
        "models": {MODEL: {"revision": "0123", "files": [{"path": "a", "size_bytes": 1000, "sha256": "a" * 64}]}},
    },
    "nvidia_driver_source": "distribution",
    "container_toolkit_repository_url": "",
    "endpoint_gate_checks": [],
}
RUNS = {"site": ["site.yml"], "rollout": ["playbooks/rollout.yml", "--check"]}
TITLES = {"site": "site.yml without a change", "rollout": "plan of a rollout (check run)"}


def build(folder: Path, hosts: int, shape: str) -> dict[str, str]:
    """Write the inventory and the facts; returns the environment of a run."""
    build_host(folder / "tree", read_shape(shape))
    facts = collect(str(folder / "tree"), ["/", "/var/lib/docker", "/var/lib/metalserve/models"])
    facts["docker"]["images"] = [f"vllm/vllm-openai@{DIGEST}"]
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    shared = {
        "ansible_connection": "simulated",
        "ansible_python_interpreter": "{{ ansible_playbook_python }}",
        "simulated_answers": str(PROJECT / "benchmarks/unchanged_hosts.py"),
        "simulated_home": str(folder / "home"),
        "gateway_address": "10.0.0.1",
    }
    names = [f"gpu-{number:03d}" for number in range(1, hosts + 1)]
    groups = {
        "serving_hosts": {"hosts": dict.fromkeys(names), "vars": VARIABLES},
        "gateways": {"hosts": {"gw-1": None}},
    }
    inventory = {"all": {"children": groups, "vars": shared}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory), encoding="utf-8")
    return {
        **os.environ,
        "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"),
        "ANSIBLE_CONNECTION_PLUGINS": str(PROJECT / "lab/simulated/connection"),
        "ANSIBLE_NOCOLOR": "1",
        "FLEET_FACTS": str(folder / "facts.json"),
        "FLEET_HOSTS": " ".join(names),
    }


def main() -> None:
    """Build the fleet, run both, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=100)
    parser.add_argument("--shape", default="8xH800")
    parser.add_argument("--only", choices=list(RUNS), help="one of the two")
    parser.add_argument("--profile", action="store_true", help="print where the main process spends its time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="metalserve-fleet-") as directory:
        environment = build(Path(directory), given.hosts, given.shape)
        for name, arguments in RUNS.items():
            if given.only not in (None, name):
                continue
            program = [sys.executable, str(Path(sys.executable).with_name("ansible-playbook"))]
            stats = Path(directory, "profile")
            if given.profile:
                program[1:1] = ["-m", "cProfile", "-o", str(stats)]
            command = [*program, *arguments, f"--inventory={directory}/hosts.yml"]
            before, load, start = resource.getrusage(resource.RUSAGE_CHILDREN), os.getloadavg()[0], time.monotonic()
            run = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
            seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
            if run.returncode:
                sys.exit(f"{name} failed:\n{run.stdout[-6000:]}{run.stderr[-3000:]}")
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(
                f"{TITLES[name]}: {given.hosts} hosts of {given.shape}: {seconds:.1f} s, {used:.1f} s of processor "
                f"time, {used / given.hosts:.2f} s of it a host (load before {load:.1f})",
                flush=True,
            )
            if given.profile:
                show = "import pstats, sys; pstats.Stats(sys.argv[1]).sort_stats('cumtime').print_stats(45)"
                subprocess.run([sys.executable, "-c", show, str(stats)], check=True)
    print(f"machine: {os.cpu_count()} cores, {platform.platform()}")


if __name__ == "__main__":
    main()
