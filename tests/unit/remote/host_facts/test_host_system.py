import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from host_machines import JOURNAL, KERNEL, bare_machine

from metalserve.remote.host_facts import collect
from metalserve.remote.host_probe import Output, ProbeError
from metalserve.remote.host_processes import decode_address

SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


def test_kernel_and_processor(tmp_path):
    facts = bare_machine(tmp_path).facts()
    assert (facts["schema"], facts["kernel"], facts["architecture"]) == (1, KERNEL, "x86_64")
    assert facts["cpu"] == {
        "model": "Testium 9",
        "sockets": 1,
        "cores": 2,
        "threads": 4,
        "instruction_sets": ["amx_bf16", "amx_tile", "avx2", "avx512_bf16", "avx512f"],
    }


def test_arm_processor_takes_its_places_from_sysfs(tmp_path):
    machine = bare_machine(tmp_path)
    block = "processor\t: {}\nFeatures\t: fp asimd sve2 bf16 i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"
    machine.write("/proc/cpuinfo", "\n".join(block.format(i) for i in range(4)))
    for index in range(4):
        topology = f"/sys/devices/system/cpu/cpu{index}/topology"
        machine.write(f"{topology}/physical_package_id", f"{index // 2}\n")
        machine.write(f"{topology}/core_id", f"{index % 2}\n")
    cpu = machine.facts()["cpu"]
    assert cpu["model"] == "Arm implementer 0x41 part 0xd4f"
    assert (cpu["sockets"], cpu["cores"], cpu["threads"]) == (2, 4, 4)
    assert cpu["instruction_sets"] == ["asimd", "bf16", "i8mm", "sve2"]


def test_processor_without_any_topology(tmp_path):
    machine = bare_machine(tmp_path)
    machine.write("/proc/cpuinfo", "processor\t: 0\nmodel name\t: A\n\nprocessor\t: 1\nmodel name\t: A\n")
    cpu = machine.facts()["cpu"]
    assert (cpu["sockets"], cpu["cores"], cpu["threads"]) == (1, 2, 2)


def test_memory_by_numa_node(tmp_path):
    machine = bare_machine(tmp_path)
    for node in (2, 10):
        machine.write(f"/sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal:   1024 kB\n")
    machine.write("/sys/devices/system/node/online", "0-2\n")
    assert machine.facts()["memory"] == {
        "total_bytes": 2 << 30,
        "available_bytes": 1 << 30,
        "numa_nodes": [
            {"node": 0, "total_bytes": 1 << 30},
            {"node": 2, "total_bytes": 1 << 20},
            {"node": 10, "total_bytes": 1 << 20},
        ],
    }


def test_machine_without_numa_has_one_node(tmp_path):
    machine = bare_machine(tmp_path)
    (tmp_path / "sys/devices/system/node").rename(tmp_path / "elsewhere")
    assert machine.facts()["memory"]["numa_nodes"] == [{"node": 0, "total_bytes": 2 << 30}]


def test_disk_of_a_path_that_does_not_exist_yet(tmp_path):
    (tmp_path / "var/lib").mkdir(parents=True)
    disks = bare_machine(tmp_path).facts(["/var/lib/metalserve/models", "/"])["disks"]
    assert [disk["path"] for disk in disks] == ["/var/lib/metalserve/models", "/"]
    assert {disk["mount"] for disk in disks} == {"/"}
    state = os.statvfs(tmp_path)
    assert disks[0]["total_bytes"] == state.f_blocks * state.f_frsize
    assert 0 < disks[0]["free_bytes"] <= disks[0]["total_bytes"]


def test_disk_on_a_file_system_of_its_own():
    disk = collect("/", ["/proc/self/fd"])["disks"][0]
    assert disk["mount"] == "/proc"


def test_disk_behind_a_link(tmp_path):
    (tmp_path / "data").mkdir()
    machine = bare_machine(tmp_path)
    machine.link("/srv", "/data")
    assert machine.facts(["/srv/models"])["disks"][0]["mount"] == "/"


