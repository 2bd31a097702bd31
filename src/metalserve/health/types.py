"""The rows of a health report, and what they are held against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from metalserve.errors import Refusal

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Row:
    """The result of one check.

    Attributes:
        name: the check.
        state: `ok`, `warn` (the host may serve) or `fail` (it may not).
        found: what was seen.
        needed: what would have been right.
        change: the variable or the action that leads there; empty where nothing is wrong.
    """

    name: str
    state: str
    found: str
    needed: str
    change: str = ""

    def as_dict(self) -> dict[str, str]:
        """Plain types."""
        return asdict(self)


@dataclass(frozen=True)
class Expected:
    """What the inventory and the plan say a host has; None where they say nothing.

    Attributes:
        driver_version: the version that was installed on purpose.
        gpu_count: number of GPUs.
        gpu_pci_ids: their PCI ids (`10de:2324`) in the order of their indexes.
        mig: whether GPUs are cut into MIG instances.
        gpu_groups: indexes of the GPUs that share a model (tensor parallel), one tuple for each deployment.
    """

    driver_version: str | None = None
    gpu_count: int | None = None
    gpu_pci_ids: tuple[str, ...] | None = None
    mig: bool = False
    gpu_groups: tuple[tuple[int, ...], ...] = ()


def read_expected(values: Mapping[str, Any] | None) -> Expected:
    """Expectations as an inventory writes them.

    Raises:
        Refusal: an unknown field, or a value of the wrong kind.
    """
    given = dict(values or {})
    unknown = sorted(set(given) - set(Expected.__dataclass_fields__))
    if unknown:
        raise _wrong(f"the unknown field {unknown[0]!r}", f"only {', '.join(Expected.__dataclass_fields__)}")
    count = given.get("gpu_count")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
        raise _wrong(f"gpu_count {count!r}", "a whole number, or null")
    ids = given.get("gpu_pci_ids")
    if ids is not None and not (isinstance(ids, list) and all(isinstance(one, str) for one in ids)):
        raise _wrong(f"gpu_pci_ids {ids!r}", "a list of PCI ids such as 10de:2324, or null")
    version = given.get("driver_version")
    return Expected(
        driver_version=None if version is None else str(version),
        gpu_count=count,
        gpu_pci_ids=None if ids is None else tuple(one.lower() for one in ids),
        mig=bool(given.get("mig")),
        gpu_groups=tuple(tuple(group) for group in given.get("gpu_groups") or ()),
    )


def _wrong(found: str, needed: str) -> Refusal:
    return Refusal(found=f"gpu_health_expected has {found}", needed=needed, change="gpu_health_expected of this host")


def ok(name: str, found: str, needed: str = "") -> Row:
    """A check that found what it should."""
    return Row(name, OK, found, needed or found)


def warn(name: str, found: str, needed: str, change: str) -> Row:
    """Worth a look; the host may serve."""
    return Row(name, WARN, found, needed, change)


def fail(name: str, found: str, needed: str, change: str) -> Row:
    """The host may not serve."""
    return Row(name, FAIL, found, needed, change)


def gpu_label(gpu: Mapping[str, Any]) -> str:
    """How a GPU is called in a row: by its index, and by where it sits."""
    index = gpu.get("index")
    address = gpu.get("pci_address") or "no address"
    return f"GPU {index} ({address})" if index is not None else f"the GPU at {address}"


def join(parts: Iterable[object]) -> str:
    """Several findings of one check in one line."""
    return "; ".join(map(str, parts))


@cache
def data(name: str) -> Mapping[str, Any]:
    """A data file of the catalogue."""
    loaded: dict[str, Any] = yaml.safe_load(files("metalserve.catalogue").joinpath(name).read_text(encoding="utf-8"))
    return loaded
