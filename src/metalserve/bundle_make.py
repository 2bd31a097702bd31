"""Makes a bundle on a machine with a network, from an inventory and its lock."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metalserve import catalogue
from metalserve.bundle import bundled_model, write_manifest
from metalserve.bundle_collections import pack_collections
from metalserve.bundle_images import fetch_images
from metalserve.bundle_packages import make_repository
from metalserve.deployments import Inputs, engine_for, image_packages, normalize
from metalserve.errors import Refusal
from metalserve.remote.weights import ensure_model
from metalserve.remote.weights_content import Expectation
from metalserve.remote.weights_download import Transfer
from metalserve.remote.weights_manifest import RECORD_NAME, WeightsError
from metalserve.signatures import check_signatures
from metalserve.staged import needed_models, weight_sources

# Of the wheels for an engine's image: those of any glibc that such an image may have.
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 17)), "manylinux2014_x86_64", "any")


@dataclass(frozen=True)
class Recipe:
    """What goes into a bundle beside what the deployments name.

    Attributes:
        work: a directory for what is kept between runs, on the same disk where files shall not be copied.
        systems: [{name, sources, packages}], see `bundle_packages`.
        requirements: files of pip with hashes, whose wheels the controller needs.
        collections: names of Ansible collections.
        signing_key: signs the manifest; None leaves it unsigned.
        insecure_registries, mirrors: as for the lock.
        tokens: {host: token} for gated repositories.
    """

    work: Path
    systems: Sequence[Mapping[str, Any]] = ()
    requirements: Sequence[Path] = ()
    collections: Sequence[str] = ()
    signing_key: Path | None = None
    insecure_registries: Sequence[str] = ()
    mirrors: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)


def make_bundle(
    directory: Path, deployments: Sequence[Mapping[str, Any]], inputs: Inputs, recipe: Recipe
) -> dict[str, Any]:
    """Bring a bundle to what the deployments need; what is there and right is kept. Returns its manifest.

    Args:
        directory: the bundle.
        deployments: those of all hosts.
        inputs: of the inventory, with its lock.
        recipe: the rest.

    Raises:
        Refusal: something is not locked, or cannot be had.
    """
    checked = [normalize([item])[0] for item in deployments]
    images, models = _locked_images(checked, inputs), _locked_models(checked, inputs)
    directory.mkdir(parents=True, exist_ok=True)
    recipe.work.mkdir(parents=True, exist_ok=True)
    fetch_images(directory / "images", images, recipe.insecure_registries, recipe.mirrors)
    for model, locked in models.values():
        _fetch_model(directory / "weights", model, locked, inputs, recipe)
    _drop_others(directory / "weights", {f"{key}/{locked['revision']}" for key, (_, locked) in models.items()})
    for system in recipe.systems:
        make_repository(directory / "packages" / str(system["name"]), system, recipe.work)
    _drop_others(directory / "packages", {str(system["name"]) for system in recipe.systems})
    _fetch_wheels(directory / "wheels", [image_packages(item, inputs.engines) for item in checked], recipe)
    pack_collections(directory / "collections", recipe.collections)
    content = {
        "images": images,
        "models": {key: bundled_model(locked) for key, (_, locked) in models.items()},
        "systems": sorted(str(system["name"]) for system in recipe.systems),
    }
    return write_manifest(directory, content, recipe.signing_key)


def _locked_images(deployments: Sequence[Mapping[str, Any]], inputs: Inputs) -> dict[str, str]:
    images = {}
    for item in deployments:
        reference = engine_for(item, inputs.engines).image
        locked = (inputs.lock.get("images") or {}).get(reference)
        if not locked:
            raise _unlocked(reference)
        check_signatures(reference, locked["digest"], locked.get("signatures") or [], inputs.image_keys)
        images[reference] = str(locked["digest"])
    return images


def _locked_models(
    deployments: Sequence[Mapping[str, Any]], inputs: Inputs
) -> dict[str, tuple[catalogue.Model, Mapping[str, Any]]]:
    """The models and adapters of the deployments by key, each with its entry of the lock."""
    models = {}
    for item in deployments:
        for _, model in needed_models(item, inputs.models):
            locked = (inputs.lock.get("models") or {}).get(model.key)
            if not locked:
                raise _unlocked(model.key)
            models[model.key] = (model, locked)
    return models


def _unlocked(what: str) -> Refusal:
    return Refusal(
        found=f"nothing locked for {what}",
        needed="its digest or its manifest: a bundle holds exactly what the lock names",
        change="run playbooks/ops/lock.yml with this inventory",
    )


def _fetch_model(
    weights: Path, model: catalogue.Model, locked: Mapping[str, Any], inputs: Inputs, recipe: Recipe
) -> None:
    key = model.key
    revision = str(locked["revision"])
    places = weight_sources(model, revision, inputs.weight_sources, locked.get("hub_revisions") or {})
    try:
        ensure_model(
            weights,
            key,
            revision,
            locked["files"],
            places,
            # A chat template may come by engine_args: hosts are asked for it, by their own variable.
            expected=Expectation(model.format, False),
            connections=4,
            transfer=Transfer(tokens=recipe.tokens),
        )
    except WeightsError as error:
        raise Refusal(
            found=f"the weights of {key} cannot be had: {error}",
            needed=f"revision {revision}, from {', '.join(places)}",
            change=f"serving_weight_sources.{key}, bundle_tokens, or the network of this machine",
        ) from error
    shutil.rmtree(weights / ".incoming", ignore_errors=True)
    # Times of this disk say nothing on another one.
    (weights / key / revision / RECORD_NAME).unlink(missing_ok=True)


def _drop_others(directory: Path, wanted: set[str]) -> None:
    """Remove directories that are not wanted; `wanted` are paths of one depth below it."""
    depth = max((name.count("/") for name in wanted), default=0) + 1
    for path in directory.glob("/".join("*" * depth)) if directory.is_dir() else ():
        if path.is_dir() and path.relative_to(directory).as_posix() not in wanted:
            shutil.rmtree(path)


def _fetch_wheels(directory: Path, extra: Sequence[Mapping[str, Any]], recipe: Recipe) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    fresh = recipe.work / "wheels"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    have = [f"--find-links={directory}"]
    for path in recipe.requirements:
        _pip_download(fresh, ["--requirement", str(path)], have, str(path))
    for image in extra:
        if image:
            wanted = recipe.work / "requirements.txt"
            wanted.write_text("".join(f"{package}\n" for package in image["packages"]), encoding="utf-8")
            python = ["--only-binary=:all:", "--implementation=cp", f"--python-version={image['python']}"]
            options = [*python, *(f"--platform={name}" for name in PLATFORMS), "--requirement", str(wanted)]
            _pip_download(fresh, options, have, ", ".join(image["packages"]))
    arrived = {path.name: path for path in fresh.iterdir()}
    for path in directory.iterdir():
        if path.name not in arrived:
            path.unlink()
    for name, path in arrived.items():
        path.replace(directory / name)


def _pip_download(target: Path, options: Sequence[str], more: Sequence[str], what: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", f"--dest={target}", *more, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refusal(
            found=f"pip does not get all of {what} ({' '.join(done.stderr.split())[-600:]})",
            needed="each of them with a stated hash, from the index that pip is configured for",
            change="the network or pip's configuration of this machine, or bundle_requirements",
        )
