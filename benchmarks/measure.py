"""Measure what a person waits for, and print a table with the command of each row.

    python benchmarks/measure.py            warm: the lab is built, the demo starts from a bare host
    python benchmarks/measure.py --cold     everything from nothing: removes the lab's images and caches first

Nothing is asserted: the numbers depend on the machine, which the last line names.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
SITE = ["ansible-playbook", "site.yml", "-i", "inventories/lab"]


class MemoryWatch:
    """The most memory in use above the start, machine-wide, in bytes; sampled twice a second."""

    def __init__(self) -> None:
        self._start = self._used()
        self._peak = self._start
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def peak_bytes(self) -> int:
        """Highest use so far above the start."""
        return self._peak - self._start

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            self._peak = max(self._peak, self._used())

    @staticmethod
    def _used() -> int:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        return (int(rows["MemTotal"].split()[0]) - int(rows["MemAvailable"].split()[0])) * 1024


def timed(argv: list[str]) -> float:
    """Seconds that a command takes; its output is shown only when it fails."""
    environment = {**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg")}
    start = time.monotonic()
    process = subprocess.run(argv, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"{' '.join(argv)} failed:\n{process.stdout[-3000:]}{process.stderr[-3000:]}")
    return time.monotonic() - start


def main() -> None:
    """Run the rows in order and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", action="store_true", help="remove the lab's images and caches first")
    options = parser.parse_args()
    timed(["make", "clean" if options.cold else "demo-down"])
    rows = []
    with MemoryWatch() as watch:
        rows.append((f"demo, {'cold' if options.cold else 'warm'}", "make demo", timed(["make", "demo"])))
        rows.append(("demo again, nothing to do", "make demo", timed(["make", "demo"])))
        rows.append(("site.yml without a change", " ".join(SITE), timed(SITE)))
        preflight = ["ansible-playbook", "playbooks/preflight.yml", "-i", "inventories/lab"]
        rows.append(("preflight alone", " ".join(preflight), timed(preflight)))
    width = max(len(name) for name, _, _ in rows)
    print(f"{'what':<{width}}  seconds  command")
    for name, command, seconds in rows:
        print(f"{name:<{width}}  {seconds:7.1f}  {command}")
    print(f"\npeak memory above the start: {watch.peak_bytes / 2**30:.1f} GiB")
    print(f"machine: {os.cpu_count()} cores, {platform.platform()}, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
