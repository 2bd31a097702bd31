"""`metalserve gate`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from gate_server import MODEL, GateServer

from metalserve import gate_command
from metalserve.remote.gate import CHECK_NAMES


def call(*argv: str) -> int:
    parser = argparse.ArgumentParser(prog="metalserve")
    gate_command.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["gate", *argv])
    status = args.run(args)
    assert isinstance(status, int)
    return status


def test_passed(server: GateServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(server.url, "--model", MODEL, "--burst", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list(CHECK_NAMES)
    assert lines[-1].startswith(f"passed: tiny at {server.url}, 16 checks in ")


def test_refused(server: GateServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(server.url, "--model", "other", "--checks", "models") == 1
    assert "FAILED" in capsys.readouterr().out


def test_model_left_out_and_json(server: GateServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(server.url, "--checks", "models, chat", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"] == MODEL
    assert result["passed"] is True
    assert [row["name"] for row in result["rows"]] == ["models", "chat"]


def test_key_file(server: GateServer, tmp_path: Path) -> None:
    server.api_key = "sk-abc"
    key = tmp_path / "key"
    key.write_text("sk-abc\n")
    assert call(server.url, "--checks", "models") == 1
    assert call(server.url, "--checks", "models", "--api-key-file", str(key)) == 0


def test_engine_and_thinking_are_passed_on(server: GateServer) -> None:
    server.accepts_any_model = True
    options = ["--checks", "chat,unknown_model", "--thinking", "off", "--max-tokens", "77"]
    assert call(server.url, *options) == 1
    assert call(server.url, *options, "--engine", "sglang") == 0
    assert server.requests[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert server.requests[0]["max_tokens"] == 77


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("http://127.0.0.1:1", "--timeout", "2") == 1
    assert "no connection to http://127.0.0.1:1: Connection refused" in capsys.readouterr().out


def test_missing_key_file_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("http://127.0.0.1:1", "--api-key-file", str(tmp_path / "none")) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "the following arguments are required: url"),
        (["127.0.0.1:8000"], "is not of the form http://host:port"),
        (["http://h", "--checks", "chat,nonsense"], "found nonsense; needed: names out of models, chat"),
        (["http://h", "--checks", ","], "found no name"),
        (["http://h", "--burst", "0"], "found '0'; needed: a whole number of 1 or more"),
        (["http://h", "--timeout", "soon"], "found 'soon'; needed: a whole number of 1 or more"),
        (["http://h", "--engine", "triton"], "invalid choice: 'triton'"),
    ],
)
def test_usage_errors(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        call(*argv)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
