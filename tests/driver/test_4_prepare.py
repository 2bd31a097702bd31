"""What the stage `prepare` left on the upgraded host: Docker, toolkit, health, and a container with the GPUs."""

from conftest import NEW

# A program needs no more than this of a system to start CUDA.
IMAGE = r"""
set -e
image=/var/tmp/image
mkdir -p $image
cd /
libraries() { ldd "$1" | grep -o '/[^ ]*'; }
ctypes=$(python3 -c 'import _ctypes; print(_ctypes.__file__)')
tar --create --dereference usr/bin/python3 $(libraries /usr/bin/python3) $(libraries "$ctypes") \
  --exclude=__pycache__ --exclude=dist-packages usr/lib/python3.* | tar --extract --directory $image
tar --create --directory $image . | docker import - lab/python:1
"""
CUDA = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
error = cuda.cuInit(0)
cuda.cuDeviceGetCount(ctypes.byref(count))
print(error, count.value)
"""


def test_the_specification_names_the_loaded_driver(host):
    with host.sudo():
        text = host.check_output("cat /var/run/cdi/nvidia.yaml")
    assert f"libcuda.so.{NEW}" in text
    assert "570" not in text


def test_a_container_gets_the_gpus_it_asks_for(host):
    with host.sudo():
        host.check_output("sh -c %s", IMAGE)
        every = "docker run --rm --network none --device nvidia.com/gpu=all lab/python:1 /usr/bin/python3 -c %s"
        assert host.check_output(every, CUDA) == "0 8"
        one = "docker run --rm --network none --device nvidia.com/gpu=3 lab/python:1 /usr/bin/python3 -c %s"
        assert host.check_output(one, CUDA) == "0 1"
        assert (
            host.run("docker run --rm --network none --device nvidia.com/gpu=8 lab/python:1 /usr/bin/python3").rc != 0
        )


def test_a_second_run_changes_nothing(run_playbook_file):
    result = run_playbook_file("playbooks/prepare.yml", {"nvidia_driver_version": NEW})
    assert result.rc == 0, result.end
    assert not result.changed, result.end
