"""The catalogue: models and GPUs as data, with the checks that a new entry must pass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from metalserve.errors import Refusal

FORMATS = ("bf16", "fp8", "awq", "gptq", "compressed-tensors", "modelopt", "mxfp4", "auto-round")
ENGINES = ("vllm", "sglang")
MIB = 1 << 20
GIB = 1 << 30

_DATA = Path(__file__).parent
_KEY = re.compile(r"^[a-z0-9]([a-z0-9._-]{0,78}[a-z0-9])?$")
_VERSION = re.compile(r"^\d+(\.\d+)*$")
_MODEL_FIELDS = (
    "repositories",
    "revision",
    "format",
    "context_length",
    "parsers",
    "minimum_versions",
    "shape",
    "sources",
    "notes",
)
_GPU_COUNT = re.compile(r"^(?:(\d+)\s*[xX]\s*)?([A-Za-z][A-Za-z0-9 ._-]*|\d{4})$")
_CPU_SHAPE = re.compile(r"^cpu-(\d+)GiB$", re.IGNORECASE)


@dataclass(frozen=True)
class Parsers:
    """Names one engine gives to its parsers of this model; None where no source names one."""

    tool_call: str | None
    reasoning: str | None


@dataclass(frozen=True)
class Model:
    """One checkpoint format of one model.

    `shape` holds the fields of config.json that decide memory, under their original names.
    `context_length_tokens` is the length the checkpoint was trained for.
    """

    key: str
    repositories: Mapping[str, str | None]
    revision: str | None
    format: str
    context_length_tokens: int
    parsers: Mapping[str, Parsers]
    minimum_versions: Mapping[str, str | None]
    shape: Mapping[str, Any]
    sources: tuple[str, ...]
    notes: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The entry in the form of models.yaml, of plain types."""
        return {
            "repositories": dict(self.repositories),
            "revision": self.revision,
            "format": self.format,
            "context_length": self.context_length_tokens,
            "parsers": {
                engine: {"tool_call": parsers.tool_call, "reasoning": parsers.reasoning}
                for engine, parsers in self.parsers.items()
            },
            "minimum_versions": dict(self.minimum_versions),
            "shape": _plain(self.shape),
            "sources": list(self.sources),
            "notes": self.notes,
        }


@dataclass(frozen=True)
class Gpu:
    """One GPU product. `usable_bytes` is what CUDA reports as total: NVML total minus NVML reserved."""

    key: str
    name: str
    aliases: tuple[str, ...]
    pci_ids: tuple[str, ...]
    form: str
    compute_capability: str
    memory_total_bytes: int
    memory_usable_bytes: int
    memory_sureness: str
    memory_source: str
    nvlink_links: int


def models(extra: Mapping[str, Any] | None = None) -> dict[str, Model]:
    """All models by key: the catalogue's own and those of `extra`, which win.

    `extra` maps keys to entries with the fields of models.yaml; only `format`, `context_length` and `shape`
    are required there.

    Raises:
        Refusal: an entry of `extra` is incomplete or contradicts itself.
    """
    merged = dict(_own_models())
    for key, entry in (extra or {}).items():
        merged[str(key)] = _read_model(str(key), entry)
    return merged


def model(key: str, extra: Mapping[str, Any] | None = None) -> Model:
    """The model of that key.

    Raises:
        Refusal: unknown key; names the closest ones.
    """
    known = models(extra)
    if key in known:
        return known[key]
    close = get_close_matches(key.lower(), known, n=3, cutoff=0.4)
    raise Refusal(
        found=f"model {key!r} is not in the catalogue",
        needed="one of its keys" + (f", the closest are {', '.join(close)}" if close else ""),
        change="set `model` to a known key, or describe the model in `serving_models`",
    )


