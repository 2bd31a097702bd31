"""Print the flags of the engine installed here, read from the engine's own argument parser.

Runs inside an engine image, where this package is not installed, so it imports nothing of it:

    docker run --rm --entrypoint python3 -v $PWD/dump_flags.py:/dump_flags.py:ro IMAGE /dump_flags.py

The files in ``data/`` have this form, so a printed table can replace or be compared with one of them.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib
import json
import sys
from pathlib import Path
from typing import Any

# Where vLLM kept its parser: up to 0.11, later, and from some version between 0.27 and 0.32 on.
_VLLM_PARSER_CLASSES = ("vllm.utils.argparse_utils", "vllm.utils")
_VLLM_PARSER_MAKERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
_VLLM_REGISTRIES = {
    "tool-call-parser": (
        "ToolParserManager",
        (
            "vllm.tool_parsers",
            "vllm.entrypoints.openai.tool_parsers",
        ),
    ),
    "reasoning-parser": ("ReasoningParserManager", ("vllm.reasoning",)),
}

# Argparse classes by what a config file can do with them; any other class keeps its own name.
_ACTIONS = {
    "_StoreTrueAction": "switch",
    "BooleanOptionalAction": "boolean",
    "EnableDisableAction": "boolean",
    "_StoreAction": "value",
    "_AppendAction": "append",
}


def _attribute(modules: tuple[str, ...], name: str) -> Any:
    """First attribute of that name in the modules given; ImportError says what each of them answered."""
    failures = []
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            failures.append(f"{module}: {error}")
    raise ImportError(f"{name} was not found ({'; '.join(failures)})")


def _plain(value: object) -> object:
    """A default as JSON; None for what JSON cannot say, such as a configuration object."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, str):
        return None if value == argparse.SUPPRESS else value
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple, set)):
        items = [_plain(item) for item in value]
        return sorted(items, key=str) if isinstance(value, set) else items
    return {} if value == {} else None


def flag_row(action: argparse.Action) -> dict[str, object] | None:
    """One flag as a row of the table, or None for a positional argument and for help.

    Fields that say nothing (no choices, one value, no default) are left out.
    """
    names = [name for name in action.option_strings if name.startswith("--")]
    kind = type(action).__name__
    if not names or kind == "_HelpAction":
        return None
    row: dict[str, object] = {"names": names}
    if action.dest != names[0][2:].replace("-", "_"):
        row["dest"] = action.dest
    default = _plain(action.default)
    if default is not None:
        row["default"] = default
    kind = _ACTIONS.get(kind, kind)
    if kind != "value":
        row["action"] = kind
    if action.nargs in ("+", "*", "?"):
        row["nargs"] = action.nargs
    if action.choices is not None:
        choices = {str(_plain(choice)) for choice in action.choices if choice is not None}
        row["choices"] = sorted(choices)
    return row


def table(engine: str, version: str, parser: argparse.ArgumentParser, **more: object) -> dict[str, object]:
    """The whole table of one engine version, flags in alphabetic order."""
    rows = [row for row in map(flag_row, parser._actions) if row is not None]
    rows.sort(key=lambda row: row["names"][0])  # type: ignore[index]
    return {"engine": engine, "version": version, **more, "flags": rows}


def to_text(content: dict[str, object]) -> str:
    """JSON with one flag a line, so that two versions compare well line by line."""
    flags = content["flags"]
    assert isinstance(flags, list)  # noqa: S101 (built by table() just above)
    head = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items() if key != "flags"]
    rows = ",\n".join("  " + json.dumps(row) for row in flags)
    return "{\n" + ",\n".join([*head, ' "flags": [\n' + rows + "\n ]"]) + "\n}\n"


def vllm_table() -> dict[str, object]:
    """Table of the installed vLLM; the parsers a model may name are listed beside the flags."""
    parser = _attribute(_VLLM_PARSER_MAKERS, "make_arg_parser")(
        _attribute(_VLLM_PARSER_CLASSES, "FlexibleArgumentParser")()
    )
    values = {}
    for flag, (manager, modules) in _VLLM_REGISTRIES.items():
        found = _attribute(modules, manager)
        if hasattr(found, "list_registered"):
            values[flag] = sorted(found.list_registered())
    version = str(_attribute(("vllm.version", "vllm"), "__version__")).split("+")[0]
    return table("vllm", version, parser, values=values)


def sglang_table() -> dict[str, object]:
    """Table of the installed SGLang."""
    parser = argparse.ArgumentParser()
    _attribute(("sglang.srt.server_args",), "ServerArgs").add_cli_args(parser)
    return table("sglang", str(_attribute(("sglang.version", "sglang"), "__version__")), parser)


def main(argv: list[str]) -> int:
    """Print the table of the engine named, or of the one that is installed."""
    makers = {"vllm": vllm_table, "sglang": sglang_table}
    failures = []
    for engine in argv or list(makers):
        try:
            # Engines log to stdout while they are imported; only the table may land there.
            with contextlib.redirect_stdout(sys.stderr):
                content = makers[engine]()
        except (ImportError, KeyError) as error:
            failures.append(f"{engine}: {error}")
            continue
        sys.stdout.write(to_text(content))
        return 0
    sys.stderr.write("no engine's parser could be read here: " + "; ".join(failures) + "\n")
    return 1


if __name__ == "__main__":
    # This file's folder comes first on the path; nothing that lies there may stand in for an engine's module.
    sys.path = [folder for folder in sys.path if Path(folder or ".").resolve() != Path(__file__).resolve().parent]
    sys.exit(main(sys.argv[1:]))
