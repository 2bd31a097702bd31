"""What a host knows about its releases: a list for people, and the difference between two."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import read_json_object
from .releases import LINKS, deployment_names, link_target, refusal_of, release_directory, release_ids

HEADER = ("deployment", "release", "state", "engine", "model", "revision", "gate")


class UnknownReleaseError(Exception):
    """A release that is not here; the text says which are."""


def list_releases(root: Path, deployments: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The releases below a directory such as /etc/metalserve, newest first for each deployment.

    Each has deployment, release, links (names of the links that point at it), refused (why, or None), gate (`passed`,
    `failed` or None), judged_at, and engine, engine_version, image, model and model_revision of its record.
    """
    rows = []
    for name in deployments or deployment_names(root):
        links = {link: link_target(root, name, link) for link in LINKS}
        for release_id in release_ids(root, name):
            directory = release_directory(root, name, release_id)
            record, gate = read_json_object(directory / "release.json"), read_json_object(directory / "gate.json")
            refused = refusal_of(root, name, release_id)
            rows.append(
                {
                    "deployment": name,
                    "release": release_id,
                    "links": [link for link in LINKS if links[link] == release_id],
                    "refused": None
                    if refused is None
                    else {"when": refused.when, "stage": refused.stage, "reason": refused.reason},
                    "gate": None if "passed" not in gate else "passed" if gate["passed"] is True else "failed",
                    "judged_at": gate.get("when"),
                    **{
                        field: record.get(field)
                        for field in ("engine", "engine_version", "image", "model", "model_revision", "port")
                    },
                }
            )
    return rows


def release_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The list as aligned lines; reasons of refusals stand below it."""
    cells = [HEADER]
    notes = []
    for row in rows:
        states = [*row["links"], *(["refused"] if row["refused"] else [])]
        judged = f"{row['gate']} {row['judged_at']}" if row["gate"] else "-"
        engine = f"{row['engine']} {row['engine_version']}"
        revision = str(row["model_revision"] or "-")[:12]
        cells.append(
            (row["deployment"], row["release"], ",".join(states) or "-", engine, str(row["model"]), revision, judged)
        )
        if row["refused"]:
            refused = row["refused"]
            notes.append(f"{row['deployment']} {row['release']} refused ({refused['stage']}) at {refused['when']}:")
            notes += [f"  {line}" for line in refused["reason"].splitlines()]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
    return lines + notes if rows else ["no releases here"]


def find_release(root: Path, name: str) -> Path:
    """The directory of a release by `deployment/release`, where the second part is an id, its beginning, or a link.

    A release id alone is enough where it is the only one of its name.

    Raises:
        UnknownReleaseError: none, or more than one.
    """
    deployment, _, wanted = name.rpartition("/")
    found = []
    for each in [deployment] if deployment else deployment_names(root):
        target = link_target(root, each, wanted) if wanted in LINKS else None
        ids = [release_id for release_id in release_ids(root, each) if release_id.startswith(target or wanted)]
        found += [release_directory(root, each, release_id) for release_id in ids]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{row['deployment']}/{row['release']}" for row in list_releases(root)) or "none"
    raise UnknownReleaseError(
        f"{len(found) or 'no'} releases are called '{name}' below {root}. Needed: one of {known}, or "
        "DEPLOYMENT/current, DEPLOYMENT/good, DEPLOYMENT/previous. Change: the name."
    )


def diff_contents(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What changes from one content to another, one line for each value; empty when they are the same.

    A line is ``path: old -> new``, ``+ path: new`` or ``- path: old``, in alphabetic order of the paths.
    """
    before, after = _flat(old), _flat(new)
    lines = []
    for path in sorted(before.keys() | after.keys()):
        if path not in after:
            lines.append(f"- {path}: {before[path]}")
        elif path not in before:
            lines.append(f"+ {path}: {after[path]}")
        elif before[path] != after[path]:
            lines.append(f"{path}: {before[path]} -> {after[path]}")
    return lines


def diff_directories(old: Path, new: Path) -> list[str]:
    """What changes between the records in two release directories."""
    return diff_contents(*(read_json_object(directory / "release.json") for directory in (old, new)))


def _flat(value: object, path: str = "") -> dict[str, str]:
    """Every leaf of a content under its dotted path, as JSON text."""
    if isinstance(value, Mapping) and value:
        return {
            key: leaf
            for name, item in value.items()
            for key, leaf in _flat(item, f"{path}.{name}" if path else str(name)).items()
        }
    return {path: json.dumps(value, sort_keys=True, ensure_ascii=False)}
