"""How fast the planner answers: one cold command, and a thousand plans in one process.

python benchmarks/plan.py
"""

import subprocess
import sys
import time

from metalserve import catalogue
from metalserve.planner import make_plan

COMMAND = [sys.executable, "-m", "metalserve.cli", "plan", "--model", "qwen3.6-35b-a3b-fp8", "--gpus", "8xH800"]
CASES = (
    ("qwen3.6-35b-a3b-fp8", "8xH800"),
    ("qwen3.6-35b-a3b", "2xL40S"),
    ("qwen3-32b-fp8", "2xL40S"),
    ("gemma-3-27b-it", "1xH200"),
    ("deepseek-v3", "8xH200"),
)


def cold_seconds(repeats: int = 5) -> float:
    """The best of some cold starts of the command line, in seconds."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run(COMMAND, check=True, capture_output=True)
        best = min(best, time.perf_counter() - started)
    return best


def thousand_seconds(model: str, shape: str) -> float:
    """Processor time of 1000 plans, in seconds."""
    host = catalogue.host_from_shape(shape)
    make_plan(model, host)
    started = time.process_time()
    for _ in range(1000):
        make_plan(model, host)
    return time.process_time() - started


if __name__ == "__main__":
    print(f"{'metalserve plan, cold':<40}{cold_seconds():6.2f} s")
    for name, gpus in CASES:
        print(f"{'1000 plans: ' + name + ' on ' + gpus:<40}{thousand_seconds(name, gpus):6.2f} s")
