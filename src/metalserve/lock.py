"""Resolve tags to digests and revisions to manifests, once, so that every later run names exact bytes."""

from __future__ import annotations

import hashlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import requests
from dxf import DXF, DXFBase
from dxf.exceptions import DXFError

from metalserve.errors import Refusal
from metalserve.remote.weights import MANIFEST_NAME, WeightsError, parse_manifest

DOCKER_HUB = "registry-1.docker.io"
_DOCKER_HUB_NAMES = ("docker.io", "index.docker.io", DOCKER_HUB)
PLATFORM = "linux/amd64"
_TIMEOUT_SECONDS = 30.0


def split_reference(reference: str) -> tuple[str, str, str]:
    """Registry, repository and tag of an image reference, with Docker's own defaults.

    Raises:
        Refusal: no tag, or `latest`, which names no version, or a digest, which is what the lock is for.
    """
    name, _, tag = reference.rpartition(":")
    if not name or not tag or "/" in tag or "@" in reference or tag == "latest":
        raise Refusal(
            found=f"the image {reference}",
            needed="a tag that names a version, such as vllm/vllm-openai:v0.33.0",
            change="`image` of the deployment or of serving_engines",
        )
    first, _, rest = name.partition("/")
    named = rest and ("." in first or ":" in first or first == "localhost")
    if named and first not in _DOCKER_HUB_NAMES:
        return first, rest, tag
    name = rest if named else name
    return DOCKER_HUB, name if "/" in name else f"library/{name}", tag


def lock_image(reference: str, insecure_registries: Collection[str] = ()) -> dict[str, Any]:
    """Ask the registry what a tag names now.

    Returns:
        {digest, compressed_bytes, cuda}: the digest that `docker pull` verifies (of the index for a multi-platform
        image), the size of the layers for linux/amd64, and the CUDA version that the image says it has; without `cuda`
        where it says nothing.

    Raises:
        Refusal: the registry cannot be reached, does not have the tag, or has it for other platforms only.
    """
    registry, repository, tag = split_reference(reference)

    def authenticate(dxf: DXFBase, response: requests.Response) -> None:
        dxf.authenticate(actions=["pull"], response=response)

    client = DXF(registry, repository, authenticate, insecure=registry in insecure_registries, timeout=_TIMEOUT_SECONDS)
    try:
        text, response = client.get_manifest_and_response(tag)
        # The digest is the hash of these bytes by definition; the header that repeats it may be missing.
        digest = "sha256:" + hashlib.sha256(response.content).hexdigest()
        manifest = json.loads(text)
        if "manifests" in manifest:
            manifest = json.loads(client.get_manifest_and_response(_of_platform(manifest["manifests"], reference))[0])
        size_bytes = sum(layer["size"] for layer in manifest["layers"])
    except (requests.RequestException, DXFError, ValueError, KeyError, TypeError) as error:
        raise Refusal(
            found=f"the registry {registry} gives no {repository}:{tag} ({error})",
            needed="a registry that this machine reaches and that has the tag",
            change="`image` of the deployment or of serving_engines, or the network of this machine",
        ) from error
    cuda = _cuda_version(client, manifest)
    return {"digest": digest, "compressed_bytes": size_bytes, **({"cuda": cuda} if cuda else {})}


def _cuda_version(client: DXF, manifest: Mapping[str, Any]) -> str | None:
    """CUDA_VERSION in the environment of an image that is built on NVIDIA's CUDA images; None where there is none.

    A registry that does not give the image's configuration only costs this: the catalogue knows the CUDA by version.
    """
    try:
        chunks: Any = client.pull_blob(manifest["config"]["digest"])
        config = json.loads(b"".join(chunks))
        environment = dict(entry.partition("=")[::2] for entry in config["config"]["Env"])
    except (requests.RequestException, DXFError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return environment.get("CUDA_VERSION") or None


def _of_platform(manifests: Iterable[Mapping[str, Any]], reference: str) -> str:
    """The digest of the manifest for this project's platform in an index."""
    names = []
    for entry in manifests:
        platform = entry.get("platform") or {}
        names.append(f"{platform.get('os')}/{platform.get('architecture')}")
        if names[-1] == PLATFORM:
            return str(entry["digest"])
    raise Refusal(
        found=f"the image {reference} for {', '.join(names) or 'no platform'}",
        needed=f"an image for {PLATFORM}",
        change="`image` of the deployment or of serving_engines",
    )


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
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, WeightsError) as error:
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
