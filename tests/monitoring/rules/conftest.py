"""promtool, from the distribution's package (lab/promtool)."""

import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def promtool():
    """Runs promtool with arguments; returns its exit status and what it said."""
    found = subprocess.run([str(PROJECT / "lab/promtool")], capture_output=True, text=True, check=True)
    program = found.stdout.splitlines()[-1]

    def run(*arguments):
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return run
