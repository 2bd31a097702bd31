"""A bundle is what was signed, byte for byte, or it is refused by name; and who may be given what of it."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from metalserve.bundle import MANIFEST, SIGNATURE, check_bundle, require, write_manifest
from metalserve.bundle_server import start_server
from metalserve.errors import Refusal

DIGEST = "sha256:" + "d" * 64
FILES = [{"path": "config.json", "size_bytes": 2, "sha256": "a" * 64}]
LOCK = {"images": {"vllm:1": {"digest": DIGEST}}, "models": {"tiny": {"revision": "r1", "files": FILES}}}
CONTENT = {"images": {"vllm:1": DIGEST}, "models": {}, "systems": ["debian-13"]}
CHANGED = "weights/tiny/r1/model.safetensors"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two keys of ssh: {name: path of the private key}."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("right", "other"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
        subprocess.run(command, check=True)
    return folder


@pytest.fixture
def signer(keys):
    return (keys / "right.pub").read_text()


@pytest.fixture
def bundle(tmp_path, keys):
    directory = tmp_path / "bundle"
    for path, text in ((CHANGED, "weights"), ("images/index.json", "{}"), ("packages/debian-13/key.asc", "key")):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    write_manifest(directory, CONTENT, keys / "right")
    return directory


def refusal_of(directory, signers, **more) -> Refusal:
    with pytest.raises(Refusal) as caught:
        check_bundle(directory, signers, **more)
    return caught.value


def test_a_signed_bundle_is_taken(bundle, signer):
    manifest = check_bundle(bundle, ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDummy nobody", signer])
    assert manifest["images"] == CONTENT["images"]
    assert [entry["path"] for entry in manifest["files"]] == [
        "images/index.json",
        "packages/debian-13/key.asc",
        CHANGED,
    ]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda directory: flip(directory / CHANGED), f"changed: {CHANGED}"),
        (lambda directory: (directory / CHANGED).write_text("longer than it was"), f"changed: {CHANGED}"),
        (lambda directory: (directory / CHANGED).unlink(), f"missing: {CHANGED}"),
        (lambda directory: (directory / "images/extra").write_text("x"), "not in the manifest: images/extra"),
        (lambda directory: (directory / ".hidden").write_text("x"), "not in the manifest: .hidden"),
    ],
    ids=["a byte", "a length", "missing", "too many", "hidden"],
)
def test_what_is_not_as_it_was_signed_is_refused_by_name(bundle, signer, damage, found):
    damage(bundle)
    refusal = refusal_of(bundle, [signer])
    assert refusal.found == f"the bundle {bundle} is not what was signed: {found}"
    assert "nothing was changed on a host" in refusal.change


def test_everything_that_is_wrong_is_named_at_once(bundle, signer):
    flip(bundle / CHANGED)
    (bundle / "images/index.json").unlink()
    (bundle / "more").write_text("x")
    found = refusal_of(bundle, [signer]).found
    assert found.endswith(f"changed: {CHANGED}; missing: images/index.json; not in the manifest: more")


def test_a_link_is_refused(bundle, signer):
    (bundle / "weights/link").symlink_to("/etc/passwd")
    assert refusal_of(bundle, [signer]).found == f"the link weights/link in the bundle {bundle}"


def test_a_manifest_that_was_changed_is_refused(bundle, signer):
    text = (bundle / MANIFEST).read_text()
    (bundle / MANIFEST).write_text(text.replace("debian-13", "debian-12"))
    assert "with a manifest.json that nobody vouches for (" in refusal_of(bundle, [signer]).found


def test_another_signer_is_refused(bundle, keys):
    refusal = refusal_of(bundle, [(keys / "other.pub").read_text()])
    assert "that nobody vouches for" in refusal.found
    assert refusal.needed == "a signature by one of serving_bundle_signers"


def test_without_a_signature_or_a_signer_it_is_refused(bundle, signer):
    assert "(no signer is named)" in refusal_of(bundle, []).found
    (bundle / SIGNATURE).unlink()
    assert "(it is not signed)" in refusal_of(bundle, [signer], unsigned_allowed=True).found


def test_an_unsigned_bundle_is_taken_where_that_is_allowed(bundle):
    (bundle / SIGNATURE).unlink()
    check_bundle(bundle, [], unsigned_allowed=True)
    flip(bundle / CHANGED)
    assert f"changed: {CHANGED}" in refusal_of(bundle, [], unsigned_allowed=True).found


@pytest.mark.parametrize("text", [None, "no json", "{}", '{"schema": 2, "files": []}'])
def test_what_is_no_bundle(tmp_path, text):
    if text is not None:
        (tmp_path / MANIFEST).write_text(text)
    assert refusal_of(tmp_path, []).found.startswith(f"no bundle in {tmp_path} (")


def test_a_file_that_was_hashed_is_believed_until_it_changes(bundle, signer, tmp_path, monkeypatch):
    known = tmp_path / "cache" / "known.json"
    check_bundle(bundle, [signer], known=known)
    hashed = []
    monkeypatch.setattr("metalserve.bundle.hash_files", lambda paths: hashed.extend(paths) or {})
    check_bundle(bundle, [signer], known=known)
    assert hashed == []
    monkeypatch.undo()
    times = (bundle / CHANGED).stat()
    flip(bundle / CHANGED)
    # As somebody who hides a change would set it.
    os.utime(bundle / CHANGED, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert refusal_of(bundle, [signer], known=known).found.endswith(f"changed: {CHANGED}")
    # Again, and not only the first time.
    assert refusal_of(bundle, [signer], known=known).found.endswith(f"changed: {CHANGED}")


def test_a_second_manifest_of_the_same_is_the_same(bundle, keys, signer):
    before = (bundle / SIGNATURE).read_bytes()
    write_manifest(bundle, CONTENT, keys / "right")
    assert (bundle / SIGNATURE).read_bytes() == before
    (bundle / "images/blob").write_text("new")
    write_manifest(bundle, CONTENT, keys / "right")
    check_bundle(bundle, [signer])


def test_a_key_that_does_not_sign(bundle, tmp_path):
    (bundle / "images/blob").write_text("new")
    with pytest.raises(Refusal) as caught:
        write_manifest(bundle, CONTENT, tmp_path / "no-key")
    assert caught.value.found.startswith(f"ssh-keygen does not sign with {tmp_path}/no-key (")
    assert caught.value.change == "bundle_signing_key"


# ---- what an inventory needs ----


def test_a_bundle_with_what_the_lock_names(tmp_path):
    from metalserve.bundle import bundled_model

    manifest = {"images": {"vllm:1": DIGEST}, "models": {"tiny": bundled_model(LOCK["models"]["tiny"])}}
    require(manifest, ["vllm:1"], ["tiny"], LOCK, tmp_path)
    # What is not locked is preflight's matter.
    require(manifest, ["sglang:1"], ["other"], LOCK, tmp_path)


def test_a_bundle_without_what_the_lock_names(tmp_path):
    manifest = {"images": {"vllm:1": "sha256:other"}, "models": {"tiny": {"revision": "r1", "manifest_sha256": "x"}}}
    with pytest.raises(Refusal) as caught:
        require(manifest, ["vllm:1"], ["tiny"], LOCK, tmp_path)
    assert caught.value.found == f"the bundle {tmp_path} without vllm:1 at {DIGEST}, tiny at revision r1"
    assert "playbooks/ops/bundle.yml" in caught.value.change


# ---- the server ----


@pytest.fixture
def run():
    """A process that stands for a run of ansible-playbook."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def get(port, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data


