"""Disk and memory: room for what the releases need, given what is already there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from metalserve.verdict.check import Check, after, ok, refused, warn
from metalserve.verdict.options import DockerOptions, Options
from metalserve.verdict.rows import split_refusals

GIB = 1 << 30


def docker_check(facts: Mapping[str, Any], options: DockerOptions) -> Check:
    """Docker that resolves CDI devices, there or to be installed."""
    docker = facts.get("docker") or {}
    if options.refusal:
        refusal = split_refusals(options.refusal)[0]
        return refused("docker", found=refusal.found, needed=refusal.needed, change=refusal.change)
    version = docker.get("version")
    if version is None:
        return after(
            "docker",
            action="Docker install",
            found="no Docker",
            needed=f"Docker {options.minimum_version} or newer",
            change="nothing: playbooks/prepare.yml installs it",
        )
    if _numbers(version) < _numbers(options.minimum_version):
        return refused(
            "docker",
            found=f"Docker {version} is installed",
            needed=f"{options.minimum_version} or newer, which resolves CDI devices",
            change="docker_engine_package and the host's package sources",
        )
    if not docker.get("running"):
        return after(
            "docker",
            action="Docker start",
            found=f"Docker {version} does not answer",
            needed="a running daemon",
            change="nothing: playbooks/prepare.yml starts it; if it cannot, journalctl -u docker says why",
        )
    return ok("docker", f"Docker {version}")


def systemd_check(facts: Mapping[str, Any], options: DockerOptions) -> Check | None:
    """The release of systemd; None where the host told none."""
    release = facts.get("systemd")
    if release is None:
        return None
    if release < options.minimum_systemd:
        return refused(
            "systemd",
            found=f"systemd {release}",
            needed=f"{options.minimum_systemd} or newer, which verifies template units",
            change="use Debian 12 or Ubuntu 24.04, or newer",
        )
    return ok("systemd", f"systemd {release}")


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("."):
        digits = "".join(character for character in part if character.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def disk_checks(
    facts: Mapping[str, Any], releases: Sequence[Mapping[str, Any]], models_dir: str, options: Options
) -> list[Check]:
    """Images and weights that are not on the host yet against the free space of their disks."""
    needs: dict[str, list[tuple[str, int]]] = {}
    directories: dict[str, list[str]] = {}
    free: dict[str, int] = {}
    unknown = []
    for directory, what, size_bytes in [
        *_images(facts, releases, options.docker),
        *_weights(facts, releases, models_dir, options.weights_reserve_bytes),
    ]:
        disk = next((disk for disk in facts.get("disks") or [] if disk["path"] == directory), None)
        if disk is None:
            unknown.append(directory)
            continue
        free[disk["mount"]] = disk["free_bytes"]
        needs.setdefault(disk["mount"], []).append((f"{_gib(size_bytes)} GiB {what}", size_bytes))
        if directory not in directories.setdefault(disk["mount"], []):
            directories[disk["mount"]].append(directory)
    checks = []
    for mount, parts in needs.items():
        wanted = sum(size for _text, size in parts)
        texts = ", ".join(text for text, _size in parts)
        if wanted > free[mount]:
            checks.append(
                refused(
                    "disk",
                    found=f"The disk of {' and '.join(directories[mount])} has {_gib(free[mount])} GiB free",
                    needed=f"{_gib(wanted)} GiB: {texts}",
                    change=f"free {_gib(wanted - free[mount])} GiB there, or move model_weights_dir or "
                    "Docker's data-root",
                )
            )
        else:
            checks.append(ok("disk", f"{_gib(free[mount])} GiB free on {mount}; {texts}"))
    for directory in dict.fromkeys(unknown):
        checks.append(
            warn(
                "disk",
                found=f"the disk of {directory} was not read",
                needed="its free space",
                change=f"add {directory} to gpu_facts_disk_paths",
            )
        )
    return checks


def _images(
    facts: Mapping[str, Any], releases: Sequence[Mapping[str, Any]], options: DockerOptions
) -> list[tuple[str, str, int]]:
    # By digest: the name may be that of a mirror.
    present = {str(name).partition("@")[2] for name in (facts.get("docker") or {}).get("images") or []}
    found = {}
    for release in releases:
        image = release["image"]
        if image["digest"] not in present:
            found[image["reference"]] = int((image.get("compressed_bytes") or 0) * options.unpack_factor)
    return [(options.directory, f"to pull and unpack {reference}", size) for reference, size in found.items()]


def _weights(
    facts: Mapping[str, Any], releases: Sequence[Mapping[str, Any]], models_dir: str, reserve_bytes: int
) -> list[tuple[str, str, int]]:
    """What is still to come of each model: a part that an earlier run left counts as there."""
    have = {(entry["key"], entry["revision"]): entry["size_bytes"] for entry in facts.get("models") or []}
    found = {}
    for model in (part for release in releases for part in release["weights"]):
        total = sum(entry["size_bytes"] for entry in model["files"])
        missing = max(0, total - have.get((model["key"], model["revision"]), 0))
        if missing:
            found[model["key"], model["revision"]] = missing
    rows = [(models_dir, f"for the weights of {key}", size) for (key, _revision), size in found.items()]
    return [*rows, (models_dir, "in reserve", reserve_bytes)] if rows else []


def memory_check(facts: Mapping[str, Any], releases: Sequence[Mapping[str, Any]]) -> Check | None:
    """The host's memory against the weights, which are read through its page cache.

    A CPU-only host is not asked here: there the plan itself sizes the memory.
    """
    total = (facts.get("memory") or {}).get("total_bytes")
    if not facts.get("gpus") or not total or not releases:
        return None
    models = {release["model"]["key"]: sum(e["size_bytes"] for e in release["model"]["files"]) for release in releases}
    largest = max(models, key=lambda key: models[key])
    if total < models[largest]:
        return warn(
            "memory",
            found=f"{_gib(total)} GiB of memory on the host",
            needed=f"{_gib(models[largest])} GiB, the weights of {largest}: with less, engines that start together "
            "read them from the disk more than once",
            change="nothing, or more memory; the plan holds either way",
        )
    return ok("memory", f"{_gib(total)} GiB of memory")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f}"
