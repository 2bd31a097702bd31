"""Releases on a host: written once under their id, activated by one link.

    /etc/metalserve/<deployment>/releases/<id>/{release.json,engine.yaml,release.env}
    /etc/metalserve/<deployment>/current  -> releases/<id>
    /etc/metalserve/<deployment>/previous -> releases/<id>

Every step is one rename: a run killed at any point leaves the old state or the new one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Optional


def active_release(root: Path, deployment: str) -> Optional[str]:
    """The id that `current` points at, or None."""
    try:
        return Path(os.readlink(root / deployment / "current")).name  # noqa: PTH115 (Path.readlink would do the same)
    except OSError:
        return None


def stage_release(root: Path, deployment: str, release_id: str, files: Mapping[str, str], *, dry_run: bool) -> bool:
    """Write the release's files when they are not there as given; returns whether anything was (or would be) written.

    Raises:
        OSError: the directory cannot be written.
    """
    target = root / deployment / "releases" / release_id
    if all(_text(target / name) == text for name, text in files.items()):
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

    `previous` then names what was current, if its gate has passed: it is the way back, and a refused release is none.

    Raises:
        OSError: a link cannot be written.
    """
    before = active_release(root, deployment)
    if before == release_id:
        return False
    if not dry_run:
        # `previous` first: between the two renames both links name releases that exist.
        if before is not None and has_passed(root, deployment, before):
            _link(root / deployment / "previous", before)
        _link(root / deployment / "current", release_id)
    return True


def has_passed(root: Path, deployment: str, release_id: str) -> bool:
    """Whether the gate's last verdict on a release, kept beside it, was that it may take traffic."""
    try:
        record = json.loads((root / deployment / "releases" / release_id / "gate.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("passed") is True


def _link(path: Path, release_id: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(f"releases/{release_id}")
    os.replace(temporary, path)


def _text(path: Path) -> Optional[str]:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
