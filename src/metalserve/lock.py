"""Resolve tags to digests and revisions to manifests, once, so that every later run names exact bytes."""

from __future__ import annotations

import base64
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

from metalserve.adapters import CONFIG_NAME, adapter_record
from metalserve.errors import Refusal
from metalserve.hubs import COMMIT, NAMES, HubRevision, read_hub, read_hub_file
from metalserve.remote.image_names import mirrored, split_repository
from metalserve.remote.weights_manifest import MANIFEST_NAME, WeightsError, parse_manifest

DOCKER_HUB = "registry-1.docker.io"
PLATFORM = "linux/amd64"
SIGNATURE_ANNOTATION = "dev.cosignproject.cosign/signature"
SIGNATURE_PAYLOAD = "application/vnd.dev.cosign.simplesigning.v1+json"
_LARGEST_PAYLOAD_BYTES = 1 << 20
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
    registry, repository = split_repository(name)
    return DOCKER_HUB if registry == "docker.io" else registry, repository, tag


def lock_image(
    reference: str, insecure_registries: Collection[str] = (), mirrors: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Ask the registry what a tag names now; its mirrors first, where it has some.

    Returns:
        {digest, compressed_bytes, cuda, signatures}: the digest that `docker pull` verifies (of the index for a
        multi-platform image), the size of the layers for linux/amd64, the CUDA version that the image says it has
        (left out where it says nothing), and the signatures beside it (left out where there are none).

    Raises:
        Refusal: no registry can be reached, has the tag, or has it for this platform.
    """
    reasons: list[str] = []
    for registry, repository, tag in registries_of(reference, mirrors or {}):
        client = registry_client(registry, repository, insecure_registries)
        try:
            return _lock_from(client, reference, tag)
        except (requests.RequestException, DXFError, ValueError, KeyError, TypeError) as error:
            reasons.append(f"the registry {registry} gives no {repository}:{tag} ({error})")
    raise Refusal(
        found="; ".join(reasons),
        needed="a registry that this machine reaches and that has the tag",
        change="`image` of the deployment or of serving_engines, or the network of this machine",
    )


def registries_of(reference: str, mirrors: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(registry, repository, tag) of each place of an image, mirrors first.

    Raises:
        Refusal: as for `split_reference`.
    """
    own = split_reference(reference)
    places = [split_reference(f"{name}:{own[2]}") for name in mirrored(reference, mirrors)]
    return [*places, own]


def registry_client(registry: str, repository: str, insecure_registries: Collection[str]) -> DXF:
    """A client that takes an anonymous token where the registry wants one."""

    def authenticate(dxf: DXFBase, response: requests.Response) -> None:
        dxf.authenticate(actions=["pull"], response=response)

    return DXF(registry, repository, authenticate, insecure=registry in insecure_registries, timeout=_TIMEOUT_SECONDS)


def _lock_from(client: DXF, reference: str, tag: str) -> dict[str, Any]:
    text, response = client.get_manifest_and_response(tag)
    # The digest is the hash of these bytes by definition; the header that repeats it may be missing.
    digest = "sha256:" + hashlib.sha256(response.content).hexdigest()
    manifest = json.loads(text)
    if "manifests" in manifest:
        manifest = json.loads(client.get_manifest_and_response(platform_digest(manifest["manifests"], reference))[0])
    size_bytes = sum(layer["size"] for layer in manifest["layers"])
    more = {"cuda": _cuda_version(client, manifest), "signatures": read_signatures(client, digest)}
    return {
        "digest": digest,
        "compressed_bytes": size_bytes,
        **{name: value for name, value in more.items() if value},
    }


def read_signatures(client: DXF, digest: str) -> list[dict[str, str]]:
    """The signatures beside an image, as {payload, signature}, both base64; none where there are none.

    Nothing is believed of them here: `signatures.check_signatures` does.
    """
    try:
        manifest = json.loads(client.get_manifest_and_response(digest.replace(":", "-") + ".sig")[0])
        found = []
        for layer in manifest["layers"]:
            signature = (layer.get("annotations") or {}).get(SIGNATURE_ANNOTATION)
            if layer.get("mediaType") == SIGNATURE_PAYLOAD and signature and layer["size"] <= _LARGEST_PAYLOAD_BYTES:
                chunks: Any = client.pull_blob(layer["digest"])
                payload = base64.b64encode(b"".join(chunks)).decode("ascii")
                found.append({"payload": payload, "signature": str(signature)})
    except (requests.RequestException, DXFError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return found


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


def platform_digest(manifests: Iterable[Mapping[str, Any]], reference: str) -> str:
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


def lock_model(
    request: Mapping[str, Any], revision: Any, manifest: str | None = None, *, unpinned: bool = False
) -> dict[str, Any]:
    """Read the manifest of a model's revision.

    Args:
        request: {key, revision, sources, adapter} of `deployments.lock_requests`; a source `huggingface:REPOSITORY` or
            `modelscope:REPOSITORY` is a hub. `adapter`: true for a LoRA adapter.
        revision: the revision to lock, or {hub: revision}; None takes the catalogue's.
        manifest: a file or URL with the manifest; None asks the sources, in their order: hubs for their metadata,
            others for metalserve-manifest.json.
        unpinned: a branch of a hub may be named, and is locked to the commit that it is now.

    Returns:
        {revision, files: [{path, size_bytes, sha256}]}, with `hub_revisions` {hub: commit} where hubs are sources, and
        for an adapter `adapter`, what its configuration says (`adapters.adapter_record`).

    Raises:
        Refusal: no revision is named, no manifest can be read, two hubs have different files, or the configuration of
            an adapter cannot be had or is of a kind that the engines do not serve.
    """
    locked = _lock_files(request, revision, manifest, unpinned=unpinned)
    if request.get("adapter"):
        locked["adapter"] = _read_adapter(request, locked, manifest)
    return locked


def _read_adapter(request: Mapping[str, Any], locked: Mapping[str, Any], manifest: str | None) -> dict[str, Any]:
    """What the configuration of an adapter says; from beside the manifest or from a source, and of the locked bytes."""
    key, revision = request["key"], str(locked["revision"])
    wanted = {entry["path"]: entry["sha256"] for entry in locked["files"]}.get(CONFIG_NAME)
    failures: list[str] = []
    places = [f"{manifest.rsplit('/', 1)[0]}/{CONFIG_NAME}"] if manifest else []
    for place in [*places, *request["sources"]] if wanted else []:
        hub, _, repository = place.partition(":")
        try:
            if hub in NAMES:
                data = read_hub_file(
                    hub, repository, (locked.get("hub_revisions") or {}).get(hub, revision), CONFIG_NAME
                )
            else:
                path = place if place in places else f"{place.rstrip('/')}/{CONFIG_NAME}"
                data = _read(path.replace("{revision}", revision)).encode()
            if hashlib.sha256(data).hexdigest() != wanted:
                raise ValueError("other bytes than the manifest names")
            content = json.loads(data)
        except (OSError, http.client.HTTPException, ValueError, Refusal) as error:
            failures.append(f"{place}: {error}")
            continue
        return adapter_record(key, content if isinstance(content, Mapping) else {})
    raise Refusal(
        found=f"no {CONFIG_NAME} of the adapter {key} ({'; '.join(failures) or 'its manifest does not name it'})",
        needed="the file that says its rank and its modules, from which its memory is planned",
        change=f"lay it beside the manifest that serving_model_manifests.{key} names, or name a source read here",
    )


def _lock_files(
    request: Mapping[str, Any], revision: Any, manifest: str | None = None, *, unpinned: bool = False
) -> dict[str, Any]:
    key = request["key"]
    hubs = dict(source.split(":", 1) for source in request["sources"] if source.split(":", 1)[0] in NAMES)
    named = dict(revision) if isinstance(revision, Mapping) else {}
    pinned = (
        next((named[hub] for hub in hubs if named.get(hub)), None) if named else revision or request.get("revision")
    )
    if not pinned:
        raise Refusal(
            found=f"no revision of the model {key}",
            needed="the commit of its repository, never a branch",
            change=f"serving_model_revisions.{key}",
        )
    pinned = str(pinned)
    failures: list[str] = []
    for source in [manifest] if manifest else request["sources"]:
        hub = source.split(":", 1)[0]
        if not manifest and hub in hubs:
            found = _lock_hub(key, hub, hubs[hub], str(named.get(hub) or pinned), unpinned, failures)
            if found:
                others = {other: named.get(other) for other in hubs if other != hub}
                return _with_other_hubs(key, hub, found, hubs, others)
            continue
        place = source if manifest else f"{source.rstrip('/')}/{MANIFEST_NAME}"
        files = _read_manifest(place.replace("{revision}", pinned), failures)
        if files is not None:
            others = {hub: str(named[hub]) for hub in hubs if named.get(hub)}
            return {"revision": pinned, "files": files, **({"hub_revisions": others} if others else {})}
    raise Refusal(
        found=f"no manifest of {key} at revision {pinned} ({'; '.join(failures)})",
        needed="the size and SHA-256 of each of its files",
        change=f"make it with `metalserve manifest DIRECTORY > FILE` from a copy that you trust, and name the file in "
        f"serving_model_manifests.{key}",
    )


def _read_manifest(place: str, failures: list[str]) -> list[Any] | None:
    try:
        files: list[Any] = json.loads(_read(place))["files"]
        parse_manifest(files)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, WeightsError) as error:
        failures.append(f"{place}: {error}")
        return None
    return files


def _lock_hub(
    key: str, hub: str, repository: str, revision: str, unpinned: bool, failures: list[str]
) -> HubRevision | None:
    """What a hub has at a revision; None, and the reason among the failures, when it cannot be asked."""
    pinned = COMMIT.fullmatch(revision) is not None
    if not pinned and (hub != "huggingface" or not unpinned):
        raise Refusal(
            found=f"'{revision}' as the revision of {repository} on {NAMES[hub]}, which is no commit",
            needed="40 hexadecimal digits: a branch names other bytes tomorrow" + _commit_of(hub, repository, revision),
            change=f"serving_model_revisions.{key}"
            + (f", or name {key} in serving_unpinned_models" if hub == "huggingface" else ""),
        )
    try:
        found = read_hub(hub, repository, revision)
    except Refusal as refusal:
        failures.append(refusal.found)
        return None
    if pinned and found.commit != revision:
        raise Refusal(
            found=f"{NAMES[hub]} answers commit {found.commit} for {revision} of {repository}",
            needed="the commit that was asked for",
            change=f"serving_model_revisions.{key}",
        )
    if not any(str(entry["path"]).endswith(".safetensors") for entry in found.files):
        names = ", ".join(sorted(str(entry["path"]) for entry in found.files)[:5]) or "nothing that an engine reads"
        raise Refusal(
            found=f"{repository} on {NAMES[hub]} has no *.safetensors ({names})",
            needed="a checkpoint in safetensors: GGUF is for llama.cpp and its kin, and pickles are code that runs",
            change=f"`repositories` of {key} in serving_models",
        )
    parse_manifest(found.files)
    return found


def _commit_of(hub: str, repository: str, revision: str) -> str:
    """What a branch names now, as the end of a sentence; nothing when the hub does not tell."""
    if hub != "huggingface":
        return ""
    try:
        return f"; now it is {read_hub(hub, repository, revision).commit}"
    except Refusal:
        return ""


def _with_other_hubs(
    key: str, hub: str, found: HubRevision, hubs: Mapping[str, str], others: Mapping[str, Any]
) -> dict[str, Any]:
    """The lock of a model of which other hubs have a copy: other bytes are refused now, not later by eight hosts."""
    revisions = {hub: found.commit}
    expected = {entry["path"]: (entry["size_bytes"], entry["sha256"]) for entry in found.files}
    for other, named in others.items():
        there = read_hub(other, hubs[other], named)
        have = {entry["path"]: (entry["size_bytes"], entry["sha256"]) for entry in there.files}
        wrong = sorted(path for path, content in expected.items() if have.get(path) != content)
        if wrong:
            raise Refusal(
                found=f"{NAMES[other]} has other content or none for {len(wrong)} of {len(expected)} files of {key} "
                f"({', '.join(wrong[:5])}) than {NAMES[hub]} at {found.commit}",
                needed="the same bytes at every source",
                change=f"serving_model_revisions.{key} with a commit for each hub, or take one of them out of "
                f"serving_weight_sources.{key}",
            )
        revisions[other] = there.commit
    return {"revision": found.commit, "files": [dict(entry) for entry in found.files], "hub_revisions": revisions}


def _read(place: str) -> str:
    if "://" not in place:
        return Path(place).read_text(encoding="utf-8")
    with urllib.request.urlopen(place, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310 (the operator's own sources)
        text: str = response.read().decode()
        return text