@lru_cache(maxsize=1)
def _gpus() -> Mapping[str, Gpu]:
    raw = _load("gpus.yaml")
    return MappingProxyType(
        {
            key: Gpu(
                key=key,
                name=entry["name"],
                aliases=tuple(entry["aliases"]),
                pci_ids=tuple(entry["pci_ids"]),
                form=entry["form"],
                compute_capability=entry["compute_capability"],
                memory_total_bytes=int(entry["memory_total_mib"] * MIB),
                memory_usable_bytes=int(entry["memory_usable_mib"] * MIB),
                memory_sureness=entry["memory_sureness"],
                memory_source=entry["memory_source"],
                nvlink_links=entry["nvlink_links"],
            )
            for key, entry in raw.items()
        }
    )


def gpus() -> dict[str, Gpu]:
    """All GPUs by key."""
    return dict(_gpus())


def gpu_by_pci_id(pci_id: str | None) -> Gpu | None:
    """The GPU with that PCI id (`10de:2335`), or None."""
    wanted = (pci_id or "").lower()
    return next((gpu for gpu in _gpus().values() if wanted in gpu.pci_ids), None)


def gpu(name: str) -> Gpu:
    """The GPU of that key or alias, in any case.

    Raises:
        Refusal: unknown name; names the closest ones.
    """
    names = {label.lower(): entry for entry in _gpus().values() for label in (entry.key, *entry.aliases)}
    wanted = name.strip().lower().removeprefix("nvidia ").replace(" ", "-").replace("_", "-")
    if wanted in names:
        return names[wanted]
    close = get_close_matches(wanted, names, n=3, cutoff=0.4)
    raise Refusal(
        found=f"GPU {name!r} is not in the catalogue",
        needed="one of its names" + (f", the closest are {', '.join(names[n].key for n in close)}" if close else ""),
        change="write the shape as COUNTxNAME, for example 8xH800",
    )


def host_from_shape(shape: str) -> dict[str, Any]:
    """Simulated host facts for a shape such as `8xH800`, `1xL40S` or `cpu-24GiB`.

    The result has the structure of the host facts that a real host reports. NVLink boards get full links
    between all GPUs, PCIe cards none.

    Raises:
        Refusal: the shape cannot be read, or names an unknown GPU.
    """
    if match := _CPU_SHAPE.match(shape.strip()):
        return _host([], None, int(match[1]) * GIB)
    match = _GPU_COUNT.match(shape.strip())
    count = int(match[1] or 1) if match else 0
    if not match or count < 1:
        raise Refusal(
            found=f"{shape!r} is not a host shape",
            needed="COUNTxGPU with a count of at least 1, or cpu-SIZEGiB",
            change="write for example 8xH800, 2xA100-SXM4-80GB or cpu-24GiB",
        )
    card = gpu(match[2])
    rows = [
        {
            "index": index,
            "uuid": f"GPU-00000000-0000-0000-0000-{index:012d}",
            "pci_address": f"0000:{0x10 + index:02x}:00.0",
            "pci_id": card.pci_ids[0] if card.pci_ids else None,
            "name": card.name,
            "memory_total_bytes": card.memory_total_bytes,
            "memory_reserved_bytes": card.memory_total_bytes - card.memory_usable_bytes,
            "memory_usable_bytes": card.memory_usable_bytes,
            "memory_used_bytes": 0,
            "compute_capability": card.compute_capability,
            "mig_enabled": False,
            "ecc_enabled": True,
            "remapped_rows": {"correctable": 0, "uncorrectable": 0, "pending": False, "failure": False},
            "nvlink_active": card.nvlink_links if count > 1 else 0,
            "numa_node": 0 if index < (count + 1) // 2 else 1,
            "pcie_width": 16,
            "pcie_max_width": 16,
            "source": "nvml",
        }
        for index in range(count)
    ]
    kind = f"NV{card.nvlink_links}" if card.nvlink_links else "SYS"
    links = [["X" if a == b else kind for b in range(count)] for a in range(count)]
    return _host(rows, links, 1024 * GIB)


