"""What the releases of a host name: it must not be removed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

RELEASES_ROOT = Path("/etc/metalserve")


class UnreadableReleaseError(Exception):
    """A release cannot be read, so that nobody can say what it needs."""


def named_by_releases(
    root: Path, names_of: Callable[[Mapping[str, Any]], Iterable[str]], what: str
) -> dict[str, set[str]]:
    """Names, and the releases that have them.

    Args:
        root: where deployments keep their releases.
        names_of: the names in a release's record.
        what: what is named, for the refusal: `weights`, `image`.

    Raises:
        UnreadableReleaseError: with the file.
    """
    named: dict[str, set[str]] = {}
    for file in root.glob("*/releases/*/release.json"):
        try:
            names = list(names_of(json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnreadableReleaseError(
                f"{file} cannot be read ({error!r}). Needed: the record of each release, to know which {what} it "
                "needs. Change: run playbooks/rollout.yml, which writes it again, or remove the release's directory."
            ) from error
        for name in names:
            named.setdefault(name, set()).add(f"{file.parts[-4]}/{file.parts[-2]}")
    return named


def model_directories(release: Mapping[str, Any]) -> list[str]:
    """The directories of weights that a release mounts: its model's, and those of what goes beside it."""
    parts = [(release["model"], release["model_revision"])]
    parts += [(part["key"], part["revision"]) for part in release.get("beside") or ()]
    return [f"{release['models_dir'].rstrip('/')}/{key}/{revision}" for key, revision in parts]
