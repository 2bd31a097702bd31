"""Which revisions on a host nobody needs any more: no release names them, and they are older than those to keep."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .release_names import RELEASES_ROOT, UnreadableReleaseError, model_directories, named_by_releases
from .weights import locked, read_record
from .weights_manifest import RECORD_NAME, WeightsError


@dataclass(frozen=True)
class Revision:
    """One published revision: its size, when it was published (seconds since 1970), and the releases that name it."""

    key: str
    revision: str
    path: Path
    size_bytes: int
    published_at: float
    releases: tuple[str, ...]


def published_revisions(models_dir: Path, releases_root: Path = RELEASES_ROOT) -> list[Revision]:
    """Everything that is published, newest first.

    Raises:
        WeightsError: a release cannot be read, so that nobody can say what it needs.
    """
    try:
        named = named_by_releases(releases_root, model_directories, "weights")
    except UnreadableReleaseError as error:
        raise WeightsError(str(error)) from error
    found = []
    for record in models_dir.glob(f"[!.]*/[!.]*/{RECORD_NAME}"):
        directory = record.parent
        size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        releases = tuple(sorted(named.get(str(directory), ())))
        published = float(read_record(directory).get("published_at") or 0)
        found.append(Revision(directory.parent.name, directory.name, directory, size, published, releases))
    return sorted(found, key=lambda item: item.published_at, reverse=True)


def unneeded(revisions: Collection[Revision], wanted: Collection[tuple[str, str]], keep: int) -> list[Revision]:
    """Those that may go: not wanted, named by no release, and not among the `keep` newest others of their model."""
    result = []
    for key in sorted({item.key for item in revisions}):
        others = [item for item in revisions if item.key == key and (item.key, item.revision) not in wanted]
        ordered = sorted(others, key=lambda item: item.published_at, reverse=True)
        result += [item for item in ordered[keep:] if not item.releases]
    return result


def prune(
    models_dir: Path,
    wanted: Collection[tuple[str, str]],
    keep: int,
    *,
    releases_root: Path = RELEASES_ROOT,
    dry_run: bool = False,
) -> list[dict[str, Any]]:
    """Remove what is not needed, and what interrupted fetches of other revisions of the wanted models left.

    Returns:
        {key, revision, size_bytes} of each; in a dry run of what would go.

    Raises:
        WeightsError: a release cannot be read.
    """
    removed = []
    for item in unneeded(published_revisions(models_dir, releases_root), wanted, keep):
        removed.append({"key": item.key, "revision": item.revision, "size_bytes": item.size_bytes})
        if not dry_run:
            # Out of sight first: half a model must not lie under a revision's name.
            doomed = item.path.with_name(f".{item.revision}.removed")
            item.path.rename(doomed)
            shutil.rmtree(doomed)
    for leftover in sorted((models_dir / ".incoming").glob("*@*")):
        key, _, revision = leftover.name.partition("@")
        if not leftover.is_dir() or (key, revision) in wanted or key not in {name for name, _ in wanted}:
            continue
        size = sum(path.stat().st_size for path in leftover.rglob("*") if path.is_file())
        try:
            with locked(leftover.with_name(leftover.name + ".lock"), 0):
                removed.append({"key": key, "revision": revision, "size_bytes": size})
                if not dry_run:
                    shutil.rmtree(leftover)
        except WeightsError:
            # Somebody fetches it.
            continue
    for doomed in [] if dry_run else models_dir.glob("[!.]*/.*.removed"):
        shutil.rmtree(doomed)
    return removed


def removable_sentence(
    models_dir: Path, wanted: Collection[tuple[str, str]], releases_root: Path = RELEASES_ROOT
) -> str:
    """The end of a refusal for want of space: what could go, and how much that is."""
    try:
        items = unneeded(published_revisions(models_dir, releases_root), wanted, 0)
    except (WeightsError, OSError):
        return ""
    if not items:
        return " No revision there could be removed: releases name all of them."
    total = sum(item.size_bytes for item in items)
    names = ", ".join(f"{item.path} ({item.size_bytes / 2**30:.2f} GiB)" for item in items[:5])
    return f" No release names {len(items)} revisions of {total / 2**30:.2f} GiB there: {names}; model_weights_keep: 0."
