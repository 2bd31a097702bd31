"""What a host keeps of its deployments' starts: the current release, and what its engine and the last one measured."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Optional

from .capacity import RECORD_NAME


def kept_starts(root: Path, deployments: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What lies under `root` for each deployment; a deployment that was never activated is left out.

    Returns:
        {deployment: {release_id, learned_from, starts}}: the current release, the records of earlier starts that its
        plan went by, and those of the starts of the current and the previous release.
    """
    found = {}
    for name in deployments:
        current = _target(root / name / "current")
        if current is None:
            continue
        releases = root / name / "releases"
        ids = [current, _target(root / name / "previous")]
        records = [_mapping(releases / release_id / RECORD_NAME).get("start") for release_id in ids if release_id]
        plan = _mapping(releases / current / "release.json").get("plan")
        learned = plan.get("learned_from") if isinstance(plan, dict) else None
        found[name] = {
            "release_id": current,
            "learned_from": learned if isinstance(learned, list) else [],
            "starts": [record for record in records if isinstance(record, dict)],
        }
    return found


def _target(link: Path) -> Optional[str]:
    try:
        return Path(os.readlink(link)).name  # noqa: PTH115 (Path.readlink would do the same)
    except OSError:
        return None


def _mapping(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is none: such a file says nothing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
