import ast
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from host_machines import bare_machine, simulated
from host_nvml_library import binding, packed_pynvml

import metalserve.remote
from metalserve.remote.host_nvml import NvmlMissingError, load_pynvml, read_nvml
from metalserve.remote.host_probe import (
    CommandMissingError,
    Probe,
    ProbeError,
    Reading,
    Tree,
    run_command,
    run_probes,
)

REMOTE = Path(metalserve.remote.__file__).parent


def hang():
    time.sleep(60)


def test_a_hanging_probe_costs_its_own_answer_only():
    started = time.monotonic()
    values, errors = run_probes([Probe("stuck", hang, 0.1), Probe("quick", lambda: [1, 2], 0.1)])
    assert time.monotonic() - started < 3
    assert values == {"stuck": None, "quick": [1, 2]}
    assert errors == [{"probe": "stuck", "error": "no answer in 0.1 s"}]


def test_a_hanging_driver_does_not_hang_the_collection(tmp_path):
    machine = simulated(tmp_path, "l40s_x4")
    started = time.monotonic()
    facts = machine.facts(nvml=hang, nvml_limit_seconds=0.5, limit_seconds=5)
    assert time.monotonic() - started < 5
    assert facts["probe_errors"] == [{"probe": "nvml", "error": "no answer in 0.5 s"}]
    assert [gpu["source"] for gpu in facts["gpus"]] == ["pci"] * 4
    assert facts["driver"]["loaded"] == "580.178.04"


def test_a_hanging_command_does_not_hang_the_collection(tmp_path):
    machine = bare_machine(tmp_path)
    bin_directory = tmp_path / "bin"
    bin_directory.mkdir()
    docker = bin_directory / "docker"
    docker.write_text("#!/bin/sh\nsleep 61\n")
    docker.chmod(0o755)

    def run(argv, limit_seconds):
        if argv[0] != "docker":
            return machine.run(argv, limit_seconds)
        return run_command([str(docker), *argv[1:]], limit_seconds)

    started = time.monotonic()
    facts = machine.facts(run=run, limit_seconds=1)
    assert time.monotonic() - started < 30
    assert facts["docker"]["version"] is None
    # On a busy machine other probes may be too slow as well.
    errors = {error["probe"]: error["error"] for error in facts["probe_errors"]}
    assert "docker version --format {{json .}}: no answer in" in errors["docker"]


def test_nothing_is_left_running(tmp_path):
    pid_file = tmp_path / "pid"

    def start_and_hang():
        with subprocess.Popen(["sleep", "62"]) as process:
            pid_file.write_text(str(process.pid))

    run_probes([Probe("stuck", start_and_hang, 0.5)])
    state = ""
    for _attempt in range(50):
        with contextlib.suppress(FileNotFoundError):
            state = Path(f"/proc/{pid_file.read_text()}/stat").read_text().split()[2]
        if state == "Z" or not Path(f"/proc/{pid_file.read_text()}").exists():
            return
        time.sleep(0.02)
    pytest.fail(f"the command of a killed probe is in state {state}")


def test_a_probe_that_crashes_is_told():
    values, errors = run_probes([Probe("broken", lambda: os.kill(os.getpid(), signal.SIGSEGV), 5)])
    assert values == {"broken": None}
    assert errors == [{"probe": "broken", "error": "the probe's process ended without an answer (signal 11)"}]


def test_a_probe_that_raises_is_told():
    def refuse():
        raise ProbeError("no such thing")

    _values, errors = run_probes([Probe("one", refuse, 5), Probe("two", lambda: 1 // 0, 5)])
    assert errors == [
        {"probe": "one", "error": "no such thing"},
        {"probe": "two", "error": "ZeroDivisionError: integer division or modulo by zero"},
    ]


def test_a_reading_keeps_its_value_beside_its_errors():
    values, errors = run_probes([Probe("half", lambda: Reading({"a": 1}, ("b is gone",)), 5)])
    assert values == {"half": {"a": 1}}
    assert errors == [{"probe": "half", "error": "b is gone"}]


def test_answers_larger_than_a_pipe():
    values, _errors = run_probes([Probe("large", lambda: "x" * 300_000, 5)])
    assert len(values["large"]) == 300_000


def test_a_stuck_probe_keeps_no_stream_of_the_caller_open():
    # As over ssh: the reader of the output must see its end although a probe lives on. It is stopped, so
    # that, like a process inside the driver, it does not go away by itself.
    code = (
        "import os, signal, time\n"
        "from metalserve.remote import host_probe\n"
        "host_probe._end = lambda pid: print(pid, flush=True) or 0\n"
        "host_probe.run_probes([host_probe.Probe('stuck', lambda: time.sleep(63), 0.1)])\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    pid = int(answer.stdout)
    os.kill(pid, signal.SIGKILL)  # it was still there, and the output had ended nevertheless


def test_commands():
    assert run_command(["sh", "-c", "echo out; echo err >&2; exit 3"], 5).code == 3
    assert run_command(["sh", "-c", "echo $LC_ALL"], 5).stdout == "C\n"
    assert run_command(["cat"], 5).stdout == "", "standard input is empty"
    with pytest.raises(CommandMissingError, match="no-such-command: not installed"):
        run_command(["no-such-command"], 5)
    with pytest.raises(ProbeError, match=r"sleep 64: no answer in 0\.2 s"):
        run_command(["sleep", "64"], 0.2)


def test_tree(tmp_path):
    tree = Tree(str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").write_text(" text\n")
    (tmp_path / "out").symlink_to("/a/file")
    (tmp_path / "up").symlink_to("../../../a/./file")
    (tmp_path / "loop").symlink_to("loop")
    assert tree.read("/a/file") == "text"
    assert tree.read("/a") is tree.read("/missing") is None
    assert tree.names("/missing") == []
    assert tree.resolve("/out") == tree.resolve("/up") == "/a/file"
    assert tree.exists("/out")
    assert not tree.exists("/loop")


def test_the_binding_travels_whole():
    module = load_pynvml(packed_pynvml())
    assert module.NVML_ERROR_LIB_RM_VERSION_MISMATCH == 18
    assert module.NVMLError(3).value == 3


def test_the_role_packs_what_the_module_unpacks():
    plugin = Path(__file__).parents[4] / "roles/gpu_facts/action_plugins/gpu_host.py"
    code = (
        f"import runpy; packed = runpy.run_path({str(plugin)!r})['packed_pynvml']()\n"
        "from metalserve.remote.host_nvml import load_pynvml\n"
        "print(len(packed), load_pynvml(packed).NVML_SUCCESS)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    length, success = answer.stdout.split()
    assert int(length) < 100_000
    assert success == "0"


def test_no_nvml_library(monkeypatch):
    def not_found(name):
        raise OSError(name)

    module = binding()
    monkeypatch.setattr(module, "nvmlLib", None)
    monkeypatch.setattr(module, "CDLL", not_found)
    with pytest.raises(NvmlMissingError, match="nvmlInit: NVML Shared Library Not Found"):
        read_nvml(module)


@pytest.mark.parametrize("path", sorted(REMOTE.glob("host_*.py")), ids=lambda path: path.name)
def test_the_code_is_python_3_9_and_standard_library_only(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    assert any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body), (
        "annotations such as `str | None` need the import from __future__"
    )
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names, name


def test_the_module_is_python_3_9():
    module = Path(__file__).parents[4] / "roles/gpu_facts/library/gpu_host.py"
    ast.parse(module.read_text(), feature_version=(3, 9))