def test_the_server_gives_what_the_manifest_names_and_ends_with_the_run(bundle, run):
    (bundle / "secret").write_text("not of the bundle")
    port = start_server(bundle, 0, run.pid)
    assert get(port, f"/{MANIFEST}") == (200, (bundle / MANIFEST).read_bytes())
    assert get(port, f"/{CHANGED}") == (200, b"weights")
    assert get(port, f"/{CHANGED}", Range="bytes=3-") == (206, b"ghts")
    # As apt writes the directory of a flat repository.
    assert get(port, "/packages/debian-13/./key.asc") == (200, b"key")
    for path in ("/secret", "/../keys/right", "/", "/weights", f"/{SIGNATURE}"):
        assert get(port, path)[0] == 404
    run.kill()
    run.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            get(port, f"/{MANIFEST}")
        except OSError:
            return
        time.sleep(0.1)
    pytest.fail("the server outlives its run")


def test_a_port_that_is_taken(bundle, run):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Refusal) as caught:
            start_server(bundle, port, run.pid)
    assert caught.value.found.startswith(f"port {port} of this controller cannot be listened on (")
    assert caught.value.change.startswith("serving_bundle_port")


def test_a_copy_elsewhere_is_as_good(bundle, signer, tmp_path):
    shutil.copytree(bundle, tmp_path / "medium")
    check_bundle(tmp_path / "medium", [signer])
