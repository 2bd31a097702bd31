"""What a host already has: of the models, so that nobody counts room for them again, and of releases."""

from __future__ import annotations

import os
from typing import Any

from .host_probe import Host

_INCOMING = ".incoming"


def models(host: Host, directory: str) -> list[dict[str, Any]]:
    """The revisions under the models directory: key, revision, published, size_bytes.

    The layout is that of weights.py: published revisions, and what an interrupted run left under .incoming.
    """
    found = []
    for key in host.files.names(directory):
        if key.startswith("."):
            continue
        for revision in host.files.names(f"{directory}/{key}"):
            found.append(_entry(host, f"{directory}/{key}/{revision}", key, revision, published=True))
    for name in host.files.names(f"{directory}/{_INCOMING}"):
        key, sign, revision = name.partition("@")
        place = f"{directory}/{_INCOMING}/{name}"
        if sign and os.path.isdir(host.files.path(place)):  # noqa: PTH112
            found.append(_entry(host, place, key, revision, published=False))
    return found


def deployments(host: Host, directory: str) -> list[str]:
    """The deployments that have releases on the host."""
    return [name for name in host.files.names(directory) if host.files.names(f"{directory}/{name}/releases")]


def _entry(host: Host, place: str, key: str, revision: str, *, published: bool) -> dict[str, Any]:
    size_bytes = 0
    for parent, _directories, names in os.walk(host.files.path(place)):
        for name in names:
            # The record of weights.py is not part of the model; no model has hidden files.
            if not name.startswith("."):
                size_bytes += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH118
    return {"key": key, "revision": revision, "published": published, "size_bytes": size_bytes}
