"""engine.yaml as text, and what the engine's own parser will see of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from metalserve.engines.flags import flags_for
from metalserve.errors import Refusal

# What a reader looks for first comes first; everything else follows in alphabetic order.
_FIRST = (
    "model",
    "model-path",
    "served-model-name",
    "host",
    "port",
    "device",
    "tensor-parallel-size",
    "tp-size",
    "pipeline-parallel-size",
    "pp-size",
    "data-parallel-size",
    "dp-size",
    "enable-expert-parallel",
    "ep-size",
    "max-model-len",
    "context-length",
    "max-num-seqs",
    "max-running-requests",
    "max-num-batched-tokens",
    "chunked-prefill-size",
    "gpu-memory-utilization",
    "mem-fraction-static",
    "kv-cache-memory-bytes",
    "kv-cache-dtype",
)
_TITLES = {"vllm": "vLLM", "sglang": "SGLang"}


def _order(name: str) -> tuple[int, str]:
    return (_FIRST.index(name), "") if name in _FIRST else (len(_FIRST), name)


def _check(name: str, value: object) -> None:
    """Refuse what the engines drop or misread; ``engine_config`` never makes it."""
    if value is False or value is None:
        raise Refusal(
            found=f"'{name}: {json.dumps(value)}' in an engine configuration",
            needed="no false and no null: vLLM drops a false silently and reads null as the text None",
            change=f"the opposite flag with true, or no entry for {name}",
        )
    if isinstance(value, Mapping):
        raise Refusal(
            found=f"a mapping under '{name}' in an engine configuration",
            needed="JSON text, which every version's parser takes",
            change=f"pass {name} through check_arguments first",
        )


def render_config(engine: str, config: Mapping[str, Any]) -> str:
    """engine.yaml of a configuration, the same text whatever order the mapping has.

    Raises:
        Refusal: a false, a null or a mapping as a value.

    """
    for name, value in config.items():
        _check(name, value)
        for item in value if isinstance(value, (list, tuple)) else ():
            _check(name, item)
    ordered = {
        name: list(config[name]) if isinstance(config[name], tuple) else config[name]
        for name in sorted(config, key=_order)
    }
    header = (
        f"# {_TITLES[engine]} configuration of one release, written by metalserve.\n"
        "# It is part of the release's identity: change the deployment, not this file.\n"
    )
    body = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, default_flow_style=False, width=2**31)
    return header + body


def cli_arguments(engine: str, version: str, config: Mapping[str, Any]) -> list[str]:
    """The command line into which the engine turns its config file.

    Both engines insert these words before those of the real command line: a true becomes the bare flag, a list
    several values, a mapping JSON; vLLM drops a false, SGLang does so for a plain switch and else writes the word
    (vllm utils/argparse_utils.py load_config_file; sglang srt/utils/server_args_config_parser.py).
    """
    table = flags_for(engine, version)
    words: list[str] = []
    for name, value in config.items():
        flag = table.find(name)
        if isinstance(value, bool):
            if engine == "sglang" and (flag is None or flag.action != "switch"):
                words += [f"--{name}", str(value).lower()]
            elif value:
                words.append(f"--{name}")
        elif isinstance(value, (list, tuple)):
            words += [f"--{name}", *(str(item) for item in value)] if value else []
        else:
            words += [f"--{name}", json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return words
