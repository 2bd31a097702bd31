"""Names of container images, as Docker reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

DOCKER_HUB = "docker.io"
_DOCKER_HUB_NAMES = (DOCKER_HUB, "index.docker.io", "registry-1.docker.io")
# What is built on a host from a pinned image and pinned packages. No registry has it.
DERIVED_REPOSITORY = "metalserve/derived"
# Another way to build gives other images: the number goes into their names.
DERIVED_RECIPE = 1


def repository_of(reference: str) -> str:
    """A reference without its tag and digest."""
    name = reference.partition("@")[0]
    head, slash, last = name.rpartition("/")
    return head + slash + last.partition(":")[0]


def split_repository(name: str) -> tuple[str, str]:
    """Registry and repository of a name without tag, with Docker's own defaults.

    `vllm/vllm-openai` is `docker.io` and `vllm/vllm-openai`, `python` is `docker.io` and `library/python`.
    """
    first, _, rest = name.partition("/")
    named = bool(rest) and ("." in first or ":" in first or first == "localhost")
    if named and first not in _DOCKER_HUB_NAMES:
        return first, rest
    name = rest if named else name
    return DOCKER_HUB, name if "/" in name else f"library/{name}"


def mirrored(reference: str, mirrors: Mapping[str, Any]) -> list[str]:
    """The repositories of a reference's image in the mirrors of its registry, in their order.

    Args:
        reference: repository with or without a tag.
        mirrors: {registry: mirror or list of mirrors}; a mirror is a registry, with a path where it has one.
    """
    registry, repository = split_repository(repository_of(reference))
    given = mirrors.get(registry) or []
    return [f"{str(mirror).rstrip('/')}/{repository}" for mirror in ([given] if isinstance(given, str) else given)]


def derived_digest(base_digest: str, packages: Sequence[str]) -> str:
    """What a derived image is called: the hash of all that goes into it, `sha256:` and 64 hex digits.

    Args:
        base_digest: the digest of the image below it.
        packages: requirements with exact versions and hashes; their order does not count.
    """
    content = {"recipe": DERIVED_RECIPE, "base": base_digest, "packages": sorted(" ".join(p.split()) for p in packages)}
    return "sha256:" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
