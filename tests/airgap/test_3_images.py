"""Layouts, mirrors, signatures, packages and removal with a real Docker and a real registry: those of this machine."""

import base64
import hashlib
import io
import json
import subprocess
import tarfile
import uuid

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from dxf import DXF

from metalserve.errors import Refusal
from metalserve.lock import SIGNATURE_ANNOTATION, SIGNATURE_PAYLOAD, lock_image
from metalserve.remote.image_list import prune_images
from metalserve.remote.image_pull import ImageError, Places, ensure_derived, ensure_image, remove_image
from metalserve.remote.readiness import run_command
from metalserve.signatures import check_signatures

REPOSITORY = "metalserve-airgap/small"


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def small_image(text: str) -> tuple[str, dict[str, bytes]]:
    """An image with one small file: its digest, and its blobs."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        member = tarfile.TarInfo("text")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text.encode()))
    data = layer.getvalue()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Cmd": ["/text"]},
            "rootfs": {"type": "layers", "diff_ids": [digest_of(data)]},
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": digest_of(config),
                "size": len(config),
            },
            "layers": [
                {
                    "mediaType": "application/vnd.oci.image.layer.v1.tar",
                    "digest": digest_of(data),
                    "size": len(data),
                }
            ],
        }
    ).encode()
    return digest_of(manifest), {digest_of(blob): blob for blob in (data, config, manifest)}


def write_layout(directory, blobs):
    (directory / "blobs/sha256").mkdir(parents=True)
    for name, data in blobs.items():
        (directory / "blobs/sha256" / name.partition(":")[2]).write_bytes(data)
    (directory / "index.json").write_text("{}")
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


def docker(*words):
    return subprocess.run(["docker", *words], capture_output=True, text=True, check=True).stdout.strip()


def ours():
    names = docker("image", "ls", "--digests", "--format", "{{.Repository}}@{{.Digest}}").split()
    return sorted(name for name in names if REPOSITORY in name)


@pytest.fixture(autouse=True)
def cleaned():
    yield
    for name in ours():
        docker("rmi", name)


@pytest.fixture(scope="module")
def registry():
    """The lab's registry, on the loopback."""
    port = docker("port", "metalserve-lab-registry", "5000").splitlines()[0].rpartition(":")[2]
    return f"127.0.0.1:{port}"


@pytest.mark.parametrize("form", ["directory", "tar"])
def test_docker_takes_an_image_from_a_layout_and_knows_its_digest(tmp_path, form):
    digest, blobs = small_image(form)
    write_layout(tmp_path / "layout", blobs)
    place = tmp_path / "layout"
    if form == "tar":
        place = tmp_path / "small.tar"
        with tarfile.open(place, "w") as archive:
            archive.add(tmp_path / "layout", arcname=".")
    places = Places([str(place)], registry=False)
    name, source = ensure_image(f"{REPOSITORY}:1", digest, places)
    assert (name, source) == (f"127.0.0.1:8749/{REPOSITORY}@{digest}", str(place))
    assert docker("image", "inspect", "--format", '{{join .RepoDigests " "}}', name) == name
    assert ensure_image(f"{REPOSITORY}:1", digest, places) == (name, "")


def test_docker_refuses_a_layer_with_a_changed_byte(tmp_path):
    digest, blobs = small_image("changed")
    layer = next(name for name, data in blobs.items() if b"ustar" in data)
    write_layout(tmp_path / "layout", {**blobs, layer: blobs[layer].replace(b"changed", b"chanGed")})
    with pytest.raises(ImageError) as refusal:
        ensure_image(f"{REPOSITORY}:1", digest, Places([str(tmp_path / "layout")], registry=False))
    assert f"{REPOSITORY}:1 could not be pulled by its digest {digest}: {tmp_path}/layout: " in str(refusal.value)
    assert ours() == []


