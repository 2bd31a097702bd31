"""Small files in one visit: what differs is written and told, and nothing else."""

from __future__ import annotations

import pytest

from metalserve.remote.config_files import Change, put_files


def test_what_differs_is_written_with_its_directories(tmp_path):
    there, new = tmp_path / "there", tmp_path / "a" / "b" / "new"
    there.write_text("old")
    there.chmod(0o644)
    files = {str(there): "text", str(new): "more"}
    told = [Change(str(there), "old", "text"), Change(str(new), None, "more")]
    assert put_files(files, check_mode=True) == told
    assert there.read_text() == "old"
    assert not new.parent.exists()
    assert put_files(files) == told
    assert (there.read_text(), new.read_text()) == ("text", "more")
    assert [path.stat().st_mode & 0o777 for path in (new, new.parent, new.parent.parent)] == [0o644, 0o755, 0o755]
    before = new.stat().st_mtime_ns
    assert put_files(files) == []
    assert new.stat().st_mtime_ns == before


def test_a_wrong_mode_is_a_difference(tmp_path):
    path = tmp_path / "file"
    path.write_text("text")
    path.chmod(0o600)
    assert put_files({str(path): "text"}) == [Change(str(path), "text", "text")]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_place_that_cannot_be_written_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        put_files({str(tmp_path / "file" / "below"): "text"})
