"""A real CUDA initialisation, in one file that is sent into a container: `python3 - < cuda_probe.py`.

nvidia-smi only asks the management library. An engine needs the CUDA driver library: it may be the wrong one (a
compatibility library of the image), the fabric may not be ready, or the container may have lost its devices. So this
initialises CUDA, and on each GPU writes a megabyte and reads it back. The answer is one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys

LIBRARY = "libcuda.so.1"
SIZE_BYTES = 1 << 20
PATTERN = 0xA5


class CudaError(Exception):
    """A call of the CUDA driver library that did not return 0."""

    def __init__(self, call: str, code: int, name: str | None) -> None:
        super().__init__(f"{call} returned {code} ({name})")
        self.call, self.code, self.name = call, code, name


class Cuda:
    """The driver library; every call is checked."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the library.

        Raises:
            CudaError: it returned an error.
            AttributeError: the library has no such function.

        """
        code = getattr(self.library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            known = self.library.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value
            raise CudaError(name, code, text.value.decode() if known and text.value else None)

    def number(self, name: str) -> int:
        """Call a function that gives one whole number."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value))
        return value.value


def check_device(cuda: Cuda, index: int) -> dict[str, object]:
    """Name, UUID and memory of a GPU, after a megabyte has been written there and read back."""
    device = ctypes.c_int()
    cuda.call("cuDeviceGet", ctypes.byref(device), index)
    name = ctypes.create_string_buffer(256)
    cuda.call("cuDeviceGetName", name, len(name), device)
    uuid = (ctypes.c_ubyte * 16)()
    cuda.call("cuDeviceGetUuid", uuid, device)
    total = ctypes.c_size_t()
    cuda.call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
    context = ctypes.c_void_p()
    cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        cuda.call("cuCtxSetCurrent", context)
        memory = ctypes.c_uint64()
        cuda.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(SIZE_BYTES))
        cuda.call("cuMemsetD8_v2", memory, ctypes.c_ubyte(PATTERN), ctypes.c_size_t(SIZE_BYTES))
        back = ctypes.create_string_buffer(SIZE_BYTES)
        cuda.call("cuMemcpyDtoH_v2", back, memory, ctypes.c_size_t(SIZE_BYTES))
        cuda.call("cuMemFree_v2", memory)
    finally:
        cuda.call("cuDevicePrimaryCtxRelease_v2", device)
    digits = bytes(uuid).hex()
    return {
        "index": index,
        "name": name.value.decode("utf-8", "replace"),
        "uuid": "GPU-" + "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))),
        "memory_total_bytes": total.value,
        "memory_works": back.raw == bytes([PATTERN]) * SIZE_BYTES,
    }


def loaded_library() -> str | None:
    """The file that is behind the name: the host's driver, or a compatibility library of the image."""
    with open("/proc/self/maps", encoding="utf-8") as maps:  # noqa: PTH123
        for line in maps:
            if "/libcuda.so" in line:
                return os.path.realpath(line.split(maxsplit=5)[5].strip())
    return None


def run_probe(path: str = LIBRARY) -> dict[str, object]:
    """What CUDA says in this container.

    Returns:
        ok; error (call, code, name or text) where it failed; library (the file that was loaded), cuda (the
        level it supports, 13000 for 13.0), devices, and nodes: the GPU devices that are in /dev.

    """
    answer: dict[str, object] = {
        "ok": False,
        "error": None,
        "library": None,
        "cuda": None,
        "devices": [],
        "nodes": sorted(name for name in os.listdir("/dev") if re.match(r"^nvidia\d+$", name)),  # noqa: PTH208
    }
    try:
        cuda = Cuda(path)
        answer["library"] = loaded_library()
        cuda.call("cuInit", 0)
        answer["cuda"] = cuda.number("cuDriverGetVersion")
        answer["devices"] = [check_device(cuda, index) for index in range(cuda.number("cuDeviceGetCount"))]
        answer["ok"] = True
    except CudaError as error:
        answer["error"] = {"call": error.call, "code": error.code, "name": error.name}
    except (OSError, AttributeError) as error:
        answer["error"] = {"call": "load", "code": None, "name": None, "text": str(error)}
    return answer


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run_probe(*sys.argv[1:2])) + "\n")