def _host(rows: list[dict[str, Any]], links: list[list[str]] | None, memory_bytes: int) -> dict[str, Any]:
    return {
        "schema": 1,
        "kernel": "simulated",
        "architecture": "x86_64",
        "cpu": {
            "model": "simulated",
            "sockets": 1,
            "cores": 8,
            "threads": 16,
            "instruction_sets": ["avx2", "avx512f", "avx512_bf16"],
        },
        "memory": {
            "total_bytes": memory_bytes,
            "available_bytes": memory_bytes,
            "numa_nodes": [{"node": 0, "total_bytes": memory_bytes}],
        },
        "gpus": rows,
        "links": links,
    }


@lru_cache(maxsize=1)
def _own_models() -> Mapping[str, Model]:
    return MappingProxyType({key: _read_model(key, entry) for key, entry in _load("models.yaml").items()})


def _load(name: str) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loaded: dict[str, Any] = yaml.load((_DATA / name).read_text(encoding="utf-8"), Loader=loader)  # noqa: S506
    return loaded


def _read_model(key: str, entry: object) -> Model:
    """Check one entry and freeze it.

    Raises:
        Refusal: with the field that is wrong, and what it must be.
    """

    def refuse(found: str, needed: str) -> Refusal:
        return Refusal(
            found=f"model {key!r} {found}", needed=needed, change=f"correct the entry {key!r} in `serving_models`"
        )

    if not _KEY.match(key):
        raise refuse("has a key that cannot be a directory name", "lower-case letters, digits, dots and dashes")
    if not isinstance(entry, Mapping):
        raise refuse(f"is described by a {type(entry).__name__}", f"a mapping with {', '.join(_MODEL_FIELDS)}")
    unknown = sorted(set(entry) - set(_MODEL_FIELDS))
    if unknown:
        raise refuse(f"has the unknown field {unknown[0]!r}", f"only {', '.join(_MODEL_FIELDS)}")
    if entry.get("format") not in FORMATS:
        raise refuse(f"has the format {entry.get('format')!r}", f"one of {', '.join(FORMATS)}")
    context = entry.get("context_length")
    if not isinstance(context, int) or isinstance(context, bool) or context < 1:
        raise refuse(f"has the context_length {context!r}", "a whole number of tokens, at least 1")
    shape = entry.get("shape")
    if not isinstance(shape, Mapping) or not shape:
        raise refuse("has no shape", "the fields of its config.json under `shape`")
    method = (shape.get("quantization_config") or {}).get("quant_method", "bf16")
    if method != entry["format"]:
        raise refuse(
            f"says format {entry['format']}, its shape says {method}",
            "the same in both: `format` is bf16, or the quant_method of quantization_config",
        )
    repositories = entry.get("repositories") or {}
    stray = sorted(set(repositories) - {"huggingface", "modelscope"})
    if stray:
        raise refuse(f"names the repository host {stray[0]!r}", "huggingface or modelscope")
    parsers, minimum = entry.get("parsers") or {}, entry.get("minimum_versions") or {}
    stray = sorted((set(parsers) | set(minimum)) - set(ENGINES))
    if stray:
        raise refuse(f"names the engine {stray[0]!r}", f"one of {', '.join(ENGINES)}")
    for engine, version in minimum.items():
        if version is not None and not _VERSION.match(str(version)):
            raise refuse(f"has the minimum {engine} version {version!r}", "numbers and dots, such as 0.17.0")
    return Model(
        key=key,
        repositories=MappingProxyType({host: repositories.get(host) for host in ("huggingface", "modelscope")}),
        revision=entry.get("revision"),
        format=entry["format"],
        context_length_tokens=context,
        parsers=MappingProxyType(
            {
                engine: Parsers(
                    tool_call=(parsers.get(engine) or {}).get("tool_call"),
                    reasoning=(parsers.get(engine) or {}).get("reasoning"),
                )
                for engine in ENGINES
            }
        ),
        minimum_versions=MappingProxyType(
            {engine: None if minimum.get(engine) is None else str(minimum[engine]) for engine in ENGINES}
        ),
        shape=MappingProxyType(dict(shape)),
        sources=tuple(entry.get("sources") or ()),
        notes=entry.get("notes"),
    )


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
