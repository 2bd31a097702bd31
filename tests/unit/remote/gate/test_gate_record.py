"""The stored result, and the key file."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from metalserve.remote.files import read_json_object
from metalserve.remote.gate import GateResult, GateRow
from metalserve.remote.gate_key import read_api_key
from metalserve.remote.gate_record import keep_record, new_record, outcome

WHEN = datetime.datetime(2027, 1, 2, 3, 4, 5, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))


def result(ok: bool = True, detail: str = "answered 42", seconds: float = 0.1) -> GateResult:
    return GateResult("http://h:1", "m", "vllm", (GateRow("chat", ok, seconds, detail),), seconds)


def test_record_holds_everything_that_was_judged() -> None:
    assert new_record(result(), "abc", WHEN) == {
        "schema": 1,
        "release": "abc",
        "when": "2027-01-02T01:04:05Z",
        "url": "http://h:1",
        "model": "m",
        "engine": "vllm",
        "passed": True,
        "seconds": 0.1,
        "rows": [{"name": "chat", "ok": True, "seconds": 0.1, "detail": "answered 42"}],
    }


def test_times_and_details_are_no_new_outcome() -> None:
    first = new_record(result(), "abc", WHEN)
    later = new_record(result(detail="other", seconds=9), "abc", WHEN + datetime.timedelta(days=1))
    assert outcome(first) == outcome(later)


def test_release_and_ok_are_a_new_outcome() -> None:
    first = new_record(result(), "abc", WHEN)
    assert outcome(first) != outcome(new_record(result(), "def", WHEN))
    assert outcome(first) != outcome(new_record(result(ok=False), "abc", WHEN))


def test_a_record_is_kept_when_its_outcome_is_news(tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    record = new_record(result(detail="回答 42"), "abc", WHEN)
    assert keep_record(path, record, dry_run=True) == ({}, outcome(record))
    assert not path.exists()
    keep_record(path, record, dry_run=False)
    assert read_json_object(path) == record
    later = new_record(result(seconds=9), "abc", WHEN + datetime.timedelta(days=1))
    assert keep_record(path, later, dry_run=False) == (outcome(record), outcome(record))
    assert read_json_object(path) == record
    refused = new_record(result(ok=False), "abc", WHEN)
    keep_record(path, refused, dry_run=False)
    assert read_json_object(path) == refused


def test_a_record_in_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        keep_record(tmp_path / "none" / "gate.json", new_record(result(), "abc", WHEN), dry_run=False)


def test_what_is_no_record_has_no_outcome() -> None:
    assert outcome({"rows": 7}) == outcome({}) == outcome([]) == {}


def test_key_is_read_without_its_line_end(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("sk-abc\n")
    assert read_api_key(path) == "sk-abc"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"sk-one\nsk-two\n", "holds more than one word"),
        (b"sk-one sk-two", "holds more than one word"),
        ("sk-schlüssel".encode(), "holds a character outside printable ASCII"),
        (b"\xff\xfe", "is not text"),
    ],
)
def test_unusable_key_file(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        read_api_key(path)
    assert "sk-" not in str(caught.value)


def test_missing_key_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_api_key(tmp_path / "key")
