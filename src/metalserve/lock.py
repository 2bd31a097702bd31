"""Resolve tags to digests and revisions to manifests, once, so that every later run names exact bytes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import requests
from dxf import DXF, DXFBase
from dxf.exceptions import DXFError

from metalserve.errors import Refusal
from metalserve.remote.weights import MANIFEST_NAME, WeightsError, parse_manifest

DOCKER_HUB = "registry-1.docker.io"
PLATFORM = "linux/amd64"
_TIMEOUT_SECONDS = 30.0


def split_reference(reference: str) -> tuple[str, str, str]:
    """Registry, repository and tag of an image reference, with Docker's own defaults.

    Raises:
        Refusal: no tag, or `latest`, which names no version.
    """
    name, _, tag = reference.rpartition(":")
    if not name or "/" in tag or tag == "latest":
        raise Refusal(
            found=f"the image {reference}",
            needed="a tag that names a version, such as vllm/vllm-openai:v0.33.0",
            change="`image` of the deployment or of serving_engines",
        )
    first, _, rest = name.partition("/")
    if rest and ("." in first or ":" in first or first == "localhost"):
        return first, rest, tag
    return DOCKER_HUB, name if rest else f"library/{name}", tag


def lock_image(reference: str, insecure_registries: Collection[str] = ()) -> dict[str, Any]:
    """Ask the registry what a tag names now.

    Returns:
        {digest, compressed_bytes}: the digest that `docker pull` verifies (of the index for a multi-platform image) and
        the size of the layers for linux/amd64.

    Raises:
        Refusal: the registry cannot be reached or does not have the tag.
    """
    registry, repository, tag = split_reference(reference)

    def authenticate(dxf: DXFBase, response: requests.Response) -> None:
        dxf.authenticate(actions=["pull"], response=response)

    client = DXF(registry, repository, authenticate, insecure=registry in insecure_registries, timeout=_TIMEOUT_SECONDS)
    try:
        digest, _ = client.head_manifest_and_response(tag)
        found = client.get_manifest(tag, platform=PLATFORM)
    except (requests.RequestException, DXFError) as error:
        raise Refusal(
            found=f"the registry {registry} gives no {repository}:{tag} ({error})",
            needed="a registry that this machine reaches and that has the tag",
            change="`image` of the deployment or of serving_engines, or the network of this machine",
        ) from error
    text = found if isinstance(found, str) else found[PLATFORM]
    return {"digest": digest, "compressed_bytes": sum(layer["size"] for layer in json.loads(text)["layers"])}


def lock_model(request: Mapping[str, Any], revision: str | None, manifest: str | None = None) -> dict[str, Any]:
    """Read the manifest of a model's revision.

    Args:
        request: {key, revision, sources} of `deployments.lock_requests`.
        revision: the revision to lock; None takes the catalogue's.
        manifest: a file or URL with the manifest; None looks for metalserve-manifest.json at the sources.

    Returns:
        {revision, files: [{path, size_bytes, sha256}]}.

    Raises:
        Refusal: no revision is named, or no manifest can be read.
    """
    key, pinned = request["key"], revision or request.get("revision")
    if not pinned:
        raise Refusal(
            found=f"no revision of the model {key}",
            needed="the commit of its repository, never a branch",
            change=f"serving_model_revisions.{key}",
        )
    places = [manifest] if manifest else [f"{s.rstrip('/')}/{MANIFEST_NAME}" for s in request["sources"]]
    failures = []
    for place in (text.replace("{revision}", pinned) for text in places):
        try:
            files = json.loads(_read(place))["files"]
            parse_manifest(files)
        except (OSError, ValueError, KeyError, TypeError, WeightsError) as error:
            failures.append(f"{place}: {error}")
            continue
        return {"revision": pinned, "files": files}
    raise Refusal(
        found=f"no manifest of {key} at revision {pinned} ({'; '.join(failures)})",
        needed="the size and SHA-256 of each of its files",
        change=f"make it with `metalserve manifest DIRECTORY > FILE` from a copy that you trust, and name the file in "
        f"serving_model_manifests.{key}",
    )


def _read(place: str) -> str:
    if "://" not in place:
        return Path(place).read_text(encoding="utf-8")
    with urllib.request.urlopen(place, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310 (the operator's own sources)
        text: str = response.read().decode()
        return text
