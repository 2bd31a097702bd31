"""Before an engine starts: its GPUs' memory is free, the CPUs near them are known, its key is at hand."""

from __future__ import annotations

import json

import pytest

from metalserve.remote.engine_start import placement, prepare_start, read_gpus, wait_for_memory

GIB = 1024**3
DIGEST = "sha256:" + "d" * 64
# nvidia-smi 580 with the options that are used.
GPUS = "0, GPU-aaaa, 00000000:1A:00.0, {0}\n1, GPU-bbbb, 00000000:3D:00.0, {1}\n2, GPU-cccc, 00000000:9A:00.0, 81000\n"
PROCESSES = "GPU-bbbb, 4711, /usr/bin/python3, 70000\nGPU-cccc, 9, other, 5\n"


class Machine:
    """nvidia-smi whose GPUs become free at the given look."""

    def __init__(self, *free_mib, gpus=GPUS):
        self.free_mib = list(free_mib)
        self.gpus = gpus
        self.looks = 0

    def __call__(self, argv):
        if "compute-apps" in argv[1]:
            return PROCESSES
        free = self.free_mib[min(self.looks, len(self.free_mib) - 1)]
        self.looks += 1
        return self.gpus.format(*free)


def release(*gpus, share=0.9, environment=None):
    plan = {"gpus_used": list(gpus), "gpu_memory_utilization": share, "gpu_memory_bytes": 80 * GIB}
    return {"plan": plan, "environment": environment or {}}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def wait(machine, record, timeout_seconds=60):
    clock = Clock()
    return wait_for_memory(record, timeout_seconds, run=machine, clock=clock, sleep=clock.sleep)


FULL, FREE = (81000, 9000), (81000, 81000)


def test_memory_that_is_free_is_not_waited_for():
    assert wait(Machine(FREE), release(0, 1)) == (True, "72.0 GiB are free on each GPU of the release after 0 s")


def test_memory_that_becomes_free_is_waited_for():
    machine = Machine(FULL, FULL, FREE)
    assert wait(machine, release(0, 1)) == (True, "72.0 GiB are free on each GPU of the release after 4 s")
    assert machine.looks == 3


def test_memory_that_stays_taken_names_who_has_it():
    ready, sentence = wait(Machine(FULL), release(0, 1))
    assert ready is False
    assert "GPU 1 has 8.8 GiB free after 60 s" in sentence
    assert "process /usr/bin/python3 (pid 4711) holds 70000 MiB of GPU 1" in sentence
    assert "other" not in sentence.replace("/usr/bin", "")
    assert "Needed: 72.0 GiB free on each. Change: end that process" in sentence


@pytest.mark.parametrize("record", [release(), release(0, share=None), {}], ids=["cpu", "no share", "no plan"])
def test_without_a_known_need_nothing_is_waited_for(record):
    machine = Machine(FULL)
    assert wait(machine, record)[0] is True
    assert machine.looks == 0


def test_gpus_of_others_do_not_count():
    assert wait(Machine((81000, 9000)), release(0, 2))[0] is True


def test_a_host_whose_driver_says_nothing_goes_on():
    ready, sentence = wait(Machine((), gpus=""), release(0))
    assert ready
    assert "the engine will say what is wrong" in sentence


def test_the_rows_of_nvidia_smi():
    gpu, *_ = read_gpus(Machine(FREE))
    assert (gpu.index, gpu.uuid, gpu.pci_address, gpu.free_bytes) == (0, "GPU-aaaa", "0000:1a:00.0", 81000 * 1024**2)
    assert read_gpus(lambda _: "No devices were found\n0, GPU, 1, [N/A]\n") == []