def test_models_that_are_there(tmp_path):
    machine = bare_machine(tmp_path)
    store = "/data/models"
    assert machine.facts(models_dir=store)["models"] == []
    machine.write(f"{store}/qwen/abc/model.safetensors", b"0" * 70)
    machine.write(f"{store}/qwen/abc/sub/config.json", b"0" * 7)
    machine.write(f"{store}/qwen/abc/.metalserve.json", b"0" * 1000)
    machine.write(f"{store}/.incoming/qwen@def/model.safetensors.part", b"0" * 30)
    machine.write(f"{store}/.incoming/qwen@def.lock", "")
    assert machine.facts(models_dir=store)["models"] == [
        {"key": "qwen", "revision": "abc", "published": True, "size_bytes": 77},
        {"key": "qwen", "revision": "def", "published": False, "size_bytes": 30},
    ]
    assert machine.facts()["models"] == [], "nobody asked"


def test_deployments_that_have_releases(tmp_path):
    machine = bare_machine(tmp_path)
    machine.write("/etc/metalserve/driver.json", "{}")
    machine.write("/etc/metalserve/qwen/releases/abc/release.json", "{}")
    machine.write("/etc/metalserve/empty/host.env", "")
    assert machine.facts(releases_dir="/etc/metalserve")["deployments"] == ["qwen"]
    assert machine.facts()["deployments"] == [], "nobody asked"


@pytest.mark.parametrize(("value", "state"), [(b"\x06\0\0\0\x01", True), (b"\x06\0\0\0\0", False)])
def test_secure_boot_of_efi(tmp_path, value, state):
    machine = bare_machine(tmp_path)
    machine.write(SECURE_BOOT, value)
    assert machine.facts()["secure_boot"] is state


def test_secure_boot_without_efi_is_off(tmp_path):
    assert bare_machine(tmp_path).facts()["secure_boot"] is False


def test_secure_boot_that_cannot_be_seen(tmp_path):
    machine = bare_machine(tmp_path)
    machine.write("/sys/firmware/efi/fw_platform_size", "64")
    assert machine.facts()["secure_boot"] is None
    hidden = bare_machine(tmp_path / "container")
    (hidden.root / "sys/firmware/acpi").rename(hidden.root / "acpi")
    assert hidden.facts()["secure_boot"] is None


def test_unreadable_parts_cost_only_their_own_facts(tmp_path):
    machine = bare_machine(tmp_path)
    (tmp_path / "proc/cpuinfo").unlink()
    (tmp_path / "proc/meminfo").unlink()
    facts = machine.facts()
    assert facts["cpu"] is facts["memory"] is None
    assert facts["probe_errors"] == [
        {"probe": "cpu", "error": "/proc/cpuinfo: not readable"},
        {"probe": "memory", "error": "/proc/meminfo: not readable"},
    ]


# Listeners

TCP = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 501 1 0 100\n"
    "   1: 0100007F:1F40 0100007F:A000 01 00000000:00000000 00:00000000 00000000     0        0 502 1 0 100\n"
    "   2: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 503 1 0 100\n"
)
TCP6 = (
    "  sl  local_address                         remote_address                        st inode\n"
    "   0: 00000000000000000000000000000000:1F41 00000000000000000000000000000000:0000 0A "
    "00000000:00000000 00:00000000 00000000     0        0 504 1 0 100\n"
)


def a_process(machine, pid, name, targets, environment=b""):
    machine.write(f"/proc/{pid}/comm", name + "\n")
    machine.write(f"/proc/{pid}/environ", environment)
    for number, target in enumerate(targets):
        machine.link(f"/proc/{pid}/fd/{number}", target)


@pytest.mark.skipif(sys.byteorder != "little", reason="the fixture is of a little-endian machine")
def test_listeners_and_their_owners(tmp_path):
    machine = bare_machine(tmp_path)
    machine.write("/proc/net/tcp", TCP)
    machine.write("/proc/net/tcp6", TCP6)
    environment = b"PATH=/bin\0METALSERVE_DEPLOYMENT=qwen\0"
    a_process(machine, 710, "vllm", ["/dev/null", "socket:[501]"], environment)
    a_process(machine, 711, "vllm-worker", ["socket:[501]"], environment)
    a_process(machine, 800, "sglang", ["socket:[504]"], b"XMETALSERVE_DEPLOYMENT=no\0METALSERVE_DEPLOYMENT=\0")
    assert machine.facts()["listening"] == [
        {"address": "0.0.0.0", "port": 22, "pid": None, "process": None, "deployment": None},
        {"address": "127.0.0.1", "port": 8000, "pid": 710, "process": "vllm", "deployment": "qwen"},
        {"address": "::", "port": 8001, "pid": 800, "process": "sglang", "deployment": None},
    ]


