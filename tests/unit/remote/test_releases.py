"""Releases on disk: written whole, healed in place, activated by one link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from metalserve.remote.releases import (
    Refused,
    activate_release,
    active_release,
    deployment_names,
    link_target,
    mark_good,
    prune_releases,
    refusal_of,
    refuse,
    release_ids,
    stage_release,
)

FILES = {"release.json": "{}\n", "engine.yaml": "model: /models/tiny\n", "release.env": "METALSERVE_PORT=8000\n"}
A, B, C = "aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc"


@pytest.fixture
def releases(tmp_path):
    return tmp_path / "tiny" / "releases"


def stage(root, release_id=A, files=FILES, *, dry_run=False):
    return stage_release(root, "tiny", release_id, files, dry_run=dry_run)


def activate(root, release_id, *, dry_run=False):
    return activate_release(root, "tiny", release_id, dry_run=dry_run)


def texts(directory):
    return {path.name: path.read_text() for path in directory.iterdir()}


def links(root):
    """Where the links point, by name."""
    return {path.name: str(path.readlink()) for path in (root / "tiny").iterdir() if path.is_symlink()}


def test_a_release_is_written_once(tmp_path, releases):
    assert stage(tmp_path) is True
    assert texts(releases / A) == FILES
    before = {path.name: path.stat().st_mtime_ns for path in (releases / A).iterdir()}
    assert stage(tmp_path) is False
    assert {path.name: path.stat().st_mtime_ns for path in (releases / A).iterdir()} == before
    assert os.listdir(releases) == [A]  # noqa: PTH208 (hidden ones too)


def test_files_can_be_read_by_all_whatever_the_umask(tmp_path, releases):
    before = os.umask(0o077)
    try:
        stage(tmp_path)
    finally:
        os.umask(before)
    assert (releases / A).stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in (releases / A).iterdir()} == {0o644}


def test_staging_does_not_activate(tmp_path):
    stage(tmp_path)
    assert active_release(tmp_path, "tiny") is None
    assert links(tmp_path) == {}


def test_a_dry_run_of_staging_writes_nothing(tmp_path, releases):
    assert stage(tmp_path, dry_run=True) is True
    assert list(tmp_path.iterdir()) == []
    stage(tmp_path)
    assert stage(tmp_path, dry_run=True) is False
    (releases / A / "engine.yaml").write_text("edited")
    assert stage(tmp_path, dry_run=True) is True
    assert (releases / A / "engine.yaml").read_text() == "edited"


def test_no_part_of_a_release_is_visible_when_writing_fails(tmp_path, releases, monkeypatch):
    write_text = Path.write_text

    def full_disk(path, *arguments, **options):
        if path.name == "release.env":
            raise OSError(28, "No space left on device")
        return write_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        stage(tmp_path)
    assert not (releases / A).exists()
    monkeypatch.undo()
    # What the failed run left is no obstacle, and is gone afterwards.
    assert stage(tmp_path) is True
    assert texts(releases / A) == FILES
    assert os.listdir(releases) == [A]  # noqa: PTH208


def test_the_files_appear_together(tmp_path, releases, monkeypatch):
    seen = []
    rename = Path.rename

    def look_and_rename(path, target):
        seen.append(((releases / A).exists(), texts(path)))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", look_and_rename)
    stage(tmp_path)
    assert seen == [(False, FILES)]


@pytest.mark.parametrize("damage", ["edited", None], ids=["edited", "deleted"])
def test_a_damaged_release_is_healed_and_keeps_the_result_of_the_gate(tmp_path, releases, damage):
    stage(tmp_path)
    activate(tmp_path, A)
    (releases / A / "gate.json").write_text('{"passed": true}')
    if damage:
        (releases / A / "engine.yaml").write_text(damage)
    else:
        (releases / A / "engine.yaml").unlink()
    inode = (releases / A).stat().st_ino
    assert stage(tmp_path) is True
    assert texts(releases / A) == {**FILES, "gate.json": '{"passed": true}'}
    # A container that has the directory mounted sees the healed files.
    assert (releases / A).stat().st_ino == inode
    assert os.listdir(releases) == [A]  # noqa: PTH208
    assert stage(tmp_path) is False


def test_nothing_is_active_at_first(tmp_path):
    assert active_release(tmp_path, "tiny") is None


def test_the_first_activation_has_no_previous(tmp_path):
    stage(tmp_path)
    assert activate(tmp_path, A) is True
    assert active_release(tmp_path, "tiny") == A
    assert links(tmp_path) == {"current": f"releases/{A}"}
    assert texts(tmp_path / "tiny" / "current") == FILES


def good(root, release_id):
    return mark_good(root, "tiny", release_id)


def test_previous_is_the_good_one_before(tmp_path):
    for release_id in (A, B, C):
        stage(tmp_path, release_id)
        activate(tmp_path, release_id)
        good(tmp_path, release_id)
    assert links(tmp_path) == {
        "current": f"releases/{C}",
        "good": f"releases/{C}",
        "previous": f"releases/{B}",
    }
    # A return to the release before.
    assert activate(tmp_path, B) is True
    good(tmp_path, B)
    assert links(tmp_path) == {
        "current": f"releases/{B}",
        "good": f"releases/{B}",
        "previous": f"releases/{C}",
    }


def test_a_release_that_has_not_passed_is_no_way_back(tmp_path):
    for release_id in (A, B, C):
        stage(tmp_path, release_id)
        activate(tmp_path, release_id)
        if release_id == A:
            good(tmp_path, A)
    assert links(tmp_path) == {"current": f"releases/{C}", "good": f"releases/{A}"}


def test_activating_what_is_active_changes_nothing(tmp_path):
    for release_id in (A, B):
        stage(tmp_path, release_id)
        activate(tmp_path, release_id)
    assert activate(tmp_path, B) is False
    assert links(tmp_path) == {"current": f"releases/{B}"}


def test_a_dry_run_of_activation_moves_no_link(tmp_path):
    assert activate(tmp_path, A, dry_run=True) is True
    assert list(tmp_path.iterdir()) == []
    stage(tmp_path)
    activate(tmp_path, A)
    assert activate(tmp_path, B, dry_run=True) is True
    assert activate(tmp_path, A, dry_run=True) is False
    assert links(tmp_path) == {"current": f"releases/{A}"}


def test_the_links_hold_when_the_directory_is_moved(tmp_path):
    stage(tmp_path / "etc")
    activate(tmp_path / "etc", A)
    (tmp_path / "etc").rename(tmp_path / "backup")
    assert texts(tmp_path / "backup" / "tiny" / "current") == FILES


def test_a_run_that_dies_between_the_links_leaves_two_that_are_proven(tmp_path, monkeypatch):
    for release_id in (A, B):
        stage(tmp_path, release_id)
    good(tmp_path, A)
    replace = os.replace

    def die_at_good(source, target):
        if Path(target).name == "good":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", die_at_good)
    with pytest.raises(KeyboardInterrupt):
        good(tmp_path, B)
    monkeypatch.undo()
    assert link_target(tmp_path, "tiny", "good") == link_target(tmp_path, "tiny", "previous") == A
    assert good(tmp_path, B) is True
    left = {"good": f"releases/{B}", "previous": f"releases/{A}"}
    assert links(tmp_path) == left


def test_a_refusal_is_kept_until_the_release_passes(tmp_path, releases):
    stage(tmp_path)
    assert refusal_of(tmp_path, "tiny", A) is None
    said = Refused("2027-01-02T03:04:05Z", "gate", "tool_auto: 回答", {"gate": "1"})
    refuse(tmp_path, "tiny", A, said)
    assert refusal_of(tmp_path, "tiny", A) == said
    # Writing the release again forgets nothing.
    (releases / A / "engine.yaml").unlink()
    stage(tmp_path)
    assert refusal_of(tmp_path, "tiny", A) == said
    good(tmp_path, A)
    assert refusal_of(tmp_path, "tiny", A) is None


def test_pruning_keeps_the_newest_the_needed_and_what_a_link_names(tmp_path, releases):
    ids = [character * 12 for character in "abcdef"]
    for age, release_id in enumerate(reversed(ids)):
        stage(tmp_path, release_id)
        os.utime(releases / release_id, (age, age))
    good(tmp_path, ids[5])
    activate(tmp_path, ids[4])
    assert release_ids(tmp_path, "tiny") == ids
    assert prune_releases(tmp_path, "tiny", 1, [ids[3]], dry_run=True) == [ids[1], ids[2]]
    assert release_ids(tmp_path, "tiny") == ids
    assert prune_releases(tmp_path, "tiny", 1, [ids[3]], dry_run=False) == [ids[1], ids[2]]
    assert release_ids(tmp_path, "tiny") == [ids[0], *ids[3:]]


def test_what_is_no_deployment_is_none(tmp_path):
    assert deployment_names(tmp_path / "none") == []
    stage(tmp_path)
    (tmp_path / ".lock").write_text("")
    (tmp_path / "stray").mkdir()
    assert deployment_names(tmp_path) == ["tiny"]
    assert release_ids(tmp_path, "stray") == []


def test_deployments_do_not_touch_each_other(tmp_path):
    for name in ("tiny", "other"):
        stage_release(tmp_path, name, A, FILES, dry_run=False)
        activate_release(tmp_path, name, A, dry_run=False)
    stage(tmp_path, B)
    activate(tmp_path, B)
    assert active_release(tmp_path, "other") == A
    assert active_release(tmp_path, "tiny") == B


def test_a_directory_in_the_place_of_the_link_is_an_error(tmp_path):
    (tmp_path / "tiny" / "current").mkdir(parents=True)
    assert active_release(tmp_path, "tiny") is None
    stage(tmp_path)
    with pytest.raises(OSError, match="current"):
        activate(tmp_path, A)
