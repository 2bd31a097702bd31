"""GPU facts through NVML, by way of nvidia-ml-py's module `pynvml`."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import sys
import types
import zlib
from collections.abc import Callable
from typing import Any, Optional

from .host_pci import link_width, pci_address
from .host_probe import ProbeError

# Values of nvml.h, written out because old bindings miss some of their names.
_NOT_SUPPORTED = 3
_INVALID_ARGUMENT = 2
_LIBRARY_NOT_FOUND = 12
_FUNCTION_NOT_FOUND = 13
_VERSION_MISMATCH = 18
_NOT_THERE = (_INVALID_ARGUMENT, _NOT_SUPPORTED, _FUNCTION_NOT_FOUND)
_MEMORY_V2 = 0x02000028
_MAX_NVLINKS = 36
_NVLINK_TO_GPU = 0
_NVLINK_TO_SWITCH = 2
_P2P_INDEX_NVLINK = 2
_P2P_OK = 0
_FIELD_RECOVERY_ACTION = 230
# In the words of `nvidia-smi -q`.
_RECOVERY_ACTIONS = {
    0: "none",
    1: "reset",
    2: "reboot",
    3: "drain_p2p",
    4: "drain_and_reset",
    5: "recover_imex_domain",
    6: "bus_reset",
    7: "system_reboot",
}
_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
# nvmlClocksEventReasons in the words of `nvidia-smi -q -x`.
_THROTTLE_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clocks_setting",
}
_MEMORY_ERROR_UNCORRECTED = 1
_ECC_AGGREGATE = 1
_MEMORY_LOCATION_SRAM = 7
_FABRIC_STATES = {0: None, 1: "not_started", 2: "in_progress", 3: "completed"}
# nvmlGpuTopologyLevel_t in the words of `nvidia-smi topo -m`. It knows nothing of NVLink.
_ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# Active NVLinks of a GPU: number -> (type, PCI address) of the other end. None where there is no NVLink.
Links = Optional[dict[int, tuple[Optional[int], Optional[str]]]]


class _SramErrors(ctypes.Structure):
    """nvmlEccSramErrorStatus_v1_t of nvml.h, which nvidia-ml-py does not have."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("aggregateUncParity", ctypes.c_ulonglong),
        ("aggregateUncSecDed", ctypes.c_ulonglong),
        ("aggregateCor", ctypes.c_ulonglong),
        ("volatileUncParity", ctypes.c_ulonglong),
        ("volatileUncSecDed", ctypes.c_ulonglong),
        ("volatileCor", ctypes.c_ulonglong),
        ("aggregateUncBucketL2", ctypes.c_ulonglong),
        ("aggregateUncBucketSm", ctypes.c_ulonglong),
        ("aggregateUncBucketPcie", ctypes.c_ulonglong),
        ("aggregateUncBucketMcu", ctypes.c_ulonglong),
        ("aggregateUncBucketOther", ctypes.c_ulonglong),
        ("bThresholdExceeded", ctypes.c_uint),
    )


class NvmlMissingError(ProbeError):
    """There is no NVML library, or no binding to it."""


class NvmlMismatchError(ProbeError):
    """The NVML library and the loaded kernel module are of different versions."""


def load_pynvml(packed: str) -> Any:
    """The module `pynvml` out of its text (zlib, base64); nothing is installed.

    Raises:
        NvmlMissingError: the text does not run on this Python.

    """
    module = types.ModuleType("pynvml")
    # The binding looks itself up by name while it defines its error classes.
    sys.modules["pynvml"] = module
    try:
        exec(compile(zlib.decompress(base64.b64decode(packed)), "pynvml.py", "exec"), module.__dict__)  # noqa: S102
    except Exception as error:
        raise NvmlMissingError(f"pynvml cannot be used: {type(error).__name__}: {error}") from None
    return module


