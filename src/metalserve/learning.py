"""Which release a deployment gets once its engine has measured something: the one that runs stays.

A better estimate alone never restarts an engine. What was measured counts when the release changes for another reason,
or when it is asked for (`serving_plan_relearn`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metalserve.errors import Refusal
from metalserve.planner.learned import read_measured
from metalserve.release import canonical_json

Record = Mapping[str, Any]
Released = dict[str, Any]
Build = Callable[[Sequence[Record]], Released]

_SIZES = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens")


@dataclass(frozen=True)
class Kept:
    """What the host keeps of one deployment.

    `learned_from` are the records that the current release's plan went by, `starts` those of the starts of the current
    and the previous release.
    """

    release_id: str | None = None
    learned_from: tuple[Record, ...] = ()
    starts: tuple[Record, ...] = ()


def read_kept(found: Mapping[str, Any] | None) -> Kept:
    """From what `remote.starts.kept_starts` returns for a deployment; None: it was never activated."""
    given = found or {}
    return Kept(given.get("release_id"), _readable(given.get("learned_from")), _readable(given.get("starts")))


def choose(build: Build, kept: Kept, identity: Record, *, relearn: bool) -> Released:
    """The release of a deployment: the current one as long as it is wanted, else one by what was measured.

    Args:
        build: makes the release from records of earlier starts.
        kept: what the host keeps.
        identity: fields of a record that must be equal for it to say anything here. Where one side does not know a
            field, it does not count.
        relearn: take what was measured at once, though it may restart the engine.

    Returns:
        What `build` returned, with `notes`: sentences on what was measured.

    Raises:
        Refusal: what `build` raises.
    """
    basis = _valid(kept.learned_from, identity)
    everything = _valid((*kept.learned_from, *kept.starts), identity)
    if kept.release_id and not relearn:
        # First as it was planned: only that gives the same text of the record, too.
        for records in (basis, (), everything):
            found = _attempt(build, records)
            if isinstance(found, dict) and found["release_id"] == kept.release_id:
                return {**found, "notes": [*_used(found), *_waiting(found, _attempt(build, everything))]}
    found = build(everything)
    return {**found, "notes": _used(found)}


def _attempt(build: Build, records: Sequence[Record]) -> Released | Refusal:
    try:
        return build(records)
    except Refusal as refusal:
        return refusal


def _used(found: Released) -> list[str]:
    number = len(found["plan"]["learned_from"])
    if not number:
        return []
    return [f"{found['deployment']}: {found['plan']['reasons']['predicted_bytes'].rsplit('; ', 1)[-1]}"]


def _waiting(found: Released, learned: Released | Refusal) -> list[str]:
    """What `serving_plan_relearn` would change."""
    if isinstance(learned, Refusal):
        return [f"{found['deployment']}: runs, but by what an earlier start measured it would be refused: {learned}"]
    before, after = found["plan"], learned["plan"]
    changes = [f"{name} {before[name]} -> {after[name]}" for name in _SIZES if before[name] != after[name]]
    if learned["release_id"] == found["release_id"] or not changes:
        return []
    return [
        f"{found['deployment']}: an earlier start measured other memory than was planned; "
        f"serving_plan_relearn: true restarts the engine with {', '.join(changes)}"
    ]


def _valid(records: Sequence[Record], identity: Record) -> tuple[Record, ...]:
    """The records of the same model, image, GPU and so on, each once, in an order that does not depend on the host."""
    kept = {
        canonical_json(record): record
        for record in records
        if all(None in (record[name], value) or record[name] == value for name, value in identity.items())
    }
    return tuple(kept[text] for text in sorted(kept))


def _readable(records: object) -> tuple[Record, ...]:
    """Those that this version can read: another record says nothing, and the next start writes a new one."""
    found = []
    for record in records if isinstance(records, list | tuple) else ():
        try:
            if read_measured([record]):
                found.append(record)
        except Refusal:
            continue
    return tuple(found)
