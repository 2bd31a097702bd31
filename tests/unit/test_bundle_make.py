"""What a bundle is made of: images byte by byte, weights, collections; and how each refusal comes about."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from test_lock import Registry, digest_of

from metalserve import bundle_packages, toolkit
from metalserve.bundle_collections import pack_collections
from metalserve.bundle_gpu import gpu_packages
from metalserve.bundle_images import fetch_images
from metalserve.bundle_make import Recipe, make_bundle
from metalserve.bundle_packages import make_repository
from metalserve.deployments import Inputs
from metalserve.errors import Refusal
from metalserve.remote.image_layout import open_layout
from metalserve.remote.weights_manifest import make_manifest

MODEL = "qwen3.6-35b-a3b"


@pytest.fixture
def registry():
    with Registry() as listening:
        yield listening


def push(registry, name: str = "vllm", tag: str = "1", layer: bytes = b"layer") -> str:
    """An image with its content; returns the digest."""
    config = b'{"architecture": "amd64"}'
    registry.blobs |= {digest_of(config): config, digest_of(layer): layer}
    content = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {"digest": digest_of(config), "size": len(config)},
        "layers": [{"digest": digest_of(layer), "size": len(layer)}],
    }
    return registry.push(name, tag, content["mediaType"], content)


def fetch(registry, layout, images):
    fetch_images(layout, {f"{registry.host}/{name}": digest for name, digest in images.items()}, [registry.host], {})


def blobs(layout):
    return sorted(path.name for path in (layout / "blobs/sha256").iterdir())


def test_an_image_is_kept_byte_by_byte(registry, tmp_path):
    digest = push(registry)
    fetch(registry, tmp_path, {"vllm:1": digest})
    assert len(blobs(tmp_path)) == 3
    for name in blobs(tmp_path):
        assert hashlib.sha256((tmp_path / "blobs/sha256" / name).read_bytes()).hexdigest() == name
    assert digest_of(open_layout(str(tmp_path), digest).manifest(digest)) == digest
    (entry,) = json.loads((tmp_path / "index.json").read_text())["manifests"]
    assert entry["digest"] == digest
    assert entry["annotations"] == {"org.opencontainers.image.ref.name": f"{registry.host}/vllm:1"}


def test_of_many_platforms_one_is_kept_with_the_index(registry, tmp_path):
    inner = push(registry, tag="amd")
    entries = [
        {"digest": inner, "platform": {"os": "linux", "architecture": "amd64"}},
        {"digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "arm64"}},
    ]
    kind = "application/vnd.oci.image.index.v1+json"
    digest = registry.push("vllm", "1", kind, {"schemaVersion": 2, "manifests": entries})
    fetch(registry, tmp_path, {"vllm:1": digest})
    assert {digest.partition(":")[2], inner.partition(":")[2]} < set(blobs(tmp_path))
    assert json.loads((tmp_path / "index.json").read_text())["manifests"][0]["mediaType"] == kind


def test_a_second_run_fetches_nothing_and_drops_what_is_not_wanted(registry, tmp_path):
    first, second = push(registry, layer=b"first"), push(registry, tag="2", layer=b"second")
    fetch(registry, tmp_path, {"vllm:1": first, "vllm:2": second})
    registry.requests.clear()
    fetch(registry, tmp_path, {"vllm:2": second})
    assert registry.requests == []
    assert len(blobs(tmp_path)) == 3


def test_other_bytes_than_the_digest_are_refused(registry, tmp_path):
    digest = push(registry)
    registry.blobs[digest_of(b"layer")] = b"wrong"
    with pytest.raises(Refusal) as caught:
        fetch(registry, tmp_path, {"vllm:1": digest})
    assert caught.value.found.startswith(f"no registry gives {registry.host}/vllm:1 at {digest} (")
    assert digest_of(b"layer").partition(":")[2] not in blobs(tmp_path)


def test_an_image_that_is_gone_is_refused(registry, tmp_path):
    digest = "sha256:" + "0" * 64
    with pytest.raises(Refusal) as caught:
        fetch(registry, tmp_path, {"vllm:1": digest})
    assert "404" in caught.value.found
    assert "serving_image_mirrors" in caught.value.change


# ---- collections ----


def test_a_collection_is_packed_as_ansible_galaxy_installs_it(tmp_path):
    pack_collections(tmp_path / "made", ["community.docker"])
    (archive,) = (tmp_path / "made").iterdir()
    before = archive.read_bytes()
    pack_collections(tmp_path / "made", ["community.docker"])
    assert archive.read_bytes() == before
    with tarfile.open(archive) as packed:
        files = packed.extractfile("FILES.json").read()
        manifest = json.loads(packed.extractfile("MANIFEST.json").read())
        assert manifest["file_manifest_file"]["chksum_sha256"] == hashlib.sha256(files).hexdigest()
        for row in json.loads(files)["files"]:
            if row["ftype"] == "file":
                content = packed.extractfile(row["name"]).read()
                assert hashlib.sha256(content).hexdigest() == row["chksum_sha256"]
    galaxy = str(Path(sys.executable).with_name("ansible-galaxy"))
    command = [galaxy, "collection", "install", "--offline", "--force", "--no-deps", "-p", str(tmp_path / "there")]
    done = subprocess.run([*command, str(archive)], capture_output=True, text=True, check=False)
    assert "was installed successfully" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "there/ansible_collections/community/docker/plugins/modules/docker_network.py").exists()


@pytest.mark.parametrize("name", ["community.nowhere", "nobody.nothing"])
def test_a_collection_that_is_not_here_is_refused(tmp_path, name):
    with pytest.raises(Refusal) as caught:
        pack_collections(tmp_path, [name])
    assert caught.value.found == f"no collection {name} beside this Ansible"


# ---- packages ----


def test_a_machine_without_apt_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle_packages.shutil, "which", lambda command: None)
    with pytest.raises(Refusal) as caught:
        make_repository(tmp_path, {"name": "debian-13", "sources": [], "packages": ["x"]}, tmp_path)
    assert caught.value.found == "no apt-get, dpkg-deb, gpg on this machine"


def test_packages_that_no_source_has_are_refused(tmp_path):
    if not bundle_packages.shutil.which("apt-get"):
        pytest.skip("this machine has no apt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/Packages").write_text("")
    system = {
        "name": "test-1",
        "sources": [f"deb [trusted=yes] file:{tmp_path}/empty ./"],
        "packages": ["no-such-package"],
    }
    with pytest.raises(Refusal) as caught:
        make_repository(tmp_path / "out", system, tmp_path / "work")
    assert caught.value.found.startswith("apt does not have all of no-such-package for test-1 (")
    assert "no-such-package" in caught.value.found.partition("(")[2]
    assert caught.value.change == "`sources` or `packages` of test-1 in bundle_systems"


def mirror(directory, packages):
    """A repository on the disk of empty packages: (name, version, what it depends on); returns its line for apt."""
    directory.mkdir()
    for name, version, needs in packages:
        tree = directory.parent / "trees" / f"{name}-{version}"
        (tree / "DEBIAN").mkdir(parents=True)
        fields = f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: x <x@y.invalid>\n"
        fields += f"Depends: {needs}\n" if needs else ""
        (tree / "DEBIAN/control").write_text(f"{fields}Description: {name}\n")
        subprocess.run(["dpkg-deb", "--build", tree, directory], check=True, stdout=subprocess.DEVNULL)
    (directory / "Packages").write_text("".join(map(bundle_packages._stanza, sorted(directory.glob("*.deb")))))
    return f"deb [trusted=yes] file:{directory} ./"


def made(directory):
    """The packages of a repository: {name: version}."""
    fields = [line.split(": ", 1) for line in (directory / "Packages").read_text().splitlines() if ": " in line]
    names, versions = ([value for key, value in fields if key == wanted] for wanted in ("Package", "Version"))
    assert len(names) == len(list(directory.glob("*.deb")))
    return dict(zip(names, versions, strict=True))


@pytest.fixture
def apt():
    if not bundle_packages.shutil.which("apt-get"):
        pytest.skip("this machine has no apt")


@pytest.mark.parametrize("method", ["file", "copy"])
def test_packages_of_a_mirror_on_a_disk_are_in_the_bundle(apt, tmp_path, method):
    """apt uses packages of `file:` where they lie: they never come into its cache."""
    line = mirror(tmp_path / "mirror", [("upper", "1:2+x~3", "lower (>= 1:2)"), ("lower", "1:2+x~3", "")])
    system = {"name": "test-1", "sources": [line.replace("file:", f"{method}:")], "packages": ["upper"]}
    for _ in range(2):
        make_repository(tmp_path / "out", system, tmp_path / "work")
        assert made(tmp_path / "out") == {"upper": "1:2+x~3", "lower": "1:2+x~3"}


DRIVER = "580.178.04-1"
DEBIAN_NAMES = ["nvidia-driver-cuda", "libcuda1", "nvidia-persistenced", "nvidia-modprobe", "nvidia-kernel-open-dkms"]


def test_gpu_hosts_get_driver_and_toolkit_in_the_roles_versions(apt, tmp_path):
    """What the named packages depend on by a minimum comes in the driver's version too; a later one is offered."""
    offered = [
        (name, version, "libnvidia-ml1 (>= 580)" if name == "nvidia-driver-cuda" else "")
        for name in [*DEBIAN_NAMES, "libnvidia-ml1", "nvidia-fabricmanager"]
        for version in (DRIVER, "620.10.01-1")
    ]
    offered += [(name, version, "") for name in toolkit.PACKAGES for version in ("1.20.0-1", "1.21.0-1")]
    offered += [("docker.io", "26.1.5-1", ""), ("linux-headers-6.12.1-amd64", "6.12.1-1", "")]
    system = {"name": "debian-13", "sources": [mirror(tmp_path / "mirror", offered)], "packages": ["docker.io"]}
    nvidia = {"driver": "580.178.04", "kernels": ["6.12.1-amd64"], "toolkit": "1.20.0"}
    expected = dict.fromkeys([*DEBIAN_NAMES, "libnvidia-ml1"], DRIVER)
    expected |= dict.fromkeys(toolkit.PACKAGES, "1.20.0-1")
    expected |= {"docker.io": "26.1.5-1", "linux-headers-6.12.1-amd64": "6.12.1-1"}
    make_repository(tmp_path / "out", {**system, "nvidia": nvidia}, tmp_path / "work")
    assert made(tmp_path / "out") == expected
    make_repository(tmp_path / "out", {**system, "nvidia": {**nvidia, "nvswitch": True}}, tmp_path / "work")
    assert made(tmp_path / "out") == {**expected, "nvidia-fabricmanager": DRIVER}
    with pytest.raises(Refusal) as caught:
        make_repository(tmp_path / "out", {**system, "nvidia": {**nvidia, "driver": "590.1.1"}}, tmp_path / "work")
    assert "nvidia-driver-cuda=590.1.1-*" in caught.value.found