class _Nvml:
    """Calls of one NVML session; what a GPU or a driver does not offer is None."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.errors: list[str] = []

    def call(self, name: str, *arguments: Any, of: str = "") -> Any:
        """Call a function; errors other than "not offered" are noted. Bytes of old bindings become text."""
        function = getattr(self.nvml, name, None)
        return None if function is None else self.attempt(name, lambda: function(*arguments), of=of)

    def attempt(self, name: str, ask: Callable[[], Any], *, of: str = "") -> Any:
        """Ask in a way that the binding has no function for."""
        try:
            answer = ask()
        except AttributeError:
            return None
        except self.nvml.NVMLError as error:
            if error.value not in _NOT_THERE:
                self.errors.append(f"{name}{f' of GPU {of}' if of else ''}: {error}")
            return None
        except Exception as error:  # a binding and a library of different ages disagree in many ways
            self.errors.append(f"{name}{f' of GPU {of}' if of else ''}: {type(error).__name__}: {error}")
            return None
        return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer


def read_nvml(nvml: Any) -> dict[str, Any]:
    """Everything NVML says about the driver, the GPUs and the links between them.

    Returns:
        driver_version, nvml_version, cuda, gpus, links, errors; sizes in bytes.

    Raises:
        NvmlMissingError: there is no NVML library.
        NvmlMismatchError: library and kernel module do not fit.
        ProbeError: NVML does not start for another reason.

    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        kinds = {_LIBRARY_NOT_FOUND: NvmlMissingError, _VERSION_MISMATCH: NvmlMismatchError}
        raise kinds.get(error.value, ProbeError)(f"nvmlInit: {error}") from None
    session = _Nvml(nvml)
    try:
        return _read_all(session)
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _read_all(session: _Nvml) -> dict[str, Any]:
    call = session.call
    cuda = call("nvmlSystemGetCudaDriverVersion_v2")
    handles: list[Any] = []
    gpus: list[dict[str, Any]] = []
    links: list[Links] = []
    for index in range(call("nvmlDeviceGetCount") or 0):
        # A GPU that fell off the bus is often still counted, and then has no handle.
        handle = call("nvmlDeviceGetHandleByIndex", index, of=str(index))
        if handle is None:
            continue
        handles.append(handle)
        links.append(_active_links(session, handle, str(index)))
        gpus.append(_gpu(session, handle, index, links[-1]))
    return {
        "driver_version": call("nvmlSystemGetDriverVersion"),
        "nvml_version": call("nvmlSystemGetNVMLVersion"),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        "gpus": gpus,
        "links": _matrix(session, handles, gpus, links),
        "errors": session.errors,
    }


def _gpu(session: _Nvml, handle: Any, index: int, links: Links) -> dict[str, Any]:
    def call(name: str, *arguments: Any) -> Any:
        return session.call(name, handle, *arguments, of=str(index))

    pci = call("nvmlDeviceGetPciInfo_v3")
    packed_id = getattr(pci, "pciDeviceId", None)
    capability = call("nvmlDeviceGetCudaComputeCapability")
    return {
        "index": index,
        "uuid": call("nvmlDeviceGetUUID"),
        "pci_address": pci_address(_text(getattr(pci, "busId", "")) or ""),
        # The device is in the upper half of the number, the vendor in the lower.
        "pci_id": None if packed_id is None else f"{packed_id & 0xFFFF:04x}:{packed_id >> 16:04x}",
        "name": call("nvmlDeviceGetName"),
        **_memory(call),
        "compute_capability": f"{capability[0]}.{capability[1]}" if capability else None,
        "mig_enabled": _first_is_on(call("nvmlDeviceGetMigMode")),
        "ecc_enabled": _first_is_on(call("nvmlDeviceGetEccMode")),
        "remapped_rows": _remapped_rows(call("nvmlDeviceGetRemappedRows")),
        "nvlink_active": None if links is None else len(links),
        "pcie_width": link_width(call("nvmlDeviceGetCurrPcieLinkWidth")),
        "pcie_max_width": link_width(call("nvmlDeviceGetMaxPcieLinkWidth")),
        "pcie_generation": call("nvmlDeviceGetCurrPcieLinkGeneration"),
        "pcie_max_generation": call("nvmlDeviceGetMaxPcieLinkGeneration"),
        "persistence": _is_on(call("nvmlDeviceGetPersistenceMode")),
        "compute_mode": _COMPUTE_MODES.get(call("nvmlDeviceGetComputeMode")),
        "throttle_reasons": _throttle_reasons(call),
        **_sram_errors(session, handle, index),
        "fabric_state": _fabric_state(session, handle, index),
        "recovery_action": _recovery_action(call("nvmlDeviceGetFieldValues", [_FIELD_RECOVERY_ACTION])),
        "source": "nvml",
    }


def _text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _memory(call: Callable[..., Any]) -> dict[str, int | None]:
    """Memory in bytes.

    Usable = total - reserved. It is the total that CUDA reports (seen on an H200, equal to the byte), and so
    the base of an engine's memory share.
    """
    second = call("nvmlDeviceGetMemoryInfo", _MEMORY_V2)
    if second is not None:
        return {
            "memory_total_bytes": second.total,
            "memory_reserved_bytes": second.reserved,
            "memory_usable_bytes": second.total - second.reserved,
            "memory_used_bytes": second.used,
        }
    # The first version counts the reserve as used, so an idle GPU would look busy: only the total is taken.
    first = call("nvmlDeviceGetMemoryInfo")
    return {
        "memory_total_bytes": None if first is None else first.total,
        "memory_reserved_bytes": None,
        "memory_usable_bytes": None,
        "memory_used_bytes": None,
    }


def _first_is_on(current_and_pending: Any) -> bool | None:
    return None if current_and_pending is None else current_and_pending[0] == 1


def _is_on(value: Any) -> bool | None:
    return None if value is None else value == 1