def test_processes_that_hold_a_gpu(tmp_path):
    machine = bare_machine(tmp_path)
    a_process(machine, 900, "dcgm-exporter", ["/dev/null", "/dev/nvidiactl", "/dev/nvidia0"])
    a_process(machine, 90, "vllm", ["/dev/nvidia-uvm"], b"METALSERVE_DEPLOYMENT=qwen\0")
    a_process(machine, 91, "editor", ["/root/dev/nvidia0.txt"])
    assert machine.facts()["driver"]["holders"] == [
        {"pid": 90, "process": "vllm", "deployment": "qwen"},
        {"pid": 900, "process": "dcgm-exporter", "deployment": None},
    ]


@pytest.mark.skipif(sys.byteorder != "little", reason="the fixture is of a little-endian machine")
def test_addresses():
    assert decode_address("0100007F") == "127.0.0.1"
    assert decode_address("B80D0120000000000000000001000000") == "2001:db8::1"


def test_a_real_listener_of_this_machine():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = [entry for entry in collect("/")["listening"] if entry["port"] == port]
    # The probes are forks of this process and hold the socket too, so any of them may be named.
    names = {(entry["address"], entry["process"], entry["deployment"]) for entry in found}
    assert names == {
        ("127.0.0.1", Path("/proc/self/comm").read_text().strip(), os.environ.get("METALSERVE_DEPLOYMENT"))
    }


def test_a_real_deployment_of_this_machine():
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True);"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "METALSERVE_DEPLOYMENT": "tiny-1"},
    ) as process:
        port = int(process.stdout.readline())
        found = [entry for entry in collect("/")["listening"] if entry["port"] == port]
        process.stdin.close()
    assert [entry["deployment"] for entry in found] == ["tiny-1"]


# Docker and the container toolkit

SERVER = '{"Client":{"Version":"28.2.2","ApiVersion":"1.41"},"Server":{"Version":"26.1.5","ApiVersion":"1.45"}}'
ABSENT = {"version": None, "api": None, "cdi": None, "running": False, "images": []}


@pytest.mark.parametrize(
    ("info", "cdi"),
    [
        (Output(0, '["/etc/cdi","/var/run/cdi"]\n', ""), True),
        (Output(0, "null\n", ""), False),
        (Output(0, "[]\n", ""), False),
        (Output(1, "", "template: :1:7: can't evaluate field CDISpecDirs in type cli.info"), False),
    ],
)
def test_docker_version_is_the_daemons(tmp_path, info, cdi):
    machine = bare_machine(tmp_path)
    machine.commands["docker", "version"] = Output(0, SERVER + "\n", "")
    machine.commands["docker", "info"] = info
    digest = "sha256:" + "d" * 64
    machine.commands["docker", "image", "ls"] = Output(0, f"vllm/x@{digest}\nb@<none>\n<none>@<none>\n", "")
    facts = machine.facts()
    assert facts["docker"] == {
        "version": "26.1.5", "api": "1.45", "cdi": cdi, "running": True, "images": [f"vllm/x@{digest}"],
    }  # fmt: skip
    assert facts["probe_errors"] == []


def test_docker_absent(tmp_path):
    facts = bare_machine(tmp_path).facts()
    assert facts["docker"] == ABSENT
    assert facts["container_toolkit"] == {"version": None}
    assert facts["probe_errors"] == []


def test_docker_daemon_down(tmp_path):
    machine = bare_machine(tmp_path)
    text = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
    machine.commands["docker", "version"] = Output(
        1, '{"Client":{"Version":"28.2.2","ApiVersion":"1.50"},"Server":null}\n', text + "\n"
    )
    facts = machine.facts()
    assert facts["docker"] == {**ABSENT, "version": "28.2.2", "api": "1.50"}
    assert facts["probe_errors"] == [{"probe": "docker", "error": f"docker version: {text}"}]


def test_docker_that_answers_no_json(tmp_path):
    machine = bare_machine(tmp_path)
    machine.commands["docker", "version"] = Output(127, "", "Emulate Docker CLI: broken\n")
    facts = machine.facts()
    assert facts["docker"] == ABSENT
    assert facts["probe_errors"][0]["error"] == "docker version: Emulate Docker CLI: broken"


def test_docker_that_hangs(tmp_path):
    machine = bare_machine(tmp_path)
    machine.commands["docker",] = ProbeError("docker version: no answer in 10 s")
    facts = machine.facts()
    assert facts["docker"] == ABSENT
    assert facts["probe_errors"] == [{"probe": "docker", "error": "docker version: no answer in 10 s"}]


