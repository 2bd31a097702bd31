"""How the SGLang tests ask the engine's own code in its image."""

import json
import subprocess
import uuid
from pathlib import Path

# About two minutes on two quiet cores; the rest is for a machine that has more to do.
LIMIT_SECONDS = 1500

# memory.total as nvidia-smi tells it (MiB).
GPUS = {
    "H100": {"memory_mib": 81559, "capability": "9.0", "processors": 132},
    "A100-80": {"memory_mib": 81920, "capability": "8.0", "processors": 108},
    "H200": {"memory_mib": 143771, "capability": "9.0", "processors": 132},
    "L40S": {"memory_mib": 46068, "capability": "8.9", "processors": 142},
}


def run_in_image(image, script, asked):
    """What one of the scripts beside this answers in the image, without a network."""
    name = f"metalserve-sglang-{uuid.uuid4().hex[:12]}"
    command = ["docker", "run", "--rm", "-i", "--name", name, "--network", "none"]
    command += ["--volume", f"{Path(__file__).with_name(script)}:/script.py:ro", "--entrypoint", "python3"]
    try:
        done = subprocess.run(
            [*command, image, "/script.py"],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    finally:
        subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def ask_sglang(image, configs, cases):
    """The cases, each with the answer of SGLang's own code."""
    asked = {"gpus": GPUS, "configs": configs, "cases": cases}
    return list(zip(cases, run_in_image(image, "sglang_resolver.py", asked), strict=True))
