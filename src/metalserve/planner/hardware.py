"""The GPUs of a host as the planner sees them, and what their compute capability allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metalserve.catalogue import gpu_by_pci_id
from metalserve.errors import Refusal
from metalserve.planner.assign import gpu_rows, pick_gpus
from metalserve.planner.plan_types import Wishes
from metalserve.planner.shape import Shape
from metalserve.planner.units import gib

# Least compute capability x 10 of a weight format (vLLM 0.33 get_min_capability; SGLang 0.5.23, sections of its
# quantisation classes).
_MINIMUM_VLLM = {
    "fp8": 75,
    "awq": 75,
    "gptq": 75,
    "compressed-tensors": 75,
    "modelopt": 75,
    "mxfp4": 80,
    "auto-round": 75,
}
_MINIMUM_SGLANG = {
    "fp8": 80,
    "awq": 80,
    "gptq": 80,
    "compressed-tensors": 80,
    "modelopt": 80,
    "mxfp4": 80,
    "auto-round": 80,
}


@dataclass(frozen=True)
class Gpus:
    """The GPUs a deployment owns. Bytes are those of the smallest one."""

    indexes: tuple[int, ...]
    names: tuple[str, ...]
    usable_bytes: int
    total_bytes: int
    used_bytes: int
    capability: int
    """Compute capability x 10 of the least capable one; 0 when unknown."""
    nvlink: bool
    """Whether every pair is joined by NVLink."""
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the first GPU."""
        return self.names[0]


def chosen_gpus(host: Mapping[str, Any], wishes: Wishes) -> Gpus:
    """The GPUs that the wishes name, checked.

    Memory is the usable total, not what is free now, unless `keep_used_memory` is set. When the driver does not
    answer yet, the catalogue's figures for the PCI id are taken.

    Raises:
        Refusal: an index the host does not have, MIG on, or memory that is not known.
    """
    rows = gpu_rows(host)
    wanted: tuple[int, ...]
    if isinstance(wishes.gpus, int):
        wanted = pick_gpus(host, wishes.gpus)
    else:
        wanted = tuple(sorted(rows)) if isinstance(wishes.gpus, str) else tuple(sorted(wishes.gpus))
    missing = [index for index in wanted if index not in rows]
    if missing:
        raise Refusal(
            found=f"GPU {missing[0]} is wished for, the host has {len(rows)} ({', '.join(map(str, sorted(rows)))})",
            needed="indexes of GPUs the host has",
            change="set `gpus`",
        )
    notes: list[str] = []
    if isinstance(wishes.gpus, int) and len(wanted) < len(rows):
        notes.append(f"{wishes.gpus} of {len(rows)} wished for; these are joined best")
    usable, totals, used, capabilities, names = [], [], [], [], []
    for index in wanted:
        row = rows[index]
        if row.get("mig_enabled"):
            raise Refusal(
                found=f"GPU {index} ({row.get('name')}) has MIG enabled",
                needed="whole GPUs: a plan for slices is not made here",
                change=f"disable MIG on GPU {index}, or leave it out of `gpus`",
            )
        known = gpu_by_pci_id(row.get("pci_id"))
        if row.get("memory_usable_bytes"):
            usable.append(int(row["memory_usable_bytes"]))
            totals.append(int(row.get("memory_total_bytes") or row["memory_usable_bytes"]))
        elif known:
            usable.append(known.memory_usable_bytes)
            totals.append(known.memory_total_bytes)
            note = (
                "the driver does not answer, so the memory is the catalogue's "
                f"for {known.name} ({known.memory_sureness})"
            )
            if note not in notes:
                notes.append(note)
        else:
            raise Refusal(
                found=f"the memory of GPU {index} ({row.get('name') or row.get('pci_id')}) is not known",
                needed="a driver that answers, or a GPU of the catalogue",
                change="prepare the driver first, or add the GPU to the catalogue",
            )
        used.append(int(row.get("memory_used_bytes") or 0))
        capability = row.get("compute_capability") or (known.compute_capability if known else None)
        capabilities.append(int(str(capability).replace(".", "")) if capability else 0)
        names.append(str(row.get("name") or (known.name if known else row.get("pci_id"))))
    if len(set(names)) > 1 or max(usable) - min(usable) > max(usable) // 100:
        notes.append(
            f"the GPUs differ ({', '.join(sorted(set(names)))}); "
            f"every one is planned as the smallest, {gib(min(usable))}"
        )
    return Gpus(
        indexes=wanted,
        names=tuple(names),
        usable_bytes=min(usable),
        total_bytes=min(totals),
        used_bytes=max(used) if wishes.keep_used_memory else 0,
        capability=min(capabilities),
        nvlink=_all_nvlink(host.get("links"), wanted, sorted(rows)),
        notes=tuple(notes),
    )


def check_capability(shape: Shape, gpus: Gpus, engine: str, kv_cache_dtype: str) -> None:
    """Compare the GPU with the weight format, the data type and the KV data type.

    Raises:
        Refusal: the GPU is too old for one of them.
    """
    if not gpus.capability:
        return
    text = f"{gpus.capability // 10}.{gpus.capability % 10}"
    method = shape.quantization.method if shape.quantization else None
    minimum = (_MINIMUM_SGLANG if engine == "sglang" else _MINIMUM_VLLM).get(method or "", 75)
    if engine == "sglang":
        minimum = max(minimum, 80)
    if gpus.capability < minimum:
        raise Refusal(
            found=f"{gpus.name} has compute capability {text}",
            needed=f"{minimum // 10}.{minimum % 10} for {method or '16-bit'} weights under {engine}",
            change="plan another host, or a model in another format",
        )
    if gpus.capability < 80 and shape.dtype == "bfloat16" and method is None:
        raise Refusal(
            found=f"{gpus.name} has compute capability {text}, the checkpoint is bfloat16",
            needed="8.0 for bfloat16",
            change="plan a newer GPU",
        )
    if kv_cache_dtype == "fp8" and gpus.capability < 80:
        raise Refusal(
            found=f"{gpus.name} has compute capability {text}",
            needed="8.0 for an FP8 KV cache (8.9 for native FP8; 8.0 and 8.6 work through FlashInfer)",
            change="set `kv_cache_dtype` to auto",
        )


def default_batched_tokens(gpus: Gpus) -> int:
    """The engine's own max_num_batched_tokens (vLLM 0.32/0.33 engine/arg_utils.py:get_batch_defaults).

    The test for A100 is one on the name; a large batch was slower there (vllm-project/vllm#17885).
    """
    if gpus.usable_bytes >= 160 << 30:
        return 16384
    if gpus.usable_bytes >= 70 << 30 and "a100" not in gpus.name.lower():
        return 8192
    return 2048


def _all_nvlink(links: Sequence[Sequence[str]] | None, wanted: Sequence[int], order: Sequence[int]) -> bool:
    if not links or len(wanted) < 2:
        return False
    places = [order.index(index) for index in wanted]
    return all(str(links[a][b]).startswith("NV") for a in places for b in places if a != b)
