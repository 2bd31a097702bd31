"""A stand-in for libnvidia-ml.so below the real pynvml: its functions fill the C structures from captured answers."""

# ruff: noqa: N802, N815 - the functions bear the names of the C library
from __future__ import annotations

import base64
import ctypes
import functools
import importlib.util
import zlib
from pathlib import Path
from typing import Any

from metalserve.remote.host_nvml import load_pynvml

ERRORS = {3: b"Not Supported", 9: b"Driver Not Loaded", 13: b"Function Not Found", 15: b"GPU is lost"}


@functools.cache
def packed_pynvml() -> str:
    spec = importlib.util.find_spec("pynvml")
    assert spec
    assert spec.origin
    return base64.b64encode(zlib.compress(Path(spec.origin).read_bytes())).decode()


class Refused(Exception):  # noqa: N818
    def __init__(self, code: int) -> None:
        self.code = code


class NvmlLibrary:
    """Functions are looked up by their C name; a name that is in `without` is not exported by this library."""

    def __init__(self, capture: dict[str, Any], *, init_error: int = 0, without: tuple[str, ...] = ()) -> None:
        self.capture = capture
        self.init_error = init_error
        self.without = without

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or name in self.without or not hasattr(type(self), f"c_{name}"):
            raise AttributeError(name)
        function = getattr(self, f"c_{name}")

        def exported(*arguments: Any) -> Any:
            try:
                return function(*arguments) or 0
            except Refused as refused:
                return refused.code

        return exported

    # Ways from the arguments of C to Python

    def device(self, handle: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.capture["devices"][ctypes.cast(handle, ctypes.c_void_p).value - 1]
        return found

    def answer(self, handle: Any, name: str) -> Any:
        value = self.device(handle).get(name, {"error": 3})
        if isinstance(value, dict) and "error" in value:
            raise Refused(value["error"])
        return value

    def fill(self, handle: Any, name: str, *references: Any) -> None:
        value = self.answer(handle, name)
        values = value if isinstance(value, list) else [value]
        for reference, single in zip(references, values, strict=True):
            reference._obj.value = single

    # The system

    def c_nvmlInitWithFlags(self, _flags: Any) -> int:
        return self.init_error

    def c_nvmlShutdown(self) -> int:
        return 0

    c_nvmlErrorString = staticmethod(lambda code: ERRORS.get(code, b"Unknown Error"))

    def c_nvmlSystemGetDriverVersion(self, buffer: Any, _size: Any) -> None:
        buffer.value = self.capture["nvmlSystemGetDriverVersion"].encode()

    def c_nvmlSystemGetNVMLVersion(self, buffer: Any, _size: Any) -> None:
        buffer.value = self.capture["nvmlSystemGetNVMLVersion"].encode()

    def c_nvmlSystemGetCudaDriverVersion_v2(self, version: Any) -> None:
        version._obj.value = self.capture["nvmlSystemGetCudaDriverVersion_v2"]

    def c_nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = len(self.capture["devices"])

    def c_nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> None:
        if self.capture["devices"][index.value].get("lost"):
            raise Refused(15)
        number = ctypes.c_void_p(index.value + 1)
        ctypes.memmove(ctypes.addressof(handle._obj), ctypes.byref(number), ctypes.sizeof(number))

    # A GPU

    def c_nvmlDeviceGetUUID(self, handle: Any, buffer: Any, _size: Any) -> None:
        buffer.value = self.answer(handle, "nvmlDeviceGetUUID").encode()

    def c_nvmlDeviceGetName(self, handle: Any, buffer: Any, _size: Any) -> None:
        buffer.value = self.answer(handle, "nvmlDeviceGetName").encode()

    def c_nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> None:
        pci = self.answer(handle, "nvmlDeviceGetPciInfo_v3")
        info._obj.busId = pci["busId"].encode()
        info._obj.pciDeviceId = pci["pciDeviceId"]

    def c_nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> None:
        self.fill(handle, "nvmlDeviceGetCudaComputeCapability", major, minor)

    def c_nvmlDeviceGetMemoryInfo(self, handle: Any, info: Any) -> None:
        for name, value in self.answer(handle, "nvmlDeviceGetMemoryInfo").items():
            setattr(info._obj, name, value)

    def c_nvmlDeviceGetMemoryInfo_v2(self, handle: Any, info: Any) -> None:
        memory = self.answer(handle, "memory_v2")
        assert info._obj.version == memory["version"], "asked with a version that the library refuses"
        for name in ("total", "reserved", "free", "used"):
            setattr(info._obj, name, memory[name])

    def c_nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> None:
        self.fill(handle, "nvmlDeviceGetMigMode", current, pending)

    def c_nvmlDeviceGetEccMode(self, handle: Any, current: Any, pending: Any) -> None:
        self.fill(handle, "nvmlDeviceGetEccMode", current, pending)

    def c_nvmlDeviceGetRemappedRows(self, handle: Any, *references: Any) -> None:
        self.fill(handle, "nvmlDeviceGetRemappedRows", *references)

    def c_nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any, width: Any) -> None:
        self.fill(handle, "nvmlDeviceGetCurrPcieLinkWidth", width)

    def c_nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any, width: Any) -> None:
        self.fill(handle, "nvmlDeviceGetMaxPcieLinkWidth", width)

    def c_nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Any, generation: Any) -> None:
        self.fill(handle, "nvmlDeviceGetCurrPcieLinkGeneration", generation)

    def c_nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any, generation: Any) -> None:
        self.fill(handle, "nvmlDeviceGetMaxPcieLinkGeneration", generation)

    def c_nvmlDeviceGetPersistenceMode(self, handle: Any, mode: Any) -> None:
        self.fill(handle, "nvmlDeviceGetPersistenceMode", mode)

    def c_nvmlDeviceGetComputeMode(self, handle: Any, mode: Any) -> None:
        self.fill(handle, "nvmlDeviceGetComputeMode", mode)

    def c_nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any, reasons: Any) -> None:
        self.fill(handle, "nvmlDeviceGetCurrentClocksEventReasons", reasons)

    def c_nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, reasons: Any) -> None:
        self.fill(handle, "nvmlDeviceGetCurrentClocksEventReasons", reasons)

    def c_nvmlDeviceGetSramEccErrorStatus(self, handle: Any, status: Any) -> None:
        # The size of the structure in nvml.h with the version in the upper byte.
        assert status._obj.version == 104 | 1 << 24, "asked with a version that the library refuses"
        for name, value in self.answer(handle, "sram").items():
            setattr(status._obj, name, value)

    def c_nvmlDeviceGetMemoryErrorCounter(self, handle: Any, *which_and_count: Any) -> None:
        *which, count = which_and_count
        assert [int(getattr(part, "value", part)) for part in which] == [1, 1, 7], "uncorrected, aggregate, SRAM"
        count._obj.value = sum(self.answer(handle, "sram").values())

    def c_nvmlDeviceGetGpuFabricInfoV(self, handle: Any, info: Any) -> None:
        info._obj.state = self.answer(handle, "fabric_state")

    def c_nvmlDeviceGetFieldValues(self, handle: Any, count: Any, values: Any) -> None:
        assert count.value == 1
        field = values._obj[0]
        assert field.fieldId == 230
        action = self.device(handle).get("recovery_action")
        field.nvmlReturn = 3 if action is None else 0
        field.value.uiVal = action or 0

    # Links

    def link(self, handle: Any, link: int, name: str) -> Any:
        links = self.device(handle).get("nvlinks", [])
        value = links[link][name] if link < len(links) else {"error": 2 if links else 3}
        if isinstance(value, dict):
            raise Refused(value["error"])
        return value

    def c_nvmlDeviceGetNvLinkState(self, handle: Any, link: int, state: Any) -> None:
        state._obj.value = self.link(handle, link, "state")

    def c_nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int, kind: Any) -> None:
        kind._obj.value = self.link(handle, link, "remote_device_type")

    def c_nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle: Any, link: int, info: Any) -> None:
        info._obj.busId = self.link(handle, link, "remote_pci").encode()

    def pair(self, one: Any, other: Any) -> dict[str, Any]:
        wanted = {ctypes.cast(handle, ctypes.c_void_p).value - 1 for handle in (one, other)}
        for pair in self.capture["pairs"]:
            if {pair["a"], pair["b"]} == wanted:
                return dict(pair)
        raise Refused(3)

    def c_nvmlDeviceGetP2PStatus(self, one: Any, other: Any, index: int, status: Any) -> None:
        names = {0: "read", 1: "write", 2: "nvlink", 3: "atomics"}
        status._obj.value = self.pair(one, other)["p2p"][names[index]]

    def c_nvmlDeviceGetTopologyCommonAncestor(self, one: Any, other: Any, level: Any) -> None:
        level._obj.value = self.pair(one, other)["topology_common_ancestor"]


@functools.cache
def binding() -> Any:
    """The real binding, loaded the way it travels to a host."""
    return load_pynvml(packed_pynvml())


def pynvml_over(library: NvmlLibrary) -> Any:
    """The real binding on top of the stand-in library. For the process of one probe: the binding is shared."""
    module = binding()
    module.nvmlLib = library
    return module
