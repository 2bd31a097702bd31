"""What a model hub says about one revision of a repository: its commit, and size and SHA-256 of each file.

Only metadata is asked for, with the hubs' own clients. A small file that a hub keeps in git itself (config.json and its
like) has no SHA-256 there: it is fetched, held against its git object id, and hashed. No weight is downloaded.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import re
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from metalserve.errors import Refusal

ENDPOINTS = {
    "huggingface": ("HF_ENDPOINT", "https://huggingface.co"),
    "modelscope": ("MODELSCOPE_ENDPOINT", "https://modelscope.cn"),
}
TOKENS = {"huggingface": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}
NAMES = {"huggingface": "Hugging Face", "modelscope": "ModelScope"}
# Below the endpoint; each is one HTTPS address with ranges, which redirects to the hub's storage.
FILE_PATHS = {
    "huggingface": "{repository}/resolve/{revision}",
    "modelscope": "models/{repository}/resolve/{revision}",
}
# What no engine reads, or what would be loaded a second time in another format.
UNUSED = (
    ".*", "*/.*", "*.md", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.pdf", "*.mp4",
    "*.gguf", "*.onnx", "*.onnx_data", "*.msgpack", "*.h5", "*.ot", "*.tflite", "*.mlmodel",
    "original/*", "onnx/*", "openvino/*", "configuration.json",
)  # fmt: skip
# Pickles are code that runs when it is loaded; they are left out where safetensors stand beside them.
PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth")
COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_SECONDS = 60.0
_LARGEST_SMALL_FILE_BYTES = 64 << 20


@dataclass(frozen=True)
class HubRevision:
    """One revision as the hub lists it; `files` in the form of a manifest."""

    commit: str
    files: tuple[Mapping[str, Any], ...]


def hub_endpoint(hub: str) -> str:
    """The base URL of a hub: that of its clients' variable (HF_ENDPOINT, MODELSCOPE_ENDPOINT), else the public one."""
    variable, default = ENDPOINTS[hub]
    return (os.environ.get(variable) or default).rstrip("/")


def hub_files_url(hub: str, repository: str, revision: str) -> str:
    """The base URL of a revision's files."""
    return f"{hub_endpoint(hub)}/{FILE_PATHS[hub].format(repository=repository, revision=revision)}"


def read_hub(hub: str, repository: str, revision: str | None) -> HubRevision:
    """Ask a hub for a revision; None stands for its default branch.

    Raises:
        Refusal: the hub cannot be reached, wants a login, has no such repository or revision, or tells no hash.
    """
    return _READERS[hub](repository, revision)


def read_hub_file(hub: str, repository: str, revision: str, path: str) -> bytes:
    """A small file of a revision, as it comes: whether it is the right one is for its hash to say.

    Raises:
        Refusal: the hub does not give it.
    """
    url = f"{hub_files_url(hub, repository, revision)}/{path}"
    request = urllib.request.Request(url)  # noqa: S310 (the hub's own address)
    token = os.environ.get(TOKENS[hub])
    if token:
        # Not after a redirect to the hub's storage, which has a signature of its own.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310
            return bytes(response.read(_LARGEST_SMALL_FILE_BYTES))
    except (OSError, http.client.HTTPException) as error:
        raise _unreadable(hub, f"{repository}/{path}", revision, error) from error


def used_files(files: Mapping[str, Any]) -> list[str]:
    """The paths that an engine may read, sorted."""
    skipped = [*UNUSED, *(PICKLES if any(path.endswith(".safetensors") for path in files) else ())]
    return sorted(path for path in files if not any(fnmatch(path, pattern) for pattern in skipped))


def _read_huggingface(repository: str, revision: str | None) -> HubRevision:
    # Takes a second to import.
    from huggingface_hub import HfApi, get_session

    api = HfApi(endpoint=hub_endpoint("huggingface"))
    try:
        info = api.model_info(repository, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS)
    except Exception as error:
        # The client's own errors, those of its HTTP library, and ValueError for an answer that is no JSON.
        raise _unreadable("huggingface", repository, revision, error) from error
    siblings = {item.rfilename: item for item in info.siblings or []}
    commit = str(info.sha)
    base = hub_files_url("huggingface", repository, commit)
    headers = api._build_hf_headers()

    def fetch(path: str) -> bytes:
        response = get_session().get(f"{base}/{path}", headers=headers, timeout=_TIMEOUT_SECONDS, follow_redirects=True)
        response.raise_for_status()
        return bytes(response.content)

    files = []
    for path in used_files(siblings):
        item = siblings[path]
        if item.lfs is not None:
            size, digest = int(item.lfs.size), str(item.lfs.sha256)
        else:
            size, digest = _small_file("huggingface", repository, path, int(item.size or 0), item.blob_id, fetch)
        files.append({"path": path, "size_bytes": size, "sha256": digest})
    return HubRevision(commit, tuple(files))


def _read_modelscope(repository: str, revision: str | None) -> HubRevision:
    from modelscope_hub import HubApi

    logging.getLogger("modelscope_hub").setLevel(logging.ERROR)
    wanted = revision or "master"
    try:
        api = HubApi(endpoint=hub_endpoint("modelscope"))
        listed = {item.path: item for item in api.list_repo_files(repository, "model", revision=wanted)}
    except Exception as error:
        raise _unreadable("modelscope", repository, revision, error) from error
    listed = {path: item for path, item in listed.items() if item.type != "tree"}
    files = []
    for path in used_files(listed):
        item = listed[path]
        if not item.sha256:
            raise Refusal(
                found=f"ModelScope tells no SHA-256 of {path} in {repository} at {wanted}",
                needed="the hash of each file",
                change="make the manifest with `metalserve manifest DIRECTORY` from a copy that you trust",
            )
        files.append({"path": path, "size_bytes": int(item.size), "sha256": str(item.sha256)})
    return HubRevision(wanted, tuple(files))


_READERS: dict[str, Callable[[str, str | None], HubRevision]] = {
    "huggingface": _read_huggingface,
    "modelscope": _read_modelscope,
}


def _small_file(
    hub: str, repository: str, path: str, size: int, git_id: str | None, fetch: Callable[[str], bytes]
) -> tuple[int, str]:
    """Size and SHA-256 of a file that is kept in git, whose object id says whether what came is what was committed."""
    found = ""
    if size <= _LARGEST_SMALL_FILE_BYTES:
        try:
            data = fetch(path)
        except Exception as error:
            raise _unreadable(hub, f"{repository}/{path}", None, error) from error
        header = f"blob {len(data)}\0".encode()
        if git_id is None or hashlib.sha1(header + data, usedforsecurity=False).hexdigest() == git_id:
            return len(data), hashlib.sha256(data).hexdigest()
        found = f"{len(data)} bytes that do not have git's object id {git_id}"
    raise Refusal(
        found=f"{NAMES[hub]} gives {found or f'{size} bytes without a SHA-256'} for {path} of {repository}",
        needed="the content that was committed",
        change="run again; when it stays, a proxy between this machine and the hub changes files",
    )


def _unreadable(hub: str, repository: str, revision: str | None, error: Exception) -> Refusal:
    text = " ".join(str(error).split())
    where = f"{repository} at {revision}" if revision else repository
    return Refusal(
        found=f"{NAMES[hub]} ({hub_endpoint(hub)}) gives no {where} ({type(error).__name__}: {text[:300]})",
        needed="a hub that this machine reaches, and a login where the repository is gated",
        change=f"the repository or revision, {ENDPOINTS[hub][0]} for a mirror of the hub, or {TOKENS[hub]} in the "
        "environment for a gated one",
    )
