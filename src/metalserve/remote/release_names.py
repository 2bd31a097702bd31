"""What the releases of a host name: it must not be removed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RELEASES_ROOT = Path("/etc/metalserve")


class UnreadableReleaseError(Exception):
    """A release cannot be read, so that nobody can say what it needs."""


def named_by_releases(root: Path, name_of: Callable[[Mapping[str, Any]], str], what: str) -> dict[str, set[str]]:
    """Names, and the releases that have them.

    Args:
        root: where deployments keep their releases.
        name_of: the name in a release's record.
        what: what is named, for the refusal: `weights`, `image`.

    Raises:
        UnreadableReleaseError: with the file.
    """
    named: dict[str, set[str]] = {}
    for file in root.glob("*/releases/*/release.json"):
        try:
            name = name_of(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnreadableReleaseError(
                f"{file} cannot be read ({error!r}). Needed: the record of each release, to know which {what} it "
                "needs. Change: run playbooks/rollout.yml, which writes it again, or remove the release's directory."
            ) from error
        named.setdefault(name, set()).add(f"{file.parts[-4]}/{file.parts[-2]}")
    return named
