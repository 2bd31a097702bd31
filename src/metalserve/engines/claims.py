"""What circulates but does not exist, with its true equivalent (``data/circulating.yaml``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

import yaml


@dataclass(frozen=True)
class Claim:
    """One flag, value, variable, command or request option that does not do what guides say.

    ``instead`` maps an engine to what to write there; an engine that is missing has nothing wrong with it.
    """

    name: str
    kind: str
    truth: str
    values: tuple[str, ...]
    instead: MappingProxyType[str, str]


@cache
def claims() -> tuple[Claim, ...]:
    """Every entry of the table, in its order."""
    path = resources.files("metalserve.engines") / "data" / "circulating.yaml"
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))["entries"]
    return tuple(
        Claim(
            name=entry["name"],
            kind=entry["kind"],
            truth=entry["truth"],
            values=tuple(entry.get("values", ())),
            instead=MappingProxyType({key: entry[key] for key in ("vllm", "sglang") if key in entry}),
        )
        for entry in entries
    )


def _key(name: str) -> str:
    return name.strip().lstrip("-").replace("_", "-").lower()


def claim_of_name(engine: str, name: str) -> Claim | None:
    """Entry of a flag, variable, command or request option of that name, if it is wrong for this engine."""
    for claim in claims():
        if claim.kind != "value" and _key(claim.name) == _key(name) and engine in claim.instead:
            return claim
    return None


def claim_of_value(engine: str, flag: str, value: object) -> Claim | None:
    """Entry of a value that a flag does not take although its parser lets it pass."""
    for claim in claims():
        if claim.kind == "value" and claim.name == flag and str(value) in claim.values and engine in claim.instead:
            return claim
    return None
