"""One run at a time on a host, and a name for whoever waits."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from metalserve.remote.host_lock import HostBusyError, host_lock

HOLD = (
    "import sys, time; from pathlib import Path; from metalserve.remote.host_lock import host_lock\n"
    "with host_lock(Path(sys.argv[1]), 'ann on controller', 0):\n    print('held', flush=True); time.sleep(60)"
)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_with_the_name_of_the_first(tmp_path, holder):
    expected = (
        f"ann on controller, process {holder.pid}, since .*Needed: one run at a time; this one has waited 0 s. Change: "
    )
    with pytest.raises(HostBusyError, match=expected), host_lock(tmp_path, "bob", 0.3):
        pass


def test_a_killed_holder_leaves_no_lock(tmp_path, holder):
    holder.kill()
    holder.wait()
    with host_lock(tmp_path, "bob", 0):
        assert re.match("bob, process", (tmp_path / ".lock").read_text())


def test_a_second_run_waits_for_the_first(tmp_path: Path):
    hold = HOLD.replace("60", "0.5")
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        started = time.monotonic()
        with host_lock(tmp_path, "bob", 30):
            assert time.monotonic() - started > 0.2
