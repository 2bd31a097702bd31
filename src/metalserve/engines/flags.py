"""The flags of an engine version, read from the tables in ``data/``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from metalserve.engines.versions import plain_version, version_key
from metalserve.errors import Refusal


@dataclass(frozen=True)
class Flag:
    """One flag.

    ``names`` are its long spellings without dashes, the first one the main one. ``action`` is ``value``
    (takes what ``nargs`` says), ``switch`` (present or not), ``boolean`` (has an opposite spelling), ``append``,
    or the name of the engine's own argparse class. ``choices`` is empty where any value is taken.
    """

    names: tuple[str, ...]
    dest: str
    default: Any
    action: str
    nargs: str | None
    choices: tuple[str, ...]

    @property
    def name(self) -> str:
        """Main spelling."""
        return self.names[0]

    @property
    def negative(self) -> str | None:
        """The spelling that turns a boolean flag off, None for every other flag."""
        if self.action != "boolean":
            return None
        return next((name for name in self.names if name != self.dest.replace("_", "-")), None)

    @property
    def takes_list(self) -> bool:
        """True when several values may follow."""
        return self.nargs in ("+", "*")


@dataclass(frozen=True)
class FlagTable:
    """Flags of one engine version.

    ``version`` is the one asked for, ``table_version`` the one whose parser was read; ``note`` says so when
    they differ. ``flags`` maps every long spelling to its flag; ``values`` names what some flags accept although
    their parser does not check it (the registered tool and reasoning parsers).
    """

    engine: str
    version: str
    table_version: str
    note: str | None
    flags: Mapping[str, Flag]
    values: Mapping[str, tuple[str, ...]]
    no_prefix: bool

    def find(self, name: str) -> Flag | None:
        """The flag of a long spelling without leading dashes, or None."""
        flag = self.flags.get(name)
        if flag is None and self.no_prefix and name.startswith("no-"):
            opposite = self.flags.get(name[3:])
            return opposite if opposite is not None and opposite.action == "boolean" else None
        return flag

    def turns_off(self, name: str) -> bool:
        """True when this spelling of a boolean flag turns it off."""
        flag = self.find(name)
        return flag is not None and (name == flag.negative or name not in flag.names)


def _data() -> list[tuple[str, str]]:
    folder = resources.files("metalserve.engines") / "data"
    stems = [item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json")]
    pairs = [(stem.split("-", 1)[0], stem.split("-", 1)[1]) for stem in stems]
    return sorted(pairs, key=lambda pair: (pair[0], version_key(pair[1])))


@cache
def known_versions(engine: str) -> tuple[str, ...]:
    """Versions of an engine whose parser was read, oldest first."""
    return tuple(version for name, version in _data() if name == engine)


def _flag(row: Mapping[str, Any]) -> Flag:
    names = tuple(name.removeprefix("--") for name in row["names"])
    return Flag(
        names=names,
        dest=row.get("dest", names[0].replace("-", "_")),
        default=row.get("default"),
        action=row.get("action", "value"),
        nargs=row.get("nargs"),
        choices=tuple(row.get("choices", ())),
    )


@cache
def _table(engine: str, version: str) -> FlagTable:
    path = resources.files("metalserve.engines") / "data" / f"{engine}-{version}.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    flags = [_flag(row) for row in content["flags"]]
    return FlagTable(
        engine=engine,
        version=version,
        table_version=version,
        note=None,
        flags={name: flag for flag in flags for name in flag.names},
        values={name: tuple(values) for name, values in content.get("values", {}).items()},
        no_prefix=bool(content.get("no_prefix", False)),
    )


def flags_for(engine: str, version: str) -> FlagTable:
    """Flags of an engine version: its own table, else the newest known one that is not above it.

    Raises:
        Refusal: no table is as old as this version, or the engine has none at all.

    """
    wanted = plain_version(version)
    known = known_versions(engine)
    below = [item for item in known if version_key(item) <= version_key(wanted)]
    if not below:
        raise Refusal(
            found=f"{engine} {wanted}, whose flags are not known",
            needed=f"{engine} {known[0]} or newer" if known else "engine vllm or sglang",
            change="set engine_version (or engine) of the deployment",
        )
    table = _table(engine, below[-1])
    if table.table_version == wanted:
        return table
    above = "newer than every known version" if below[-1] == known[-1] else "between two known versions"
    note = (
        f"{engine} {wanted} is {above}; its flags are checked against {below[-1]}. "
        f"dump_flags.py prints the exact table inside the image."
    )
    return FlagTable(
        engine=engine,
        version=wanted,
        table_version=table.table_version,
        note=note,
        flags=table.flags,
        values=table.values,
        no_prefix=table.no_prefix,
    )
