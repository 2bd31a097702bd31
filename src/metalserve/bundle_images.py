"""Engine images from their registries into one OCI image layout, byte by byte as the registry has them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import requests
from dxf import DXF
from dxf.exceptions import DXFError

from metalserve.errors import Refusal
from metalserve.lock import platform_digest, registries_of, registry_client
from metalserve.remote.files import write_json

_CHUNK_BYTES = 1 << 20
_NAME_ANNOTATION = "org.opencontainers.image.ref.name"


def fetch_images(
    layout: Path, images: Mapping[str, str], insecure_registries: Collection[str], mirrors: Mapping[str, Any]
) -> None:
    """Have exactly these images in a layout; blobs that are there are not fetched again.

    Args:
        layout: the directory.
        images: {reference: digest}.
        insecure_registries: registries that speak plain HTTP.
        mirrors: {registry: mirrors}, asked first.

    Raises:
        Refusal: no registry gives an image, or one gives other bytes.
    """
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    listed, kept = [], set()
    for reference, digest in sorted(images.items()):
        descriptor, needed = _fetch(blobs, reference, digest, insecure_registries, mirrors)
        listed.append({**descriptor, "annotations": {_NAME_ANNOTATION: reference}})
        kept |= needed
    for blob in blobs.iterdir():
        if f"sha256:{blob.name}" not in kept:
            blob.unlink()
    write_json(layout / "oci-layout", {"imageLayoutVersion": "1.0.0"})
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": listed}
    write_json(layout / "index.json", index)


def _fetch(
    blobs: Path, reference: str, digest: str, insecure_registries: Collection[str], mirrors: Mapping[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    reasons = []
    for registry, repository, _ in registries_of(reference, mirrors):
        try:
            return _fetch_from(registry_client(registry, repository, insecure_registries), blobs, reference, digest)
        except (requests.RequestException, DXFError, ValueError, KeyError, TypeError) as error:
            reasons.append(f"{registry}/{repository}: {error}")
    raise Refusal(
        found=f"no registry gives {reference} at {digest} ({'; '.join(reasons)})",
        needed="a registry that this machine reaches and that still has exactly this image",
        change="serving_image_mirrors, the network of this machine, or lock the image anew (playbooks/ops/lock.yml)",
    )


def _fetch_from(client: DXF, blobs: Path, reference: str, digest: str) -> tuple[dict[str, Any], set[str]]:
    content = _manifest(client, blobs, digest)
    size = (blobs / digest.partition(":")[2]).stat().st_size
    descriptor = {"mediaType": _media_type(content), "digest": digest, "size": size}
    kept = {digest}
    if "manifests" in content:
        inner = platform_digest(content["manifests"], reference)
        kept.add(inner)
        content = _manifest(client, blobs, inner)
    for item in (content["config"], *content["layers"]):
        _blob(client, blobs, item["digest"], int(item["size"]))
        kept.add(item["digest"])
    return descriptor, kept


def _manifest(client: DXF, blobs: Path, digest: str) -> dict[str, Any]:
    path = blobs / digest.partition(":")[2]
    if not path.exists():
        data = client.get_manifest_and_response(digest)[1].content
        _keep(path, [data], digest)
    content: dict[str, Any] = json.loads(path.read_bytes())
    return content


def _blob(client: DXF, blobs: Path, digest: str, size_bytes: int) -> None:
    path = blobs / digest.partition(":")[2]
    if path.exists() and path.stat().st_size == size_bytes:
        return
    chunks: Any = client.pull_blob(digest, chunk_size=_CHUNK_BYTES)
    _keep(path, chunks, digest)


def _keep(path: Path, chunks: Sequence[bytes], digest: str) -> None:
    """Write a blob, which gets its name only when its hash is that name."""
    partial, total = path.with_name(path.name + ".part"), hashlib.sha256()
    with partial.open("wb") as out:
        for chunk in chunks:
            total.update(chunk)
            out.write(chunk)
    if f"sha256:{total.hexdigest()}" != digest:
        partial.unlink()
        raise ValueError(f"other bytes than {digest}")
    partial.replace(path)


def _media_type(content: Mapping[str, Any]) -> str:
    kind = "index" if "manifests" in content else "manifest"
    return str(content.get("mediaType") or f"application/vnd.oci.image.{kind}.v1+json")