@pytest.fixture
def sysfs(tmp_path):
    def write(path, text):
        (tmp_path / "sys" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / path).write_text(text + "\n")

    write("devices/system/node/node0/cpulist", "0-31,64-95")
    write("devices/system/node/node1/cpulist", "32-63,96-127")
    for address, node in (("0000:1a:00.0", 0), ("0000:3d:00.0", 0), ("0000:9a:00.0", 1)):
        write(f"bus/pci/devices/{address}/numa_node", str(node))
    return tmp_path / "sys"


def test_gpus_of_one_node_get_its_cpus(sysfs):
    assert placement(release(0, 1), run=Machine(FREE), sysfs=sysfs) == "0-31,64-95"
    assert placement(release(2), run=Machine(FREE), sysfs=sysfs) == "32-63,96-127"


def test_no_placement_over_several_nodes_or_where_there_is_one_or_none_is_known(sysfs):
    assert placement(release(0, 2), run=Machine(FREE), sysfs=sysfs) is None
    assert placement(release(), run=Machine(FREE), sysfs=sysfs) is None
    (sysfs / "bus/pci/devices/0000:1a:00.0/numa_node").write_text("-1\n")
    assert placement(release(0), run=Machine(FREE), sysfs=sysfs) is None
    (sysfs / "devices/system/node/node1/cpulist").unlink()
    (sysfs / "devices/system/node/node1").rmdir()
    assert placement(release(1), run=Machine(FREE), sysfs=sysfs) is None


def prepare(tmp_path, record, machine, sysfs):
    (tmp_path / "current").mkdir(exist_ok=True)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "current" / "release.json").write_text(json.dumps(record))
    return prepare_start(tmp_path / "current", tmp_path / "run", 0, run=machine, sysfs=sysfs)


def test_what_the_unit_reads_is_written(tmp_path, sysfs):
    (tmp_path / "key").write_text("sk-abc\n")
    record = release(0, environment={"METALSERVE_API_KEY_FILE": str(tmp_path / "key")})
    assert prepare(tmp_path, record, Machine(FREE), sysfs)[0] is True
    assert (tmp_path / "run" / "placement.env").read_text() == "METALSERVE_PLACEMENT=--cpuset-cpus=0-31,64-95\n"
    secret = tmp_path / "run" / "secret.env"
    assert secret.read_text() == "VLLM_API_KEY=sk-abc\n"
    assert secret.stat().st_mode & 0o777 == 0o600


def test_without_gpus_and_key_the_files_are_there_and_say_nothing(tmp_path, sysfs):
    assert prepare(tmp_path, release(), Machine(FREE), sysfs) == (True, ["no GPU memory to wait for"])
    assert (tmp_path / "run" / "placement.env").read_text() == "METALSERVE_PLACEMENT=\n"
    assert (tmp_path / "run" / "secret.env").read_text() == ""


@pytest.mark.parametrize(
    ("here", "line"),
    [
        ("vllm/vllm-openai", ""),
        ("127.0.0.1:8749/vllm/vllm-openai", f"METALSERVE_IMAGE=127.0.0.1:8749/vllm/vllm-openai@{DIGEST}\n"),
        ("other/image", f"METALSERVE_IMAGE=other/image@{DIGEST}\n"),
    ],
)
def test_an_image_that_has_another_name_here_is_named_for_the_unit(tmp_path, sysfs, here, line):
    row = json.dumps({"Repository": here, "Tag": "<none>", "Digest": DIGEST, "CreatedAt": ""})

    def machine(argv):
        return row if argv[0] == "docker" else ""

    prepare(tmp_path, {**release(), "image": f"vllm/vllm-openai@{DIGEST}"}, machine, sysfs)
    assert (tmp_path / "run" / "placement.env").read_text() == f"METALSERVE_PLACEMENT=\n{line}"


def test_a_key_file_without_a_key_stops_the_start(tmp_path, sysfs):
    record = release(environment={"METALSERVE_API_KEY_FILE": str(tmp_path / "none")})
    with pytest.raises(ValueError, match="cannot be read"):
        prepare(tmp_path, record, Machine(FREE), sysfs)
