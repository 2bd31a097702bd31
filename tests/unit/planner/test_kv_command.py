"""`metalserve kv`: the capacity question alone."""

import argparse
import json

import pytest
from planner_examples import TINY

from metalserve import catalogue, kv_command
from metalserve.errors import Refusal
from metalserve.planner import kv_capacity

GIB = 1 << 30


def call(*arguments):
    """As the command line does it, which registers the command."""
    parser = argparse.ArgumentParser(prog="metalserve")
    kv_command.add_parser(parser.add_subparsers(dest="command"))
    options = parser.parse_args(["kv", *arguments])
    return options.run(options)


def test_the_table(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(catalogue.model("qwen3.6-35b-a3b").as_dict()["shape"]))
    arguments = ["--tensor-parallel", "2", "--available", "20GiB", "--context", "262144"]
    assert call("--config", str(tmp_path / "config.json"), *arguments) == 0
    printed = capsys.readouterr().out
    assert "1056 tokens" in printed
    assert "2,040,611 tokens" in printed
    assert "7.78" in printed


def test_json_equals_the_function(capsys):
    arguments = ["--config", "gemma-3-27b-it", "--available", "30GiB", "--context", "32768", "--format", "json"]
    assert (
        call(*arguments, "--max-batched-tokens", "4096", "--kv-cache-dtype", "fp8", "--engine-version", "0.24.0") == 0
    )
    expected = kv_capacity(
        catalogue.model("gemma-3-27b-it").shape,
        tensor_parallel_size=1,
        available_bytes=30 * GIB,
        max_model_len=32768,
        max_num_batched_tokens=4096,
        kv_cache_dtype="fp8",
        engine_version="0.24.0",
    )
    printed = json.loads(capsys.readouterr().out)
    assert (printed["num_blocks"], printed["capacity_tokens"]) == (expected.num_blocks, expected.capacity_tokens)


def test_every_option_reaches_the_arithmetic(capsys):
    base = ["--config", "qwen3.6-35b-a3b", "--available", "40GiB", "--context", "65536", "--format", "json"]
    seen = set()
    for more in (
        [],
        ["--no-prefix-caching"],
        ["--gdn-prefill-backend", "flashinfer"],
        ["--speculative-tokens", "2"],
        ["--pipeline-parallel", "2"],
        ["--tensor-parallel", "4"],
    ):
        assert call(*base, *more) == 0
        seen.add(capsys.readouterr().out)
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GiB", 20 * GIB), ("1.5 GiB", 3 * GIB // 2), ("512MiB", 512 << 20), ("1000", 1000), ("2GB", 2 * 10**9)],
)
def test_sizes(text, size):
    assert kv_command.read_size(text) == size


def test_what_does_not_fit_is_refused():
    with pytest.raises(Refusal, match="context_length at most 97152"):
        call("--config", "qwen3.6-35b-a3b", "--tensor-parallel", "2", "--available", "1GiB")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "nope", "--available", "1GiB"], "model 'nope' is not in the catalogue"),
        (["--config", "qwen3-32b", "--available", "much"], "'much' is not a size"),
        (["--config", "qwen3-32b", "--available", "1GiB", "--engine-version", "x"], "engine version 'x'"),
        (["--config", "qwen3-32b", "--available", "9GiB", "--tensor-parallel", "3"], "64 attention heads are not"),
    ],
)
def test_bad_input_ends_with_status_1(arguments, message, capsys):
    assert call(*arguments) == 1
    assert message in capsys.readouterr().err


def test_a_config_that_lacks_fields_names_them_all(tmp_path, capsys):
    config = json.loads(json.dumps(TINY))
    del config["text_config"]["hidden_size"], config["text_config"]["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert call("--config", str(tmp_path), "--available", "1GiB") == 1
    assert "has no hidden_size, vocab_size. Needed: whole numbers" in capsys.readouterr().err


def test_usage_errors_end_with_status_1():
    with pytest.raises(SystemExit) as caught:
        call("--config", "qwen3-32b")
    assert caught.value.code == 1
