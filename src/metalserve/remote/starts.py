"""What a host keeps of its deployments' starts: the current release, and what its engine and the last one measured."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .capacity import RECORD_NAME
from .files import read_json_object
from .releases import active_release, link_target


def kept_starts(root: Path, deployments: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What lies under `root` for each deployment; a deployment that was never activated is left out.

    Returns:
        {deployment: {release_id, proven, learned_from, starts}}: the current release, whether a release of the
        deployment has ever passed its gate, the records of earlier starts that the plan went by, and those of the
        starts of the current and the previous release.
    """
    found = {}
    for name in deployments:
        current = active_release(root, name)
        if current is None:
            continue
        releases = root / name / "releases"
        ids = [current, link_target(root, name, "previous")]
        records = [read_json_object(releases / kept / RECORD_NAME).get("start") for kept in ids if kept]
        plan = read_json_object(releases / current / "release.json").get("plan")
        learned = plan.get("learned_from") if isinstance(plan, dict) else None
        found[name] = {
            "release_id": current,
            "proven": link_target(root, name, "good") is not None,
            "learned_from": learned if isinstance(learned, list) else [],
            "starts": [record for record in records if isinstance(record, dict)],
        }
    return found
