"""Wait until CUDA can be initialised, which is when the driver, its devices and the NVLink fabric are ready."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

# CUresult of cuda.h.
SUCCESS, NO_DEVICE, SYSTEM_NOT_READY, DRIVER_MISMATCH = 0, 100, 802, 803
_MEANINGS = {
    NO_DEVICE: "no CUDA-capable device is detected",
    SYSTEM_NOT_READY: "system not ready: the fabric manager has not finished or does not fit the driver",
    DRIVER_MISMATCH: "the CUDA library and the loaded driver do not fit together",
}
# In a process of its own: a broken library takes it along, and a hung driver keeps it.
_PROGRAM = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
count = ctypes.c_int(0)
code = cuda.cuInit(0)
if code == 0:
    code = cuda.cuDeviceGetCount(ctypes.byref(count))
print(code, count.value)
"""
_ATTEMPT_SECONDS = 60.0

Attempt = Callable[[float], tuple[Optional[int], int, str]]


@dataclass(frozen=True)
class Outcome:
    """How the wait ended. `code` is the last CUresult, None where the library could not be called."""

    ready: bool
    seconds: float
    code: int | None
    devices: int
    message: str


def call_cuda(limit_seconds: float) -> tuple[int | None, int, str]:
    """One attempt: CUresult, number of devices, what went wrong."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    try:
        stdout, stderr = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return None, 0, f"cuInit gave no answer in {limit_seconds:.0f} s"
    words = stdout.split()
    if process.returncode != 0 or len(words) != 2:
        lines = stderr.strip().splitlines()
        return None, 0, lines[-1] if lines else f"the process ended with status {process.returncode}"
    code, devices = int(words[0]), int(words[1])
    return code, devices, "" if code == SUCCESS else f"CUDA error {code}: {_MEANINGS.get(code, 'see cuda.h')}"


def wait_for_cuda(
    devices: int,
    timeout_seconds: float,
    *,
    attempt: Attempt = call_cuda,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Call CUDA until it knows at least so many devices, or the time is over.

    Only what passes by itself is waited for: a fabric that is not ready yet, devices that are not there yet. A
    library that is missing or does not fit ends the wait at once.
    """
    started = clock()
    while True:
        code, found, message = attempt(_ATTEMPT_SECONDS)
        seconds = clock() - started
        if code == SUCCESS and found >= devices:
            return Outcome(True, seconds, code, found, "")
        if code == SUCCESS:
            message = f"CUDA knows {found} of {devices} GPUs"
        passing = code in (SUCCESS, SYSTEM_NOT_READY, NO_DEVICE)
        if not passing or seconds >= timeout_seconds:
            return Outcome(False, seconds, code, found, message)
        sleep(2)
