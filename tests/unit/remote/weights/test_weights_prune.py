"""Which revisions go: none that is wanted, that a release names, or that is among the newest."""

from __future__ import annotations

import json

import pytest
from weights_server import write_files

from metalserve.remote.weights import locked
from metalserve.remote.weights_manifest import WeightsError
from metalserve.remote.weights_prune import prune, removable_sentence

WANTED = [("tiny", "new")]


@pytest.fixture
def root(tmp_path):
    return tmp_path / "etc"


@pytest.fixture
def publish(models):
    def make(revision, published_at, key="tiny", size=1000):
        record = {"schema": 1, "files": {}, "published_at": published_at}
        files = {"model.safetensors": bytes(size), ".metalserve.json": json.dumps(record).encode()}
        return write_files(models / key / revision, files)

    return make


def release(root, models, revision, deployment="chat", model="tiny", **more):
    path = root / deployment / "releases" / f"r-{revision}" / "release.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"models_dir": str(models), "model": model, "model_revision": revision, **more}))
    return path


def names(removed):
    return [(item["key"], item["revision"]) for item in removed]


def there(models):
    return sorted(path.name for path in (models / "tiny").iterdir())


def test_the_newest_others_stay(models, root, publish):
    for age, revision in enumerate(["a", "b", "c", "d", "new"]):
        publish(revision, age)
    assert names(prune(models, WANTED, 2, releases_root=root)) == [("tiny", "b"), ("tiny", "a")]
    assert there(models) == ["c", "d", "new"]
    assert prune(models, WANTED, 2, releases_root=root) == []


def test_what_a_release_names_stays_however_old(models, root, publish):
    for age, revision in enumerate(["a", "b", "c", "new"]):
        publish(revision, age)
    release(root, models, "a")
    assert names(prune(models, WANTED, 0, releases_root=root)) == [("tiny", "c"), ("tiny", "b")]
    assert there(models) == ["a", "new"]


def test_adapters_that_a_release_mounts_stay(models, root, publish):
    publish("old", 1)
    publish("in-use", 1, key="sql")
    publish("left-over", 2, key="sql")
    release(root, models, "old", beside=[{"kind": "adapter", "key": "sql", "revision": "in-use"}])
    assert names(prune(models, WANTED, 0, releases_root=root)) == [("sql", "left-over")]
    assert (models / "sql" / "in-use").is_dir()


def test_a_release_in_another_directory_of_models_names_nothing_here(models, root, publish, tmp_path):
    publish("a", 1)
    release(root, tmp_path / "elsewhere", "a")
    assert names(prune(models, WANTED, 0, releases_root=root)) == [("tiny", "a")]


def test_what_is_wanted_stays(models, root, publish):
    publish("new", 0)
    assert prune(models, WANTED, 0, releases_root=root) == []


def test_each_model_is_counted_by_itself(models, root, publish):
    publish("a", 1)
    publish("b", 2)
    publish("a", 1, key="other")
    assert names(prune(models, WANTED, 1, releases_root=root)) == [("tiny", "a")]


def test_a_release_that_cannot_be_read_removes_nothing(models, root, publish):
    publish("a", 1)
    path = release(root, models, "b")
    path.write_text("{")
    with pytest.raises(WeightsError) as refusal:
        prune(models, WANTED, 0, releases_root=root)
    assert str(refusal.value).startswith(f"{path} cannot be read (")
    assert "Change: run playbooks/rollout.yml" in str(refusal.value)
    assert there(models) == ["a"]


def test_a_dry_run_says_what_would_go(models, root, publish):
    publish("a", 1, size=5000)
    (removed,) = prune(models, WANTED, 0, releases_root=root, dry_run=True)
    assert (removed["key"], removed["revision"], removed["size_bytes"] >= 5000) == ("tiny", "a", True)
    assert there(models) == ["a"]


def test_a_directory_that_nobody_published_is_left_alone(models, root):
    write_files(models / "tiny" / "by-hand", {"model.safetensors": b"x"})
    assert prune(models, WANTED, 0, releases_root=root) == []
    assert there(models) == ["by-hand"]


def test_what_interrupted_fetches_left_goes_unless_somebody_fetches(models, root):
    incoming = models / ".incoming"
    for name in ("tiny@old", "tiny@new", "tiny@busy", "foreign@old"):
        write_files(incoming / name, {"x.part": b"123"})
    with locked(incoming / "tiny@busy.lock", 0):
        assert names(prune(models, WANTED, 0, releases_root=root)) == [("tiny", "old")]
    assert sorted(path.name for path in incoming.iterdir() if path.is_dir()) == ["foreign@old", "tiny@busy", "tiny@new"]


def test_a_removal_that_was_killed_is_ended(models, root, publish):
    publish("new", 1)
    write_files(models / "tiny" / ".a.removed", {"x": b"1"})
    prune(models, WANTED, 0, releases_root=root)
    assert there(models) == ["new"]


def test_a_refusal_for_want_of_space_says_what_could_go(models, root, publish):
    publish("a", 1, size=3 << 20)
    publish("b", 2)
    release(root, models, "b")
    text = removable_sentence(models, WANTED, root)
    assert text.startswith(f" No release names 1 revisions of 0.00 GiB there: {models}/tiny/a (0.00 GiB)")
    release(root, models, "a")
    assert removable_sentence(models, WANTED, root) == " No revision there could be removed: releases name all of them."
