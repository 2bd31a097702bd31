"""What a bundle is refused for, before a host is touched; on copies of second names, so that no byte is copied."""

import json
import os
import shutil

import pytest


@pytest.fixture
def copy(bundle, tmp_path_factory):
    """The bundle under second names, on its own disk."""
    target = bundle.with_name("spoiled")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(bundle, target, copy_function=os.link)
    yield target
    shutil.rmtree(target)


def spoil(path):
    """Another file in the place of this one, with one byte changed and the same times."""
    data, status = bytearray(path.read_bytes()), path.stat()
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def smallest_layer(directory, lock):
    (locked,) = lock["images"].values()
    blobs = directory / "images/blobs/sha256"
    manifest = json.loads((blobs / locked["digest"].partition(":")[2]).read_text())
    return blobs / min(manifest["layers"], key=lambda layer: layer["size"])["digest"].partition(":")[2]


def refused(run_playbook, directory, playbook="site.yml", **more):
    run = run_playbook(playbook, {"serving_bundle": str(directory), **more})
    assert run.rc != 0
    assert "changed=0" in run.text
    return run.text


def test_a_changed_byte_of_the_weights_is_refused_by_name(run_playbook, copy, lock):
    path = f"weights/lab-moe-tiny/{lock['models']['lab-moe-tiny']['revision']}/model.safetensors"
    spoil(copy / path)
    text = refused(run_playbook, copy)
    assert f"the bundle {copy} is not what was signed: changed: {path}." in text
    # Before the host was asked anything.
    assert "Collect the facts of the host" not in text


def test_a_changed_byte_of_an_image_is_refused_by_name(run_playbook, copy, lock):
    layer = smallest_layer(copy, lock)
    spoil(layer)
    text = refused(run_playbook, copy, "playbooks/stage.yml")
    assert f"changed: {layer.relative_to(copy)}." in text


def test_a_file_too_many_and_a_missing_one_are_refused_by_name(run_playbook, copy):
    (copy / "packages/debian-13/malware.deb").write_text("x")
    min((copy / "wheels").iterdir()).unlink()
    text = refused(run_playbook, copy)
    assert "not in the manifest: packages/debian-13/malware.deb." in text
    assert "missing: wheels/" in text


def test_a_manifest_that_somebody_else_signed_is_refused(run_playbook, bundle):
    other = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKJ3bJ8rb1V8R1O4kM2v4o7hmJ7U1h7m6zq1r0oJq9xk other"
    text = refused(run_playbook, bundle, serving_bundle_signers=[other])
    assert "with a manifest.json that nobody vouches for (" in text


def test_a_bundle_without_what_the_inventory_needs_is_refused(run_playbook, bundle, lock):
    (reference,) = lock["images"]
    moved = {**lock, "images": {reference: {**lock["images"][reference], "digest": "sha256:" + "0" * 64}}}
    text = refused(run_playbook, bundle, serving_lock=moved)
    assert f"the bundle {bundle} without {reference} at sha256:0000" in text


def test_a_host_that_does_not_reach_the_controller_is_refused(run_playbook, bundle):
    text = refused(run_playbook, bundle, serving_bundle_address="10.213.44.99")
    assert "This host does not get the bundle's manifest from http://10.213.44.99:8748:" in text
    assert "serving_bundle_url" in text
