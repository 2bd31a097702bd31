"""The engine images on a host: found by digest, whatever registry they came from, removed when nobody needs them.

A digest is the hash of an image's manifest. Two repositories that have the same digest have the same image, bit by
bit, so that the name is only where it came from. An image that was derived here has a tag that is its hash.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from .image_names import DERIVED_REPOSITORY, repository_of, split_repository
from .release_names import RELEASES_ROOT, named_by_releases

_NONE = "<none>"
# Runs a command; its standard output, empty where it fails.
Runner = Callable[[Sequence[str]], str]
_LIST = ("docker", "image", "ls", "--digests", "--no-trunc", "--format", "{{json .}}")


@dataclass(frozen=True)
class LocalImage:
    """A name of an image on this host.

    Attributes:
        repository: with its registry, as Docker shows it.
        tag: empty where there is none.
        digest: `sha256:` and 64 hex digits; that of a derived image is in its tag.
        created: when it was built, as Docker writes it; to be sorted by.
    """

    repository: str
    tag: str
    digest: str
    created: str

    @property
    def name(self) -> str:
        """What `docker run` takes."""
        derived = self.repository == DERIVED_REPOSITORY
        return f"{self.repository}:{self.tag}" if derived else f"{self.repository}@{self.digest}"

    @property
    def path(self) -> str:
        """The repository without the registry: the same for what came from a mirror."""
        return split_repository(self.repository)[1]


def local_images(run: Runner) -> list[LocalImage]:
    """Every image of this host that has a digest; none without Docker."""
    found = []
    for line in run(_LIST).splitlines():
        try:
            row = json.loads(line)
            repository, tag, digest = str(row["Repository"]), str(row["Tag"]), str(row["Digest"])
        except (ValueError, KeyError, TypeError):
            continue
        if repository == DERIVED_REPOSITORY and tag != _NONE:
            digest = f"sha256:{tag}"
        if _NONE not in (repository, digest):
            found.append(LocalImage(repository, "" if tag == _NONE else tag, digest, str(row.get("CreatedAt"))))
    return found


def local_name(image: str, run: Runner) -> Optional[str]:
    """The name under which this host has an image; None where it has not.

    Args:
        image: repository@digest. A name of that repository is taken first, then any with the digest.
    """
    repository, _, digest = image.partition("@")
    found = [item for item in local_images(run) if item.digest == digest]
    found.sort(key=lambda item: item.repository != repository)
    return found[0].name if found else None


def unneeded(
    images: Collection[LocalImage], wanted: Collection[str], named: Collection[str], keep: int
) -> list[LocalImage]:
    """The images that may go, of the repositories that are wanted.

    Args:
        images: those of the host.
        wanted: `repository@digest` of what the host is to have.
        named: digests that releases name.
        keep: how many further images of each repository stay although no release names them: the newest ones.
    """
    paths = {split_repository(repository_of(image))[1] for image in wanted}
    needed = {image.partition("@")[2] for image in wanted} | set(named)
    others: dict[str, list[LocalImage]] = {}
    for image in sorted(images, key=lambda item: item.created, reverse=True):
        # What has a tag was not pulled by its digest: somebody else's.
        if (
            image.path in paths
            and image.digest not in needed
            and (not image.tag or image.repository == DERIVED_REPOSITORY)
        ):
            others.setdefault(image.path, []).append(image)
    doomed = []
    for found in others.values():
        kept = list(dict.fromkeys(image.digest for image in found))[:keep]
        doomed += [image for image in found if image.digest not in kept]
    return doomed


def prune_images(
    wanted: Collection[str],
    keep: int,
    run: Runner,
    remove: Callable[[str], bool],
    *,
    releases_root: Path = RELEASES_ROOT,
    dry_run: bool = False,
) -> list[str]:
    """Remove what is not needed; returns the names that went, or in a dry run would go.

    `remove` removes one name and says whether it went: Docker keeps what a container uses.

    Raises:
        UnreadableReleaseError: a release cannot be read, so that nobody can say what it needs.
    """
    named = named_by_releases(releases_root, lambda release: [_digest_of(release)], "image")
    doomed = [image.name for image in unneeded(local_images(run), wanted, named, keep)]
    return [name for name in doomed if dry_run or remove(name)]


def _digest_of(release: Mapping[str, Any]) -> str:
    digest = str(release["image"]).partition("@")[2]
    if not digest:
        raise ValueError(f"the image {release['image']} without a digest")
    return digest
