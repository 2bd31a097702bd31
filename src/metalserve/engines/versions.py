"""Version numbers of engines: compared as numbers, refused when they are not release versions."""

from __future__ import annotations

import re

from metalserve.errors import Refusal

_RELEASE = re.compile(r"v?(\d+)\.(\d+)\.(\d+)(?:\.post\d+)?(?:\+[0-9A-Za-z.]+)?")


def version_key(version: str) -> tuple[int, int, int]:
    """Comparable form of a release version; a leading ``v`` and a local part (``+cpu``) are ignored.

    Raises:
        Refusal: for anything else, such as ``latest`` or a nightly build.

    """
    match = _RELEASE.fullmatch(version)
    if match is None:
        raise Refusal(
            found=f"engine version '{version}'",
            needed="a release version of three numbers, such as 0.33.0",
            change="set engine_version of the deployment, or leave it out for the catalogue's version",
        )
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch)


def plain_version(version: str) -> str:
    """Three numbers without prefix and local part: ``v0.32.0+cpu`` becomes ``0.32.0``."""
    return ".".join(str(number) for number in version_key(version))
