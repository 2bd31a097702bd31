"""Engine images of a host: found by digest, and removed when nobody needs them."""

from __future__ import annotations

import json

import pytest

from metalserve.remote.image_list import local_images, local_name, prune_images
from metalserve.remote.image_names import derived_digest, mirrored, repository_of, split_repository
from metalserve.remote.release_names import UnreadableReleaseError

PACKAGE = f"plugin==1.0 --hash=sha256:{'a' * 64}"


def digest(letter: str) -> str:
    return f"sha256:{letter * 64}"


def row(repository: str, image_digest: str, tag: str = "<none>", created: str = "2026-01-01") -> str:
    return json.dumps({"Repository": repository, "Tag": tag, "Digest": image_digest, "CreatedAt": created})


def docker(*rows: str):
    return lambda argv: "\n".join(rows) if argv[:3] == ("docker", "image", "ls") else ""


@pytest.fixture
def release(tmp_path):
    def write(name: str, image: str | None) -> None:
        folder = tmp_path / "qwen" / "releases" / name
        folder.mkdir(parents=True)
        (folder / "release.json").write_text(json.dumps({"image": image}))

    return write


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("vllm/vllm-openai", ("docker.io", "vllm/vllm-openai")),
        ("python", ("docker.io", "library/python")),
        ("index.docker.io/a/b", ("docker.io", "a/b")),
        ("registry:5000/a/b", ("registry:5000", "a/b")),
        ("localhost/a", ("localhost", "a")),
    ],
)
def test_names_are_read_as_docker_reads_them(name, parts):
    assert split_repository(name) == parts


@pytest.mark.parametrize("reference", ["reg:5000/a/b", "reg:5000/a/b:1.0", f"reg:5000/a/b@{digest('a')}"])
def test_the_repository_of_a_reference(reference):
    assert repository_of(reference) == "reg:5000/a/b"


def test_mirrors_are_by_registry_and_in_their_order():
    mirrors = {"docker.io": ["cache:5000", "far.example.com/hub/"], "quay.io": "quay-mirror"}
    assert mirrored("vllm/vllm-openai:v1", mirrors) == [
        "cache:5000/vllm/vllm-openai",
        "far.example.com/hub/vllm/vllm-openai",
    ]
    assert mirrored("quay.io/a/b:1", mirrors) == ["quay-mirror/a/b"]
    assert mirrored("ghcr.io/a/b:1", mirrors) == []


def test_the_name_of_a_derived_image_is_its_content():
    first = derived_digest(digest("a"), [PACKAGE, "b==1 --hash=x"])
    assert first == derived_digest(digest("a"), ["b==1  --hash=x", PACKAGE])
    assert first != derived_digest(digest("b"), [PACKAGE, "b==1 --hash=x"])
    assert first != derived_digest(digest("a"), [PACKAGE])


def test_an_image_is_found_by_its_digest_under_any_name():
    run = docker(row("mirror:5000/vllm/vllm-openai", digest("a")), row("vllm/vllm-openai", digest("b")))
    assert local_name(f"vllm/vllm-openai@{digest('a')}", run) == f"mirror:5000/vllm/vllm-openai@{digest('a')}"
    assert local_name(f"vllm/vllm-openai@{digest('b')}", run) == f"vllm/vllm-openai@{digest('b')}"
    assert local_name(f"vllm/vllm-openai@{digest('c')}", run) is None


def test_its_own_name_comes_first():
    run = docker(row("mirror/a", digest("a")), row("own/a", digest("a")))
    assert local_name(f"own/a@{digest('a')}", run) == f"own/a@{digest('a')}"


def test_a_derived_image_is_found_by_its_tag():
    run = docker(row("metalserve/derived", "<none>", "d" * 64))
    assert local_name(f"metalserve/derived@{digest('d')}", run) == f"metalserve/derived:{'d' * 64}"


def test_without_docker_there_are_none():
    assert local_images(lambda argv: "") == []
    assert local_images(lambda argv: "Cannot connect to the Docker daemon") == []


def prune(root, *rows, keep=1, stuck=()):
    wanted = [f"vllm/vllm-openai@{digest('a')}"]
    removed = []

    def remove(name):
        removed.append(name)
        return name not in stuck

    answer = prune_images(wanted, keep, docker(*rows), remove, releases_root=root)
    assert answer == [name for name in removed if name not in stuck]
    return removed


def vllm(letter, created, repository="vllm/vllm-openai", tag="<none>"):
    return row(repository, digest(letter), tag, created)


def test_the_newest_others_stay_and_older_ones_go(tmp_path):
    rows = [vllm("a", "2026-04"), vllm("b", "2026-03"), vllm("c", "2026-02"), vllm("d", "2026-01")]
    assert prune(tmp_path, *rows) == [f"vllm/vllm-openai@{digest('c')}", f"vllm/vllm-openai@{digest('d')}"]
    assert len(prune(tmp_path, *rows, keep=0)) == 3


def test_what_a_release_names_stays_however_old(tmp_path, release):
    release("0123", f"vllm/vllm-openai@{digest('d')}")
    rows = [vllm("a", "2026-04"), vllm("c", "2026-02"), vllm("d", "2026-01")]
    assert prune(tmp_path, *rows, keep=0) == [f"vllm/vllm-openai@{digest('c')}"]


def test_an_image_from_a_mirror_is_of_the_same_repository(tmp_path):
    rows = [vllm("a", "2026-04"), vllm("c", "2026-02", "127.0.0.1:8749/vllm/vllm-openai")]
    assert prune(tmp_path, *rows, keep=0) == [f"127.0.0.1:8749/vllm/vllm-openai@{digest('c')}"]


def test_images_of_others_are_left_alone(tmp_path):
    rows = [vllm("c", "2026-01", "postgres"), vllm("d", "2026-01", tag="v0.1")]
    assert prune(tmp_path, *rows, keep=0) == []


def test_two_names_of_one_image_count_once(tmp_path):
    rows = [vllm("b", "2026-03"), vllm("b", "2026-03", "mirror:5000/vllm/vllm-openai")]
    assert prune(tmp_path, *rows, keep=1) == []


def test_what_docker_keeps_is_not_said_to_be_gone(tmp_path):
    rows = [vllm("c", "2026-02")]
    prune(tmp_path, *rows, keep=0, stuck=(f"vllm/vllm-openai@{digest('c')}",))


def test_a_dry_run_removes_nothing(tmp_path):
    run = docker(vllm("c", "2026-02"))
    gone = prune_images([f"vllm/vllm-openai@{digest('a')}"], 0, run, pytest.fail, releases_root=tmp_path, dry_run=True)
    assert gone == [f"vllm/vllm-openai@{digest('c')}"]


@pytest.mark.parametrize("image", [None, "vllm/vllm-openai:v1"])
def test_a_release_that_cannot_be_read_removes_nothing(tmp_path, release, image):
    release("0123", image)
    with pytest.raises(UnreadableReleaseError, match=r"which image it needs\. Change: run playbooks/rollout\.yml"):
        prune(tmp_path, vllm("c", "2026-02"), keep=0)
