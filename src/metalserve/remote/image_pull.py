"""Bring an image to a host by its digest: from a layout, a mirror or its registry; or derive one from another."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from .image_layout import layout_places, layout_registry
from .image_list import Runner, local_name
from .image_names import DERIVED_REPOSITORY, derived_digest, mirrored, repository_of, split_repository
from .readiness import run_command

_WHEELS = "/tmp/metalserve-wheels"  # noqa: S108 (a mount in a container of its own)


class ImageError(Exception):
    """The image cannot be had; the text says what was found, what is needed and what to change."""


@dataclass(frozen=True)
class Places:
    """Where images come from, in this order.

    Attributes:
        layouts: OCI layouts: directories, tar files, URLs.
        mirrors: {registry: mirrors}, asked before the registry itself.
        registry: whether mirrors and registries may be asked at all.
        port: of the loopback, for a registry that gives what a layout has.
    """

    layouts: Sequence[str] = ()
    mirrors: Optional[Mapping[str, Any]] = None
    registry: bool = True
    port: int = 8749


def _complaint(argv: Sequence[str]) -> str:
    """Run a command; empty, or what it says is wrong."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{argv[0]}: {error.strerror}"
    return "" if done.returncode == 0 else " ".join((done.stderr or done.stdout).split()) or f"status {done.returncode}"


def remove_image(name: str) -> bool:
    """Remove a name of an image, and the image with its last one; False where Docker keeps it."""
    return not _complaint(["docker", "rmi", name])


def ensure_image(reference: str, digest: str, places: Places, run: Runner = run_command) -> tuple[str, str]:
    """Have an image on this host; returns its name here, and where it came from (empty when it was there).

    Raises:
        ImageError: with each place that was asked and its answer.
    """
    repository = repository_of(reference)
    present = local_name(f"{repository}@{digest}", run)
    if present:
        return present, ""
    layouts, reasons = layout_places(places.layouts, digest)
    for layout in layouts:
        path = split_repository(repository)[1]
        try:
            with layout_registry(layout, places.port) as address:
                complaint = _complaint(["docker", "pull", "--quiet", f"{address}/{path}@{digest}"])
                name = f"{address}/{path}@{digest}"
        except OSError as error:
            complaint, name = f"port {places.port} of the loopback is taken ({error})", ""
        if not complaint:
            return name, layout.place
        reasons.append(f"{layout.place}: {complaint}")
    for place in [*mirrored(repository, places.mirrors or {}), repository] if places.registry else []:
        complaint = _complaint(["docker", "pull", "--quiet", f"{place}@{digest}"])
        if not complaint:
            return f"{place}@{digest}", place
        reasons.append(f"{place}: {complaint}")
    raise ImageError(
        f"{reference} could not be pulled by its digest {digest}: {'; '.join(reasons) or 'no place is named'}. "
        "Needed: one place that this host reaches and that has exactly this image. Change: engine_image_layouts for an "
        "archive, serving_image_mirrors for a mirror, the network of this host, or lock the image anew with "
        "playbooks/ops/lock.yml."
    )


def derived_name(base_digest: str, packages: Sequence[str]) -> str:
    """The name of a derived image on its host."""
    return f"{DERIVED_REPOSITORY}:{derived_digest(base_digest, packages).partition(':')[2]}"


def ensure_derived(
    base: str, base_digest: str, packages: Sequence[str], wheels: Path, run: Runner = run_command
) -> tuple[str, bool]:
    """Have an image on this host that is another one with packages; returns its name, and whether it was made now.

    pip runs in a container of the image below, without a network, and takes only what has the stated hashes. Start
    command, user and everything else stay those of the image below.

    Args:
        base: the name of the image below, on this host.
        base_digest: its digest.
        packages: requirements with exact versions and hashes.
        wheels: a directory of this host with their wheels.

    Raises:
        ImageError: pip or Docker refuses.
    """
    name = derived_name(base_digest, packages)
    if run(["docker", "image", "inspect", "--format={{.Id}}", name]).strip():
        return name, False
    try:
        config = json.loads(run(["docker", "image", "inspect", "--format={{json .Config}}", base]))
    except ValueError as error:
        raise ImageError(
            f"Docker tells nothing of {base}. Needed: the image below {name}. Change: run again."
        ) from error
    container = f"metalserve-derive-{name[-12:]}"
    listed = wheels / "requirements.txt"
    listed.write_text("".join(f"{package}\n" for package in packages), encoding="utf-8")
    _complaint(["docker", "rm", "--force", container])
    pip = ["python3", "-m", "pip", "install", "--no-index", "--no-deps", "--require-hashes", "--no-cache-dir"]
    pip += ["--disable-pip-version-check", f"--find-links={_WHEELS}", f"--requirement={_WHEELS}/{listed.name}"]
    try:
        complaint = _complaint(
            [
                "docker", "run", f"--name={container}", "--pull=never", "--runtime=runc", "--network=none", "--user=0",
                f"--mount=type=bind,source={wheels},target={_WHEELS},readonly", "--entrypoint=env", base,
                # A distribution's own Python refuses pip otherwise; this one is the container's.
                "PIP_BREAK_SYSTEM_PACKAGES=1", *pip,
            ]
        )  # fmt: skip
        if complaint:
            raise ImageError(
                f"pip in {base} takes not all of {', '.join(p.split()[0] for p in packages)}: {complaint[-600:]}. "
                "Needed: one wheel for each, for that image's Python, with a stated hash. Change: packages of "
                "serving_engines."
            )
        changes = [f"--change=USER {config.get('User') or 'root'}"]
        for word in ("Entrypoint", "Cmd"):
            changes.append(f"--change={word.upper()} {json.dumps(config.get(word) or [])}")
        complaint = _complaint(["docker", "commit", *changes, container, name])
        if complaint:
            raise ImageError(f"{name} cannot be kept: {complaint}. Needed: room on Docker's disk. Change: free it.")
    finally:
        _complaint(["docker", "rm", "--force", container])
    return name, True
