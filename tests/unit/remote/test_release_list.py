"""What a host knows about its releases: the list, names of releases, the difference between two."""

from __future__ import annotations

import json

import pytest

from metalserve import cli
from metalserve.remote import host_command
from metalserve.remote.release_list import (
    UnknownReleaseError,
    diff_directories,
    find_release,
    list_releases,
    release_table,
)
from metalserve.remote.releases import Refused, activate_release, mark_good, refuse, stage_release

A, B = "aaaaaaaaaaaa", "abbbbbbbbbbb"


def record(release_id, **more):
    content = {
        "id": release_id,
        "engine": "vllm",
        "engine_version": "0.33.0",
        "model": "qwen",
        "model_revision": "0123456789abcdef",
        "config": {"max-num-seqs": 64},
        **more,
    }
    return {"release.json": json.dumps(content), "endpoint.json": "{}"}


@pytest.fixture
def root(tmp_path):
    stage_release(tmp_path, "tiny", A, record(A), dry_run=False)
    stage_release(tmp_path, "tiny", B, record(B, config={"max-num-seqs": 32, "eager": True}), dry_run=False)
    stage_release(tmp_path, "other", A, record(A), dry_run=False)
    activate_release(tmp_path, "tiny", A, dry_run=False)
    mark_good(tmp_path, "tiny", A)
    refuse(tmp_path, "tiny", B, Refused("2027-01-02T03:04:05Z", "gate", "tool_auto: no call\nsecond line", {}))
    gate = {"passed": True, "when": "2027-01-01T00:00:00Z"}
    (tmp_path / "tiny" / "releases" / A / "gate.json").write_text(json.dumps(gate))
    return tmp_path


def test_the_list_says_what_each_release_is_and_became(root):
    rows = {(row["deployment"], row["release"]): row for row in list_releases(root)}
    assert set(rows) == {("tiny", A), ("tiny", B), ("other", A)}
    good = rows["tiny", A]
    assert (good["links"], good["gate"], good["refused"]) == (["current", "good"], "passed", None)
    assert (good["engine"], good["model"]) == ("vllm", "qwen")
    assert rows["tiny", B]["refused"]["stage"] == "gate"
    assert rows["other", A]["links"] == []


def test_the_table_is_aligned_and_gives_the_reasons_below(root):
    lines = release_table(list_releases(root, ["tiny"]))
    assert [line.split()[0] for line in lines[:3]] == ["deployment", "tiny", "tiny"]
    assert any("current,good" in line and "passed 2027-01-01T00:00:00Z" in line for line in lines)
    assert lines[-3:] == [
        f"tiny {B} refused (gate) at 2027-01-02T03:04:05Z:",
        "  tool_auto: no call",
        "  second line",
    ]
    assert release_table([]) == ["no releases here"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (f"tiny/{A}", f"tiny/releases/{A}"),
        ("tiny/current", f"tiny/releases/{A}"),
        ("tiny/ab", f"tiny/releases/{B}"),
        (B, f"tiny/releases/{B}"),
    ],
)
def test_a_release_is_found_by_name(root, name, found):
    assert find_release(root, name) == root / found


@pytest.mark.parametrize("name", [A, "tiny/a", "tiny/previous", "none/current", "cccc"])
def test_a_name_of_none_or_several_is_refused_with_those_there_are(root, name):
    with pytest.raises(UnknownReleaseError, match=rf"called '{name}'.* Needed: one of .*tiny/{A}.* Change: "):
        find_release(root, name)


def test_the_difference_of_two_releases(root):
    old, new = (find_release(root, f"tiny/{each}") for each in (A, B))
    assert diff_directories(old, new) == [
        "+ config.eager: true",
        "config.max-num-seqs: 64 -> 32",
        f'id: "{A}" -> "{B}"',
    ]
    assert diff_directories(old, old) == []


# ---- on the command line of the controller, and of the host ----


@pytest.mark.parametrize(
    "main", [cli.main, lambda words: host_command.main(["--root", words[-1], *words[:-2]])], ids=["metalserve", "host"]
)
def test_both_commands_list_and_compare(root, main, capsys):
    assert main(["releases", "--root", str(root)]) == 0
    assert f"tiny        {B}  refused" in capsys.readouterr().out
    assert main(["releases", "tiny", "--json", "--root", str(root)]) == 0
    assert {row["release"] for row in json.loads(capsys.readouterr().out)} == {A, B}
    assert main(["diff", "tiny/current", B, "--root", str(root)]) == 0
    assert "config.max-num-seqs: 64 -> 32" in capsys.readouterr().out
    assert main(["diff", "tiny/current", "cccc", "--root", str(root)]) == 2
    error = capsys.readouterr().err
    assert "no releases are called 'cccc'" in error
    assert "Needed: one of" in error


def test_two_directories_are_compared_wherever_they_lie(root, capsys):
    assert cli.main(["diff", *(str(root / "tiny" / "releases" / each) for each in (A, B))]) == 0
    assert "+ config.eager: true" in capsys.readouterr().out


def test_a_directory_that_is_not_there(tmp_path, capsys):
    assert cli.main(["releases", "--root", str(tmp_path / "none")]) == 2
    assert "playbooks/ops/releases.yml" in capsys.readouterr().err
