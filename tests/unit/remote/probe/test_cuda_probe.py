"""The program that runs in a container, on a CUDA library that answers as told."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest

from metalserve.remote import cuda_probe


class CudaLibrary:
    """Functions of the driver library; an error is returned where `errors` names one."""

    def __init__(self, gpus=2, errors=None, broken=False):
        self.gpus, self.errors, self.broken = gpus, errors or {}, broken
        self.released = 0

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*arguments):
            if name in self.errors:
                return self.errors[name]
            return getattr(self, f"c_{name}", lambda *_arguments: 0)(*arguments) or 0

        return function

    def c_cuGetErrorName(self, code, text):  # noqa: N802
        names = {802: b"CUDA_ERROR_SYSTEM_NOT_READY"}
        if code not in names:
            return 1
        text._obj.value = names[code]
        return 0

    def c_cuDriverGetVersion(self, value):  # noqa: N802
        value._obj.value = 13000

    def c_cuDeviceGetCount(self, value):  # noqa: N802
        value._obj.value = self.gpus

    def c_cuDeviceGetName(self, name, _size, _device):  # noqa: N802
        name.value = b"NVIDIA H800"

    def c_cuDeviceGetUuid(self, uuid, _device):  # noqa: N802
        uuid[:] = range(16)

    def c_cuDeviceTotalMem_v2(self, total, _device):  # noqa: N802
        total._obj.value = 85 << 30

    def c_cuDevicePrimaryCtxRelease_v2(self, _device):  # noqa: N802
        self.released += 1

    def c_cuMemcpyDtoH_v2(self, back, _memory, size):  # noqa: N802
        ctypes.memset(back, cuda_probe.PATTERN, size.value - (1 if self.broken else 0))


@pytest.fixture
def library(monkeypatch):
    def install(**settings):
        made = CudaLibrary(**settings)
        monkeypatch.setattr(cuda_probe.ctypes, "CDLL", lambda _path: made)
        return made

    return install


def test_every_gpu_is_written_and_read(library):
    made = library(gpus=2)
    answer = cuda_probe.run_probe()
    assert answer["ok"]
    assert answer["cuda"] == 13000
    assert [device["index"] for device in answer["devices"]] == [0, 1]
    assert answer["devices"][0] == {
        "index": 0,
        "name": "NVIDIA H800",
        "uuid": "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f",
        "memory_total_bytes": 85 << 30,
        "memory_works": True,
    }
    assert made.released == 2


def test_memory_that_gives_back_other_bytes(library):
    library(gpus=1, broken=True)
    assert [device["memory_works"] for device in cuda_probe.run_probe()["devices"]] == [False]


def test_cuda_that_cannot_be_initialised(library):
    library(errors={"cuInit": 802})
    answer = cuda_probe.run_probe()
    assert not answer["ok"]
    assert answer["error"] == {"call": "cuInit", "code": 802, "name": "CUDA_ERROR_SYSTEM_NOT_READY"}


def test_an_error_without_a_name(library):
    library(errors={"cuInit": 4242})
    assert cuda_probe.run_probe()["error"] == {"call": "cuInit", "code": 4242, "name": None}


def test_a_context_is_released_also_after_an_error(library):
    made = library(gpus=1, errors={"cuMemAlloc_v2": 2})
    assert cuda_probe.run_probe()["error"]["call"] == "cuMemAlloc_v2"
    assert made.released == 1


def test_without_a_library_the_answer_says_so():
    """As a program, and alone: this is how it is sent into a container."""
    program = Path(cuda_probe.__file__).read_text(encoding="utf-8")
    process = subprocess.run(
        [sys.executable, "-I", "-", "libcuda-that-is-not-there.so.1"],
        input=program,
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(process.stdout)
    assert not answer["ok"]
    assert answer["error"]["call"] == "load"
    assert "libcuda-that-is-not-there.so.1" in answer["error"]["text"]