def _throttle_reasons(call: Callable[..., Any]) -> list[str]:
    bits = call("nvmlDeviceGetCurrentClocksEventReasons")
    if bits is None:
        # The name before driver 535.
        bits = call("nvmlDeviceGetCurrentClocksThrottleReasons")
    return [word for bit, word in _THROTTLE_REASONS.items() if (bits or 0) & bit]


def _sram_errors(session: _Nvml, handle: Any, index: int) -> dict[str, Any]:
    """Uncorrectable errors of the on-chip memory over the GPU's life, and whether they are too many to go on."""
    status = _SramErrors(version=ctypes.sizeof(_SramErrors) | 1 << 24)
    found = getattr(session.nvml, "_nvmlGetFunctionPointer", None)

    def ask() -> int:
        code = int(found("nvmlDeviceGetSramEccErrorStatus")(handle, ctypes.byref(status))) if found else _NOT_SUPPORTED
        if code:
            raise session.nvml.NVMLError(code)
        return 1

    if session.attempt("nvmlDeviceGetSramEccErrorStatus", ask, of=str(index)) is None:
        # Drivers before 550 know the number only.
        number = session.call(
            "nvmlDeviceGetMemoryErrorCounter",
            handle,
            _MEMORY_ERROR_UNCORRECTED,
            _ECC_AGGREGATE,
            _MEMORY_LOCATION_SRAM,
            of=str(index),
        )
        return {"sram_uncorrectable": number, "sram_threshold_exceeded": None}
    return {
        "sram_uncorrectable": status.aggregateUncParity + status.aggregateUncSecDed,
        "sram_threshold_exceeded": bool(status.bThresholdExceeded),
    }


def _remapped_rows(rows: Any) -> dict[str, Any] | None:
    if rows is None:
        return None
    correctable, uncorrectable, pending, failure = rows
    return {
        "correctable": correctable,
        "uncorrectable": uncorrectable,
        "pending": bool(pending),
        "failure": bool(failure),
    }


def _fabric_state(session: _Nvml, handle: Any, index: int) -> str | None:
    """The state of the NVLink fabric registration (Hopper and newer behind NVSwitches)."""
    kind = getattr(session.nvml, "c_nvmlGpuFabricInfoV_t", None)
    if kind is None:
        return None
    info = kind()
    answer = session.call("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info), of=str(index))
    return None if answer is None else _FABRIC_STATES.get(int(info.state))


def _recovery_action(values: Any) -> str | None:
    if not values or values[0].nvmlReturn != 0:
        return None
    number = int(values[0].value.uiVal)
    return _RECOVERY_ACTIONS.get(number, f"unknown_{number}")


def _active_links(session: _Nvml, handle: Any, index: str) -> Links:
    """The NVLinks of a GPU that are up.

    Every number is asked, because the end of the list is told in different ways: a GPU of 18 links refuses
    the nineteenth as an invalid argument, a GPU whose links are hidden from a guest says "not supported".
    """
    active: dict[int, tuple[int | None, str | None]] = {}
    answered = False
    for link in range(_MAX_NVLINKS):
        state = session.call("nvmlDeviceGetNvLinkState", handle, link, of=index)
        if state is None:
            continue
        answered = True
        if state != 1:
            continue
        kind = session.call("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link, of=index)
        other = None
        if kind == _NVLINK_TO_GPU:
            remote = session.call("nvmlDeviceGetNvLinkRemotePciInfo", handle, link, of=index)
            other = pci_address(_text(getattr(remote, "busId", "")) or "")
        active[link] = (kind, other)
    return active if answered else None


def _matrix(
    session: _Nvml, handles: list[Any], gpus: list[dict[str, Any]], links: list[Links]
) -> list[list[str]] | None:
    """How each GPU reaches each other one, in the words of `nvidia-smi topo -m`; "?" where NVML is silent."""
    if not handles:
        return None
    size = len(handles)
    matrix = [["X"] * size for _row in range(size)]
    for row in range(size):
        for column in range(row + 1, size):
            pair = (handles[row], handles[column])
            of = f"{gpus[row]['index']} and {gpus[column]['index']}"
            count = _shared_links(links[row], links[column], gpus[column]["pci_address"])
            if count and session.call("nvmlDeviceGetP2PStatus", *pair, _P2P_INDEX_NVLINK, of=of) in (
                None,
                _P2P_OK,
            ):
                word = f"NV{count}"
            else:
                ancestor = session.call("nvmlDeviceGetTopologyCommonAncestor", *pair, of=of)
                word = _ANCESTORS.get(ancestor, "?")
            matrix[row][column] = matrix[column][row] = word
    return matrix


def _shared_links(one: Links, other: Links, other_address: str | None) -> int:
    """NVLinks between two GPUs: those that end at the other GPU, else those of both that end at a switch."""
    if not one or not other:
        return 0
    direct = sum(address == other_address for kind, address in one.values() if kind == _NVLINK_TO_GPU)
    if direct:
        return direct
    return min(sum(kind == _NVLINK_TO_SWITCH for kind, _address in side.values()) for side in (one, other))
