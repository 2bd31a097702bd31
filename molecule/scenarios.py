"""Run the Molecule scenarios whose inputs changed since they last passed on this machine.

    python molecule/scenarios.py                        what changed, as `make test` does
    python molecule/scenarios.py --all                  every scenario
    python molecule/scenarios.py --budget-minutes 50    begin none that would end after that time

A scenario is run by its target in the Makefile, test-NAME, and depends on the paths that scenarios.yml names. After
it passed, the hash of their content is kept in the user's cache folder; with the same content it is skipped, which
is said at the end, as is one that would not end within the budget, and one that only --all runs. Exit status 1 when
a scenario fails.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

PROJECT = Path(__file__).resolve().parents[1]
REASONS_KEPT = 40
REASON_LENGTH = 400
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# What pytest says of a failed test and its assertion, and Ansible of a failed task.
REASON = re.compile(r"^(FAILED |ERROR |E  )|fatal: \[|\[ERROR\]")
# What every scenario depends on.
SHARED_INPUTS = ("ansible.cfg", "requirements", "molecule/common", "molecule/scenarios.py", "tests/support")


@dataclass(frozen=True)
class Scenario:
    """A scenario, the paths relative to the project that it depends on, and how long it takes.

    Attributes:
        minutes: of a run on two quiet cores, rounded up.
        always: run it whatever the budget, and although nothing changed.
        by_hand: why a change does not make it run; empty when it does.
    """

    name: str
    inputs: tuple[str, ...]
    minutes: float
    always: bool = False
    by_hand: str = ""


def load(path: Path) -> list[Scenario]:
    """Read scenarios.yml.

    Raises:
        ValueError: a scenario names a path that does not exist, so its changes would go unnoticed.
    """
    scenarios = []
    for name, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        inputs = (*SHARED_INPUTS, f"molecule/{name}", *entry["inputs"])
        missing = [item for item in inputs if not (path.parents[1] / item).exists()]
        if missing:
            raise ValueError(f"{path.name}: {name} names {', '.join(missing)}, which does not exist")
        scenarios.append(Scenario(name, inputs, entry["minutes"], entry.get("always", False), entry.get("by_hand", "")))
    return scenarios


def content_hash(project: Path, inputs: tuple[str, ...]) -> str:
    """SHA-256 over names and content of all files below the inputs that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *inputs],
        cwd=project,
        check=True,
        capture_output=True,
    )
    total = hashlib.sha256()
    for name in sorted(set(listed.stdout.decode().split("\0")) - {""}):
        path = project / name
        if path.is_symlink():
            content = bytes(path.readlink())
        elif path.is_file():
            content = path.read_bytes()
        else:
            continue  # deleted, not yet committed
        total.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()


def passes_folder() -> Path:
    """Where passes are remembered."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "metalserve" / "passed"


def watch(command: list[str], folder: Path) -> tuple[int, list[str]]:
    """Run a command with its output passed through; its exit status, and the last lines that tell why it failed.

    Molecule prints a page after the test or task that failed: the end of a log alone does not show the reason.
    """
    reasons: deque[str] = deque(maxlen=REASONS_KEPT)
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            plain = COLOUR.sub("", line).strip()
            if REASON.search(plain):
                reasons.append(plain[:REASON_LENGTH])
    return process.returncode, list(reasons)


def main(arguments: list[str]) -> int:
    """Run what is to be run and tell the rest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="also those that passed with the same inputs")
    parser.add_argument("--budget-minutes", type=float, default=float("inf"), help="begin none that would end later")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.budget_minutes * 60
    lines = []
    failed = False
    for scenario in load(PROJECT / "molecule" / "scenarios.yml"):
        wanted = content_hash(PROJECT, scenario.inputs)
        record = passes_folder() / f"{scenario.name}-{wanted[:16]}"
        if record.exists() and not (options.all or scenario.always):
            lines.append(f"{scenario.name}: left out: passed on {record.read_text().strip()} with the same inputs")
            continue
        if scenario.by_hand and not options.all:
            by_hand = f"{scenario.by_hand}; make test-{scenario.name} runs it, and make test-all"
            lines.append(f"{scenario.name}: LEFT OUT: {by_hand}")
            continue
        if time.monotonic() + scenario.minutes * 60 > end and not scenario.always:
            late = (
                f"its {scenario.minutes:g} minutes would end after the {options.budget_minutes:g} of the budget; "
                f"make test-{scenario.name} runs it"
            )
            lines.append(f"{scenario.name}: LEFT OUT: {late}")
            continue
        print(f"==> scenario {scenario.name}", flush=True)
        start = time.monotonic()
        status, reasons = watch(["make", "--no-print-directory", f"test-{scenario.name}"], PROJECT)
        seconds = time.monotonic() - start
        if status:
            lines.append(f"{scenario.name}: FAILED after {seconds:.0f} s")
            lines += [f"  {reason}" for reason in reasons]
            failed = True
            break
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC\n"), encoding="utf-8")
        lines.append(f"{scenario.name}: passed in {seconds:.0f} s")
    print("\nscenarios:", *lines, sep="\n  ")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
