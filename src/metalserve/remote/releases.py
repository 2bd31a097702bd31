"""Releases on a host: written once under their id, activated by one link.

    /etc/metalserve/<deployment>/releases/<id>/{release.json,engine.yaml,release.env,endpoint.json}
                                              {gate.json,capacity.json,refused.json}    what became of it
    /etc/metalserve/<deployment>/current  -> releases/<id>    what the unit runs
    /etc/metalserve/<deployment>/good     -> releases/<id>    the last one whose gate has passed while it was current
    /etc/metalserve/<deployment>/previous -> releases/<id>    the good one before that

Every step is one rename: a run killed at any point leaves the old state or the new one. `good` and `previous` never
name a release that was not proven here, so either is a way back.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from .files import read_json_object, read_text, write_json

LINKS = ("current", "good", "previous")


def link_target(root: Path, deployment: str, name: str) -> Optional[str]:
    """The id that a link of a deployment points at, or None."""
    try:
        return Path(os.readlink(root / deployment / name)).name  # noqa: PTH115 (Path.readlink would do the same)
    except OSError:
        return None


def active_release(root: Path, deployment: str) -> Optional[str]:
    """The id that `current` points at, or None."""
    return link_target(root, deployment, "current")


def release_directory(root: Path, deployment: str, release_id: str) -> Path:
    """Where the files of a release lie."""
    return root / deployment / "releases" / release_id


def stage_release(root: Path, deployment: str, release_id: str, files: Mapping[str, str], *, dry_run: bool) -> bool:
    """Write the release's files when they are not there as given; returns whether anything was (or would be) written.

    Raises:
        OSError: the directory cannot be written.
    """
    target = release_directory(root, deployment, release_id)
    if all(read_text(target / name) == text for name, text in files.items()):
        return False
    if dry_run:
        return True
    work = target.with_name(f".{release_id}.new")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for name, text in files.items():
        (work / name).write_text(text, encoding="utf-8")
        # A power cut must not leave an empty file behind a link that looks right.
        with (work / name).open("rb") as stream:
            os.fsync(stream.fileno())
        (work / name).chmod(0o644)
    if target.exists():
        # Damaged by hand: the files are replaced one by one, what else lies there (the gate's result) stays.
        for name in files:
            os.replace(work / name, target / name)
        shutil.rmtree(work)
    else:
        work.chmod(0o755)
        work.rename(target)
    return True


def activate_release(root: Path, deployment: str, release_id: str, *, dry_run: bool) -> bool:
    """Point `current` at the release; returns whether that was a change.

    Raises:
        OSError: the link cannot be written.
    """
    if active_release(root, deployment) == release_id:
        return False
    if not dry_run:
        _link(root / deployment / "current", release_id)
    return True


def mark_good(root: Path, deployment: str, release_id: str) -> bool:
    """Record that the gate of the release has passed; returns whether that was news.

    Raises:
        OSError: a link cannot be written.
    """
    before = link_target(root, deployment, "good")
    forgiven = refusal_of(root, deployment, release_id) is not None
    if forgiven:
        forgive(root, deployment, release_id)
    if before == release_id:
        return forgiven
    if before is not None:
        # `previous` first: between the two renames both links name releases that are proven.
        _link(root / deployment / "previous", before)
    _link(root / deployment / "good", release_id)
    return True


@dataclass(frozen=True)
class Refused:
    """Why a release was refused on this host.

    Args:
        when: UTC, `2027-01-02T01:04:05Z`.
        stage: `start` (did not become ready), `gate` (the gate refused it) or `operator` (taken back by hand).
        reason: one line.
        circumstances: what the refusal depended on besides the release; when one differs now, a new try is due.
    """

    when: str
    stage: str
    reason: str
    circumstances: Mapping[str, Any]


def refuse(root: Path, deployment: str, release_id: str, refused: Refused) -> None:
    """Remember a refusal beside the release.

    Raises:
        OSError: the file cannot be written.
    """
    record = {
        "schema": 1,
        "when": refused.when,
        "stage": refused.stage,
        "reason": refused.reason,
        "circumstances": dict(refused.circumstances),
    }
    write_json(release_directory(root, deployment, release_id) / "refused.json", record)


def forgive(root: Path, deployment: str, release_id: str) -> None:
    """Forget the refusal of a release, if there is one.

    Raises:
        OSError: the file cannot be removed.
    """
    (release_directory(root, deployment, release_id) / "refused.json").unlink(missing_ok=True)


def refusal_of(root: Path, deployment: str, release_id: str) -> Optional[Refused]:
    """The refusal that is remembered for a release, or None."""
    record = read_json_object(release_directory(root, deployment, release_id) / "refused.json")
    if not record:
        return None
    circumstances = record.get("circumstances")
    return Refused(
        when=str(record.get("when", "")),
        stage=str(record.get("stage", "")),
        reason=str(record.get("reason", "")),
        circumstances=circumstances if isinstance(circumstances, dict) else {},
    )


def deployment_names(root: Path) -> list[str]:
    """The deployments that have releases here, in alphabetic order."""
    try:
        return sorted(path.name for path in root.iterdir() if (path / "releases").is_dir())
    except OSError:
        return []


def release_ids(root: Path, deployment: str) -> list[str]:
    """The releases of a deployment, the one that was touched last first."""
    try:
        found = [path for path in (root / deployment / "releases").iterdir() if not path.name.startswith(".")]
        return [path.name for path in sorted(found, key=lambda path: (-path.stat().st_mtime_ns, path.name))]
    except OSError:
        return []


def prune_releases(root: Path, deployment: str, keep: int, needed: Collection[str], *, dry_run: bool) -> list[str]:
    """Remove all but the newest `keep` releases of a deployment; returns the ids that were (or would be) removed.

    What a link names or `needed` holds stays, however old.

    Raises:
        OSError: a directory cannot be removed.
    """
    kept = {*needed, *(link_target(root, deployment, name) for name in LINKS)}
    old = [release_id for release_id in release_ids(root, deployment)[max(0, keep) :] if release_id not in kept]
    for release_id in [] if dry_run else old:
        shutil.rmtree(release_directory(root, deployment, release_id))
    return old


def _link(path: Path, release_id: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(f"releases/{release_id}")
    os.replace(temporary, path)