@pytest.mark.parametrize(
    ("name", "nvidia", "found"),
    [
        ("rocky-9.6", {"driver": "580.178.04"}, "nvidia of rocky-9.6 in bundle_systems, whose packages are not of apt"),
        ("debian-13", {"driver": "580"}, "driver 580 in nvidia of debian-13"),
        ("debian-13", {"toolkit": "1.20"}, "toolkit 1.20 in nvidia of debian-13"),
        ("debian-13", {"version": "580.178.04"}, "version in nvidia of debian-13"),
        ("debian-99", {"driver": "580.178.04"}, "operating system debian 99"),
    ],
)
def test_what_gpu_hosts_cannot_get_is_refused(name, nvidia, found):
    with pytest.raises(Refusal) as caught:
        gpu_packages({"name": name, "nvidia": nvidia})
    assert caught.value.found.startswith(found)


def test_the_toolkits_packages_are_those_of_its_role():
    role = Path(__file__).parents[2] / "roles/container_toolkit/vars/main.yml"
    assert list(toolkit.PACKAGES) == yaml.safe_load(role.read_text())["__container_toolkit_packages"]


# ---- the whole ----

DEPLOYMENT = {"name": "qwen", "engine": "vllm", "model": MODEL, "port": 8000}


@pytest.fixture
def inputs(registry, tmp_path):
    """An inventory with its lock: an image in the registry, and weights that are two small files."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "qwen3_5_moe"}')
    (source / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    image = f"{registry.host}/vllm:1"
    lock = {
        "images": {image: {"digest": push(registry)}},
        "models": {MODEL: {"revision": "r1", "files": make_manifest(source)}},
    }
    engines = {"vllm": {"version": "0.33.0", "image": image}}
    return Inputs(models={}, engines=engines, lock=lock, weight_sources={MODEL: [str(source)]}, models_dir="")


def test_a_bundle_holds_what_the_lock_names(registry, inputs, tmp_path):
    recipe = Recipe(work=tmp_path / "work", insecure_registries=[registry.host])
    bundle = tmp_path / "bundle"
    manifest = make_bundle(bundle, [DEPLOYMENT, {**DEPLOYMENT, "name": "other", "port": 8001}], inputs, recipe)
    assert list(manifest["images"]) == [f"{registry.host}/vllm:1"]
    assert manifest["models"][MODEL]["revision"] == "r1"
    paths = {entry["path"] for entry in manifest["files"]}
    assert {f"weights/{MODEL}/r1/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")} < paths
    assert not any(".metalserve.json" in path or ".incoming" in path for path in paths)
    # Another lock: the old weights go.
    moved = {**inputs.lock, "models": {MODEL: {**inputs.lock["models"][MODEL], "revision": "r2"}}}
    later = make_bundle(bundle, [DEPLOYMENT], replace(inputs, lock=moved), recipe)
    assert not any("/r1/" in entry["path"] for entry in later["files"])


@pytest.mark.parametrize("kind", ["images", "models"])
def test_what_is_not_locked_is_refused(inputs, tmp_path, kind):
    with pytest.raises(Refusal) as caught:
        make_bundle(tmp_path / "b", [DEPLOYMENT], replace(inputs, lock={**inputs.lock, kind: {}}), Recipe(tmp_path))
    assert caught.value.found.startswith("nothing locked for ")


def test_weights_that_cannot_be_had_are_refused(registry, inputs, tmp_path):
    recipe = Recipe(work=tmp_path / "work", insecure_registries=[registry.host])
    with pytest.raises(Refusal) as caught:
        make_bundle(tmp_path / "b", [DEPLOYMENT], replace(inputs, weight_sources={MODEL: ["/nowhere"]}), recipe)
    assert caught.value.found.startswith(f"the weights of {MODEL} cannot be had: ")
    assert "/nowhere" in caught.value.needed


def test_wheels_that_no_index_has_are_refused(registry, inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "requirements.txt").write_text(f"nothing==1.0 --hash=sha256:{'a' * 64}\n")
    requirements = [tmp_path / "requirements.txt"]
    recipe = Recipe(work=tmp_path / "work", insecure_registries=[registry.host], requirements=requirements)
    with pytest.raises(Refusal) as caught:
        make_bundle(tmp_path / "b", [DEPLOYMENT], inputs, recipe)
    assert caught.value.found.startswith(f"pip does not get all of {tmp_path}/requirements.txt (")
