"""`metalserve releases` and `metalserve diff`: what lies below a directory such as /etc/metalserve, or a copy of it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from metalserve.errors import Refusal
from metalserve.remote.release_list import (
    UnknownReleaseError,
    diff_directories,
    find_release,
    list_releases,
    release_table,
)

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_ROOT = Path("/etc/metalserve")


def add_parser(subparsers: SubParsers) -> None:
    """Add the parsers of both commands."""
    listed = subparsers.add_parser("releases", help="list the releases of a host, or of a copy of its directory")
    listed.add_argument("deployment", nargs="*", help="only these")
    listed.add_argument("--json", action="store_true", help="as JSON")
    listed.set_defaults(run=run_releases)
    compared = subparsers.add_parser(
        "diff",
        help="what changes from one release to another",
        description="A release is a directory that holds its release.json, or a name below --root: DEPLOYMENT/ID, "
        "DEPLOYMENT/current, DEPLOYMENT/good, DEPLOYMENT/previous, or an id alone.",
    )
    compared.add_argument("old", help="the release before")
    compared.add_argument("new", help="the release after")
    compared.set_defaults(run=run_diff)
    for parser in (listed, compared):
        parser.add_argument("--root", type=Path, default=DEFAULT_ROOT, help=f"without it {DEFAULT_ROOT}")


def run_releases(options: argparse.Namespace) -> int:
    """Print the list."""
    if not options.root.is_dir():
        raise Refusal(
            found=f"no directory {options.root}",
            needed="one that holds deployments with their releases",
            change="--root, or playbooks/ops/releases.yml, which reads the hosts",
        )
    rows = list_releases(options.root, options.deployment)
    lines = [json.dumps(rows, ensure_ascii=False, indent=2)] if options.json else release_table(rows)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def run_diff(options: argparse.Namespace) -> int:
    """Print the difference; nothing when there is none."""
    old, new = (_directory(options.root, name) for name in (options.old, options.new))
    sys.stdout.write("".join(f"{line}\n" for line in diff_directories(old, new)))
    return 0


def _directory(root: Path, name: str) -> Path:
    given = Path(name)
    if (given / "release.json").is_file():
        return given
    try:
        return find_release(root, name)
    except UnknownReleaseError as error:
        found, _, rest = str(error).partition(". Needed: ")
        needed, _, change = rest.partition(". Change: ")
        raise Refusal(found=found, needed=needed, change=f"{change.rstrip('.')}, or --root") from error
