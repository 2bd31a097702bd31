"""Check the arguments a deployment adds to an engine, and bring them into the form its config file needs."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

from metalserve.engines.claims import claim_of_name, claim_of_value
from metalserve.engines.flags import Flag, FlagTable, flags_for, known_versions
from metalserve.engines.owners import owned_flags, secret_flags, text_flags
from metalserve.errors import Refusal

# SGLang's config reader raises for these actions (srt/utils/server_args_config_parser.py, 0.5.23).
_NOT_IN_SGLANG_FILE = ("boolean", "DeprecatedStoreTrueAction", "LoRAPathAction")
_NOT_IN_SGLANG_FILE_INSTEAD = {
    "disable-cuda-graph": "set eager of the deployment",
    "enable-dp-attention": "use attn-dp-size",
}
# The only words with a dash in front that argparse takes as a value.
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
# A registry is no limit when the deployment brings its own parser.
_PLUGIN_OF = {"tool-call-parser": "tool-parser-plugin", "reasoning-parser": "reasoning-parser-plugin"}


def flag_name(key: object) -> str:
    """Spelling of the tables: no dashes in front, dashes inside."""
    return str(key).strip().lstrip("-").replace("_", "-")


def nearest(name: str, candidates: list[str]) -> str | None:
    """The most similar candidate, or None when nothing is close."""
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    return found[0] if found else None


def _unknown(table: FlagTable, name: str) -> Refusal:
    found = f"{table.engine} {table.table_version} has no flag '{name}'"
    if table.note:
        found += f" ({table.note.rstrip('.')})"
    claim = claim_of_name(table.engine, name)
    if claim is not None:
        return Refusal(
            found=f"{found}. {claim.truth}",
            needed=claim.instead[table.engine],
            change=f"engine_args.{name} of the deployment",
        )
    others = [v for v in known_versions(table.engine) if flags_for(table.engine, v).find(name) is not None]
    if others:
        found += f"; it exists in {', '.join(others)}"
    close = nearest(name, sorted(table.flags))
    return Refusal(
        found=found,
        needed=f"a flag of that version; the nearest is '{close}'" if close else "a flag of that version",
        change=f"engine_args.{name} of the deployment",
    )


def _refuse(name: str, found: str, needed: str) -> Refusal:
    return Refusal(found=found, needed=needed, change=f"engine_args.{name} of the deployment")


def _boolean(table: FlagTable, flag: Flag, name: str, value: bool) -> tuple[str, bool]:
    """A boolean flag in the spelling whose value is true; a false would be dropped silently by vLLM."""
    wanted = value != table.turns_off(name)
    if wanted:
        return flag.dest.replace("_", "-"), True
    negative = flag.negative
    if negative is None:
        raise _refuse(name, f"'{name}: false', and {table.engine} has no opposite flag", "leave it out")
    return negative, True


def _scalar(flag: Flag, name: str, value: object, table: FlagTable) -> Any:
    """One value of a flag: a number, a text, or a mapping as JSON."""
    if value is None:
        raise _refuse(name, f"'{name}: null', which the engine would read as the text None", "a value, or no entry")
    if isinstance(value, bool):
        raise _refuse(name, f"'{name}: {str(value).lower()}', but the flag takes a value", "its value")
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True)
    if not isinstance(value, (str, int, float)):
        raise _refuse(name, f"'{name}' with a value of type {type(value).__name__}", "a number, a text or a mapping")
    text = str(value)
    if flag.choices and text not in flag.choices:
        close = nearest(text, list(flag.choices))
        hint = f"; the nearest is '{close}'" if close else ""
        raise _refuse(
            name,
            f"'{name}: {text}', which {table.engine} {table.table_version} does not take",
            f"one of {', '.join(flag.choices)}{hint}",
        )
    claim = claim_of_value(table.engine, flag.name, text)
    if claim is not None:
        raise _refuse(name, f"'{name}: {text}'. {claim.truth}", claim.instead[table.engine])
    if text.startswith("-") and _NEGATIVE_NUMBER.fullmatch(text) is None:
        raise _refuse(name, f"'{name}: {text}', which the parser would read as another flag", "a value")
    return value


def _value(flag: Flag, name: str, value: object, table: FlagTable) -> Any:
    """The value of a flag that takes one or several."""
    if not isinstance(value, (list, tuple)):
        return _scalar(flag, name, value, table)
    if flag.takes_list:
        if not value:
            raise _refuse(name, f"'{name}' with an empty list, which would be dropped silently", "values, or no entry")
        return [_scalar(flag, name, item, table) for item in value]
    if isinstance(flag.default, list) and flag.action != "append":
        return json.dumps(list(value))  # such a flag parses one JSON text
    raise _refuse(name, f"'{name}' with a list of {len(value)}", "one value; the flag takes no list")


def check_value(table: FlagTable, name: str, value: object) -> tuple[str, Any]:
    """A flag of the table with a value the engine's parser will take.

    Returns:
        The spelling and the value for the config file: never false, never null, JSON as text.

    Raises:
        Refusal: the flag is unknown, or the value does not fit it.

    """
    flag = table.find(name)
    if flag is None:
        raise _unknown(table, name)
    if table.engine == "sglang" and flag.action in _NOT_IN_SGLANG_FILE:
        instead = _NOT_IN_SGLANG_FILE_INSTEAD.get(flag.name, "leave it out")
        raise _refuse(name, f"'{name}', which SGLang {table.table_version} does not read from a config file", instead)
    if flag.action in ("switch", "boolean"):
        if value is None:
            raise _refuse(name, f"'{name}: null', which the engine would read as the text None", "true, or no entry")
        if not isinstance(value, bool):
            raise _refuse(name, f"'{name}: {value}', but the flag takes no value", "true, or no entry")
        if flag.action == "boolean":
            return _boolean(table, flag, name, value)
        if not value:
            raise _refuse(
                name,
                f"'{name}: false', which {table.engine} drops silently, and the flag has no opposite",
                "no entry; the flag is off unless it is set",
            )
        return flag.name, True
    return name if name in flag.names else flag.name, _value(flag, name, value, table)


def check_arguments(engine: str, version: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Check engine arguments against the flags of a version.

    Args:
        engine: ``vllm`` or ``sglang``.
        version: engine version; ``flags_for`` says which table serves it.
        mapping: long flag names (dashes or underscores) -> values, as in ``engine_args`` of a deployment.

    Returns:
        The same arguments as the engine's config file needs them: dashed names, a switched-off boolean in its
        opposite spelling with true, mappings as JSON text. No value is false or null.

    Raises:
        Refusal: a flag that is unknown, removed, owned by a field of the deployment or secret; a value that
            does not fit. The message names the nearest real flag or the true equivalent.

    """
    table = flags_for(engine, version)
    checked: dict[str, Any] = {}
    dests: dict[str, str] = {}
    for key, value in mapping.items():
        name = flag_name(key)
        if name in secret_flags():
            raise Refusal(
                found=f"a key or password in engine_args ('{name}')",
                needed="no secret in a release, which everyone on the host can read; keys are a proxy's matter",
                change=f"remove engine_args.{name}; the configuration of a release is written in the clear",
            )
        if name in text_flags():
            raise Refusal(
                found=f"engine_args sets '{name}', which writes the text of requests down",
                needed="logs without the words of clients: the gateway's access log tells who asked which model, for "
                "how many tokens, how long it took and how it ended",
                change=f"remove engine_args.{name}",
            )
        if name in owned_flags():
            raise Refusal(
                found=f"engine_args sets '{name}'",
                needed="that flag follows from the deployment's own fields, so that plan and engine agree",
                change=f"{owned_flags()[name]} instead of engine_args.{name}",
            )
        spelling, normal = check_value(table, name, value)
        flag = table.find(spelling)
        dest = flag.dest if flag is not None else spelling
        if dest in dests:
            raise _refuse(name, f"'{name}' and '{dests[dest]}' set the same flag", "one of them")
        dests[dest] = name
        checked[spelling] = normal
    check_registered(table, checked)
    return checked


def check_registered(table: FlagTable, arguments: Mapping[str, Any]) -> None:
    """Refuse a tool or reasoning parser that is not registered; the engine itself only finds out at start.

    Raises:
        Refusal: names the nearest one and all that are registered.
    """
    for name, known in table.values.items():
        value = arguments.get(name)
        if value is None or _PLUGIN_OF.get(name) in arguments or value in known:
            continue
        close = nearest(str(value), list(known))
        raise _refuse(
            name,
            f"'{name}: {value}', which is not registered in {table.engine} {table.table_version}",
            (f"the nearest is '{close}'; " if close else "") + f"registered are {', '.join(known)}",
        )