def pushed(tmp_path, registry, text):
    """A small image in the registry, and nothing of it here; returns its digest there."""
    digest, blobs = small_image(text)
    write_layout(tmp_path / "layout", blobs)
    name, _ = ensure_image(f"{REPOSITORY}:1", digest, Places([str(tmp_path / "layout")], registry=False))
    docker("tag", name, f"{registry}/{REPOSITORY}:1")
    docker("push", "--quiet", f"{registry}/{REPOSITORY}:1")
    names = json.loads(docker("image", "inspect", "--format", "{{json .RepoDigests}}", f"{registry}/{REPOSITORY}:1"))
    docker("rmi", f"{registry}/{REPOSITORY}:1")
    for left in ours():
        docker("rmi", left)
    assert ours() == []
    # Docker compresses what it pushes: the registry's image has a digest of its own.
    return next(item for item in names if item.startswith(registry)).partition("@")[2]


def sign(registry, digest, key):
    """What `cosign sign --key` leaves in a registry."""
    critical = {
        "identity": {"docker-reference": f"{registry}/{REPOSITORY}"},
        "image": {"docker-manifest-digest": digest},
        "type": "cosign container image signature",
    }
    payload = json.dumps({"critical": critical, "optional": None}).encode()
    config = b"{}"
    client = DXF(registry, REPOSITORY, insecure=True)
    for data in (payload, config):
        client.push_blob(data=iter([data]), digest=digest_of(data))
    layer = {
        "mediaType": SIGNATURE_PAYLOAD,
        "size": len(payload),
        "digest": digest_of(payload),
        "annotations": {SIGNATURE_ANNOTATION: base64.b64encode(key.sign(payload, ec.ECDSA(SHA256()))).decode()},
    }
    kind = "application/vnd.oci.image.config.v1+json"
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": kind, "digest": digest_of(config), "size": len(config)},
        "layers": [layer],
    }
    client.set_manifest(digest.replace(":", "-") + ".sig", json.dumps(manifest))


def public(key):
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def test_a_signature_in_a_real_registry_comes_with_the_lock(tmp_path, registry):
    # Another image each time: the lab's registry keeps what an earlier run signed.
    digest = pushed(tmp_path, registry, f"signed {uuid.uuid4()}")
    key, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    reference = f"{registry}/{REPOSITORY}:1"
    assert "signatures" not in lock_image(reference, [registry])
    sign(registry, digest, key)
    locked = lock_image(reference, [registry])
    assert locked["digest"] == digest
    check_signatures(reference, digest, locked["signatures"], {"default": [public(key)]})
    with pytest.raises(Refusal, match="it is of another key"):
        check_signatures(reference, digest, locked["signatures"], {"default": [public(other)]})


def test_packages_without_their_wheels_are_refused(tmp_path, cache):
    base = yaml.safe_load((cache / "built.yml").read_text())["lab_engine_image"]
    package = f"no-such-package==1.0 --hash=sha256:{'a' * 64}"
    with pytest.raises(ImageError) as refusal:
        ensure_derived(base, "sha256:" + "0" * 64, [package], tmp_path)
    assert f"pip in {base} takes not all of no-such-package==1.0: " in str(refusal.value)
    assert "Change: packages of serving_engines" in str(refusal.value)
    assert docker("ps", "--all", "--quiet", "--filter", "name=metalserve-derive") == ""


def test_a_mirror_is_used_in_the_place_of_a_registry_that_nobody_reaches(tmp_path, registry):
    there = pushed(tmp_path, registry, "mirrored")
    places = Places(mirrors={"registry.invalid": [registry]})
    assert ensure_image(f"registry.invalid/{REPOSITORY}:1", there, places) == (
        f"{registry}/{REPOSITORY}@{there}",
        f"{registry}/{REPOSITORY}",
    )


def test_older_images_go_when_no_release_names_them(tmp_path):
    digests = []
    for text in ("one", "two", "three"):
        digest, blobs = small_image(text)
        write_layout(tmp_path / text, blobs)
        ensure_image(f"{REPOSITORY}:1", digest, Places([str(tmp_path / text)], registry=False))
        digests.append(digest)
    folder = tmp_path / "releases" / "tiny" / "releases" / "0123"
    folder.mkdir(parents=True)
    (folder / "release.json").write_text(json.dumps({"image": f"{REPOSITORY}@{digests[0]}"}))
    wanted = [f"{REPOSITORY}@{digests[2]}"]
    removed = prune_images(wanted, 0, run_command, remove_image, releases_root=tmp_path / "releases")
    assert removed == [f"127.0.0.1:8749/{REPOSITORY}@{digests[1]}"]
    assert len(ours()) == 2