def test_container_toolkit(tmp_path):
    machine = bare_machine(tmp_path)
    machine.commands["nvidia-ctk", "--version"] = Output(
        0, "NVIDIA Container Toolkit CLI version 1.20.0-rc.1\ncommit: 1234\n", ""
    )
    assert machine.facts()["container_toolkit"] == {"version": "1.20.0-rc.1"}
    machine.commands["nvidia-ctk", "--version"] = Output(1, "", "symbol lookup error\n")
    facts = machine.facts()
    assert facts["container_toolkit"] == {"version": None}
    assert facts["probe_errors"][0]["error"] == "nvidia-ctk --version: symbol lookup error"


# Errors in the kernel's log

LOG = """\
NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.178.04
NVRM: Xid (PCI:0000:3b:00): 13, pid=4711, name=python3, Graphics SM Warp Exception
NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
NVRM: Xid (PCI:0000:3b:00): 13, pid=4712, name=python3, Graphics Exception: ESR 0x1
NVRM: Xid (PCI:0000:86:00 GPU-I:05): 94, pid=99, Contained: SM
NVRM: Xid (PCI:0000:86:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)
nvidia-nvswitch0: SXid (PCI:0000:c5:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error
"""


def test_kernel_errors(tmp_path):
    machine = bare_machine(tmp_path)
    machine.commands[JOURNAL] = Output(0, LOG, "")
    facts = machine.facts()
    assert [(e["code"], e["pci_address"], e["count"]) for e in facts["xid_errors"]] == [
        (13, "0000:3b:00.0", 2),
        (79, "0000:3b:00.0", 1),
        (94, "0000:86:00.0", 1),
        (154, "0000:86:00.0", 1),
    ]
    assert facts["xid_errors"][0]["message"] == "pid=4712, name=python3, Graphics Exception: ESR 0x1"
    assert facts["xid_errors"][1]["message"].endswith("GPU has fallen off the bus.")
    assert [(e["code"], e["pci_address"]) for e in facts["sxid_errors"]] == [(12028, "0000:c5:00.0")]


def test_journal_without_a_gpu_error(tmp_path):
    machine = bare_machine(tmp_path)
    machine.commands["dmesg",] = Output(0, LOG, "")  # of a journal that works, the buffer is not asked
    facts = machine.facts()
    assert facts["xid_errors"] == facts["sxid_errors"] == []
    assert facts["probe_errors"] == []


def test_journal_built_without_patterns(tmp_path):
    machine = bare_machine(tmp_path)
    machine.commands[*JOURNAL, "--grep=S?Xid \\("] = Output(1, "", "Compiled without pattern matching support\n")
    machine.commands[JOURNAL] = Output(0, LOG, "")
    assert len(machine.facts()["xid_errors"]) == 4


def test_silence_of_a_journal_without_kernel_messages_does_not_count(tmp_path):
    machine = bare_machine(tmp_path)
    machine.commands[*JOURNAL, "-n", "1"] = Output(0, "", "")
    machine.commands["dmesg",] = Output(0, "[  101.5] " + LOG.replace("\n", "\n[  102.5] "), "")
    assert len(machine.facts()["xid_errors"]) == 4


def without_a_journal(tmp_path):
    machine = bare_machine(tmp_path)
    del machine.commands[JOURNAL], machine.commands[*JOURNAL, "-n", "1"]
    return machine


def test_kernel_buffer_without_a_journal(tmp_path):
    machine = without_a_journal(tmp_path)
    machine.commands["dmesg",] = Output(0, LOG, "")
    assert len(machine.facts()["xid_errors"]) == 4


def test_kernel_log_that_may_not_be_read(tmp_path):
    machine = without_a_journal(tmp_path)
    machine.commands["dmesg",] = Output(1, "", "dmesg: read kernel buffer failed: Operation not permitted\n")
    facts = machine.facts()
    assert facts["xid_errors"] == []
    assert facts["probe_errors"] == [
        {"probe": "kernel_log", "error": "dmesg: read kernel buffer failed: Operation not permitted"}
    ]
    del machine.commands["dmesg",]
    facts = machine.facts()
    assert facts["probe_errors"][0]["error"] == "the kernel's messages cannot be read: no journalctl, no dmesg"
