import argparse
import enum
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from metalserve.engines import dump_flags
from metalserve.engines.flags import known_versions

DATA = Path(dump_flags.__file__).parent / "data"


class Level(enum.Enum):
    O2 = 2


def parser():
    made = argparse.ArgumentParser()
    made.add_argument("model_tag", nargs="?")
    made.add_argument("--plain", "-p", default="auto", choices=["auto", "none", None])
    made.add_argument("--some", nargs="+", default={"b", "a"})
    made.add_argument("--level", default=Level.O2, type=Level)
    made.add_argument("--hidden", default=argparse.SUPPRESS)
    made.add_argument("--switch", action="store_true")
    made.add_argument("--both", action=argparse.BooleanOptionalAction)
    made.add_argument("--more", action="append", default=[])
    made.add_argument("--object", default=object())
    made.add_argument("--renamed", dest="other")
    return made


def test_a_row_says_only_what_is_not_plain():
    got = dump_flags.table("vllm", "1.2.3", parser(), values={"x": ["y"]})
    assert (got["engine"], got["version"], got["values"]) == ("vllm", "1.2.3", {"x": ["y"]})
    assert got["flags"] == [
        {"names": ["--both", "--no-both"], "action": "boolean"},
        {"names": ["--hidden"]},
        {"names": ["--level"], "default": 2},
        {"names": ["--more"], "default": [], "action": "append"},
        {"names": ["--object"]},
        {"names": ["--plain"], "default": "auto", "choices": ["auto", "none"]},
        {"names": ["--renamed"], "dest": "other"},
        {"names": ["--some"], "default": ["a", "b"], "nargs": "+"},
        {"names": ["--switch"], "default": False, "action": "switch"},
    ]


def test_the_text_is_json_with_one_flag_a_line():
    content = dump_flags.table("vllm", "1.2.3", parser())
    text = dump_flags.to_text(content)
    assert json.loads(text) == content
    assert sum(line.lstrip().startswith('{"names"') for line in text.splitlines()) == len(content["flags"])


@pytest.mark.parametrize(
    "name", [f"{engine}-{version}" for engine in ("vllm", "sglang") for version in known_versions(engine)]
)
def test_every_table_in_the_package_has_the_form_that_is_printed(name):
    text = (DATA / f"{name}.json").read_text(encoding="utf-8")
    content = json.loads(text)
    assert dump_flags.to_text(content) == text
    assert f"{content['engine']}-{content['version']}" == name
    assert content["source"]
    names = [flag["names"][0] for flag in content["flags"]]
    assert names == sorted(names)
    every = [spelling for flag in content["flags"] for spelling in flag["names"]]
    assert len(every) == len(set(every))


def run_script(**environment):
    """The script in a fresh interpreter without site packages, so without this package too."""
    command = [sys.executable, "-S", dump_flags.__file__]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


# The places where vLLM kept its parser: new, and old.
@pytest.mark.parametrize("module", ["vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"])
def test_the_script_runs_where_this_package_is_missing(tmp_path, module):
    """A package in the shape of vLLM, read in a fresh interpreter that sees nothing else."""
    files = {
        "vllm.version": "__version__ = '0.99.1+cpu'",
        "vllm.utils.argparse_utils": "from argparse import ArgumentParser as FlexibleArgumentParser",
        "vllm.tool_parsers": """
            class ToolParserManager:
                list_registered = staticmethod(lambda: ["z", "a"])
        """,
        "config": "own = True  # this package has a module of that name beside the script",
        "vllm.reasoning": "class ReasoningParserManager: pass",
        module: """
            print("loaded")
            from config import own
            def make_arg_parser(parser):
                parser.add_argument("--port", type=int, default=8000)
                return parser
        """,
    }
    for name, text in files.items():
        path = tmp_path / Path(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    done = run_script(PYTHONPATH=str(tmp_path))
    assert done.returncode == 0
    assert json.loads(done.stdout) == {
        "engine": "vllm",
        "version": "0.99.1",
        "values": {"tool-call-parser": ["a", "z"]},
        "flags": [{"names": ["--port"], "default": 8000}],
    }
    assert "loaded" in done.stderr


def test_without_an_engine_the_script_says_where_it_looked():
    done = run_script()
    assert done.returncode == 1
    assert done.stdout == ""
    assert (
        "vllm: make_arg_parser was not found (vllm.entrypoints.launchers.cli_args: No module named 'vllm'"
        in done.stderr
    )
    assert "sglang: ServerArgs was not found (sglang.srt.server_args: No module named 'sglang'" in done.stderr
