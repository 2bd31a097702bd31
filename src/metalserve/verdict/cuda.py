"""May a CUDA image run on a GPU under a driver branch? The container toolkit does not ask this for CDI devices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml

from metalserve.catalogue import gpu_by_pci_id
from metalserve.driver_state import driver_data
from metalserve.engines.info import EngineInfo
from metalserve.verdict.check import Check, ok, refused, warn

NATIVE, MINOR, FORWARD = "ok", "ok_minor_version_compat", "ok_forward_compat"
UPGRADE, DRIVER_TOO_OLD, IMAGE_TOO_OLD = "upgrade_needed", "driver_too_old_for_gpu", "image_too_old_for_gpu"

# Variants of the engines' images are told apart by a suffix of the tag: v0.33.0-cu129.
_TAG_CUDA = re.compile(r"[-_]cu(\d{2})(\d)\b")
_CUDA = re.compile(r"^(\d+)\.(\d+)")


@dataclass(frozen=True)
class Product:
    """What decides about a GPU: its name, the branch and the CUDA that first knew it, and forward compatibility."""

    name: str
    generation: str
    minimum_branch: int
    minimum_cuda: str
    forward_compatibility: bool


@lru_cache(maxsize=1)
def rules() -> Mapping[str, Any]:
    """The content of compatibility.yaml."""
    text = (resources.files("metalserve.verdict") / "compatibility.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def cuda_level(text: str) -> tuple[int, int]:
    """A CUDA version in two numbers: `13.0.1` is (13, 0).

    Raises:
        ValueError: it is no version.
    """
    match = _CUDA.match(text)
    if match is None:
        raise ValueError(f"{text!r} is no CUDA version")
    return int(match[1]), int(match[2])


def product(gpu: Mapping[str, Any]) -> Product | None:
    """What is known of a GPU from its facts; None where neither the driver nor the catalogue tells its generation."""
    entry = gpu_by_pci_id(gpu.get("pci_id"))
    name = str(gpu.get("name") or (entry.name if entry else gpu.get("pci_id")))
    capability = gpu.get("compute_capability") or (entry.compute_capability if entry else None)
    for row in rules()["generations"]:
        if gpu.get("pci_id") in row.get("pci_ids", ()) or capability in row["capabilities"]:
            allowed = not any(word in name for word in rules()["without_forward_compatibility"])
            return Product(name, row["name"], row["minimum_branch"], row["minimum_cuda"], allowed)
    return None


def image_cuda(engine: EngineInfo, locked: Mapping[str, Any] | None) -> str:
    """The CUDA in an image: what the image itself says (in the lock), else its tag, else the catalogue by version."""
    told = str((locked or {}).get("cuda") or "")
    if _CUDA.match(told):
        return told
    tag = _TAG_CUDA.search(engine.image)
    return f"{tag[1]}.{tag[2]}" if tag else engine.image_cuda


def branch_cuda(branch: int) -> str | None:
    """The CUDA level of a driver branch; an unlisted branch has that of the newest listed one below it."""
    levels: Mapping[int, Mapping[str, Any]] = driver_data()["branches"]
    known = [number for number in levels if number <= branch]
    return str(levels[max(known)]["cuda"]) if known else None


def compatibility(gpu: Product, branch: int, cuda: str) -> str:
    """One word for an image with that CUDA on that GPU under that branch.

    `ok`: the driver has the image's CUDA. `ok_minor_version_compat`: it has an earlier one of the same major version.
    `ok_forward_compat`: only with the cuda-compat library of the image. `upgrade_needed`: not even so.
    `driver_too_old_for_gpu`, `image_too_old_for_gpu`: the GPU is newer than one of the two.
    """
    if branch < gpu.minimum_branch:
        return DRIVER_TOO_OLD
    wanted = cuda_level(cuda)
    if wanted < cuda_level(gpu.minimum_cuda):
        return IMAGE_TOO_OLD
    level = branch_cuda(branch)
    if level is not None and cuda_level(level) >= wanted:
        return NATIVE
    floor = rules()["minor_compatibility_floor"].get(wanted[0])
    if floor is not None and branch >= floor and level is not None and cuda_level(level)[0] == wanted[0]:
        return MINOR
    listed = rules()["forward_compatibility"].get(f"{wanted[0]}.{wanted[1]}", ())
    return FORWARD if gpu.forward_compatibility and branch in listed else UPGRADE


def oldest_branch(gpu: Product, cuda: str) -> int | None:
    """The oldest living branch under which the image runs without help of a compat library; None: none is known."""
    living = [number for number, entry in driver_data()["branches"].items() if not entry["ended"]]
    return min((number for number in living if compatibility(gpu, number, cuda) in (NATIVE, MINOR)), default=None)


def image_check(
    gpus: Iterable[Mapping[str, Any]],
    driver: str | None,
    engine: EngineInfo,
    locked: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
) -> Check:
    """The image of one deployment against the GPUs and the driver version that will be loaded."""
    cuda = image_cuda(engine, locked)
    if driver is None:
        return refused(
            "image_cuda",
            found=f"no driver for {engine.image}, which carries CUDA {cuda}",
            needed="a driver",
            change="nvidia_driver_manage: true, or install one",
        )
    branch = int(str(driver).split(".", 1)[0])
    unknown = [str(gpu.get("pci_id")) for gpu in gpus if product(gpu) is None]
    if unknown:
        return warn(
            "image_cuda",
            found=f"GPUs whose generation is not known here ({', '.join(sorted(set(unknown)))})",
            needed=f"a GPU that CUDA {cuda} of {engine.image} knows; nobody has checked that",
            change="the entry of this PCI id in catalogue/gpus.yaml",
        )
    answers: dict[str, Product] = {}
    for found in (product(gpu) for gpu in gpus):
        if found is not None:
            answers.setdefault(compatibility(found, branch, cuda), found)
    for word in (DRIVER_TOO_OLD, IMAGE_TOO_OLD, UPGRADE, FORWARD, MINOR, NATIVE):
        if word in answers:
            return _image_row(word, answers[word], str(driver), cuda, engine, environment or {})
    return ok("image_cuda", f"no GPU for CUDA {cuda}")


def _image_row(
    word: str, gpu: Product, driver: str, cuda: str, engine: EngineInfo, environment: Mapping[str, Any]
) -> Check:
    found = f"driver {driver} under {engine.image}, which carries CUDA {cuda}"
    oldest = oldest_branch(gpu, cuda)
    older = "an older engine with engine_version of the deployment"
    newer = f"driver branch {oldest} or newer" if oldest else f"a driver with CUDA {cuda}"
    change = f"nvidia_driver_version (with nvidia_driver_manage) or the host's driver, or {older}"
    if word == DRIVER_TOO_OLD:
        return refused(
            "image_cuda",
            found=f"driver {driver} with {gpu.name}",
            needed=f"driver branch {max(gpu.minimum_branch, oldest or 0)} or newer; "
            f"{gpu.minimum_branch} is the first that knows {gpu.generation}",
            change="nvidia_driver_version (with nvidia_driver_manage) or the host's driver",
        )
    if word == IMAGE_TOO_OLD:
        return refused(
            "image_cuda",
            found=f"{engine.image} carries CUDA {cuda}, on {gpu.name}",
            needed=f"CUDA {gpu.minimum_cuda} or newer, the first that knows {gpu.generation}",
            change="a newer engine with engine_version of the deployment, or another `image`",
        )
    if word == UPGRADE:
        return refused("image_cuda", found=found, needed=newer, change=change)
    if word == FORWARD:
        switch = rules()["compatibility_switch"].get(engine.engine)
        if switch and str(environment.get(switch, "0")) not in ("", "0", "false", "False"):
            return warn(
                "image_cuda",
                found=f"{found}; it runs only through the compat library in the image",
                needed=f"{newer} to run without it",
                change=change,
            )
        also = f"; or {switch}: 1 in `environment` of the deployment, which uses the image's compat library"
        return refused("image_cuda", found=found, needed=newer, change=change + (also if switch else ""))
    if word == MINOR:
        return ok("image_cuda", f"driver {driver} runs CUDA {cuda} through minor-version compatibility")
    return ok("image_cuda", f"driver {driver} has CUDA {cuda} of {engine.image}")
