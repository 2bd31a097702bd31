"""An OCI layout as a registry, from a directory, a tar file and a URL; every other place with the reason."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import json
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from metalserve.remote import image_pull
from metalserve.remote.image_layout import LayoutError, layout_places, layout_registry, open_layout
from metalserve.remote.image_pull import ImageError, Places, ensure_image


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


LAYER = bytes(range(256)) * 64
CONFIG = b'{"architecture": "amd64"}'
MANIFEST = json.dumps(
    {
        "schemaVersion": 2,
        "config": {"digest": digest_of(CONFIG), "size": len(CONFIG)},
        "layers": [{"digest": digest_of(LAYER), "size": len(LAYER)}],
    }
).encode()
DIGEST = digest_of(MANIFEST)
REFERENCE = "registry.example.com/a/engine:1.0"


@pytest.fixture
def layout(tmp_path):
    blobs = tmp_path / "layout" / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    for data in (LAYER, CONFIG, MANIFEST):
        (blobs / digest_of(data).partition(":")[2]).write_bytes(data)
    (tmp_path / "layout" / "index.json").write_text("{}")
    return tmp_path / "layout"


@pytest.fixture(params=["directory", "tar", "url"])
def place(request, layout, tmp_path):
    if request.param == "directory":
        yield str(layout)
    elif request.param == "tar":
        with tarfile.open(tmp_path / "engine.tar", "w") as archive:
            archive.add(layout, arcname=".")
        yield str(tmp_path / "engine.tar")
    else:
        handler = partial(SimpleHTTPRequestHandler, directory=str(layout))
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        server.server_close()


def ask(address, path, method="GET", **headers):
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer, data


def test_docker_gets_what_it_asks_for(place):
    with layout_registry(open_layout(place, DIGEST), 0) as address:
        assert ask(address, "/v2/")[0].status == 200
        answer, data = ask(address, f"/v2/a/engine/manifests/{DIGEST}")
        assert (answer.status, data) == (200, MANIFEST)
        assert answer.headers["Content-Type"] == "application/vnd.oci.image.manifest.v1+json"
        assert answer.headers["Docker-Content-Digest"] == DIGEST
        answer, data = ask(address, f"/v2/a/engine/blobs/{digest_of(LAYER)}")
        assert (answer.status, data) == (200, LAYER)
        answer, data = ask(address, f"/v2/a/engine/blobs/{digest_of(LAYER)}", "HEAD")
        assert (answer.headers["Content-Length"], data) == (str(len(LAYER)), b"")


@pytest.mark.parametrize(
    "path", ["manifests/1.0", f"manifests/{digest_of(b'other')}", "blobs/sha256:none", "tags/list"]
)
def test_what_is_not_there_is_not_found(layout, path):
    with layout_registry(open_layout(str(layout), DIGEST), 0) as address:
        assert ask(address, f"/v2/a/engine/{path}")[0].status == 404


def test_a_blob_goes_on_where_it_ended(layout):
    with layout_registry(open_layout(str(layout), DIGEST), 0) as address:
        answer, data = ask(address, f"/v2/a/engine/blobs/{digest_of(LAYER)}", Range="bytes=1000-")
        assert (answer.status, data) == (206, LAYER[1000:])


def test_the_media_type_that_a_manifest_names_is_told(layout):
    index = json.dumps({"mediaType": "application/vnd.docker.distribution.manifest.list.v2+json"}).encode()
    (layout / "blobs/sha256" / digest_of(index).partition(":")[2]).write_bytes(index)
    with layout_registry(open_layout(str(layout), digest_of(index)), 0) as address:
        answer, _ = ask(address, f"/v2/a/engine/manifests/{digest_of(index)}")
    assert answer.headers["Content-Type"] == "application/vnd.docker.distribution.manifest.list.v2+json"


def test_a_layout_without_the_image_is_named(layout):
    found, reasons = layout_places([str(layout), "/nowhere"], digest_of(b"other"))
    assert found == []
    assert reasons[0].startswith(f"{layout} has no blobs/sha256/")
    assert reasons[1].startswith("/nowhere is no tar file")


def test_an_archive_of_an_old_docker_is_named(tmp_path):
    with tarfile.open(tmp_path / "old.tar", "w") as archive:
        (tmp_path / "manifest.json").write_text("[]")
        archive.add(tmp_path / "manifest.json", arcname="manifest.json")
    with pytest.raises(LayoutError, match=r"is no OCI layout: no index\.json is in it\. What Docker before 25 saves"):
        open_layout(str(tmp_path / "old.tar"), DIGEST)


def test_a_compressed_archive_is_named(tmp_path):
    (tmp_path / "engine.tar.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(LayoutError, match="is no tar file that can be read from any point on"):
        open_layout(str(tmp_path / "engine.tar.gz"), DIGEST)


# ---- the order of places ----


@pytest.fixture
def pulls(monkeypatch):
    """What docker is asked to pull; those in `good` are given."""
    asked, good = [], set()

    def complaint(argv):
        asked.append(argv[-1])
        return "" if argv[-1] in good else "not found"

    monkeypatch.setattr(image_pull, "_complaint", complaint)
    return asked, good


def nothing_here(argv):
    return ""


def test_layouts_come_first_then_mirrors_then_the_registry(layout, pulls):
    asked, good = pulls
    own = f"registry.example.com/a/engine@{DIGEST}"
    good.add(own)
    places = Places([str(layout)], {"registry.example.com": ["mirror:5000", "other"]}, port=0)
    assert ensure_image(REFERENCE, DIGEST, places, nothing_here) == (own, "registry.example.com/a/engine")
    assert asked[0].startswith("127.0.0.1:")
    assert asked[0].endswith(f"/a/engine@{DIGEST}")
    assert asked[1:] == [f"mirror:5000/a/engine@{DIGEST}", f"other/a/engine@{DIGEST}", own]


def test_an_image_that_is_here_is_not_asked_for(pulls):
    line = json.dumps({"Repository": "mirror/a/engine", "Tag": "<none>", "Digest": DIGEST, "CreatedAt": ""})
    assert ensure_image(REFERENCE, DIGEST, Places(), lambda argv: line) == (f"mirror/a/engine@{DIGEST}", "")
    assert pulls[0] == []


def test_a_refusal_names_each_place_and_its_answer(layout, pulls):
    with pytest.raises(ImageError) as refusal:
        ensure_image(REFERENCE, DIGEST, Places(["/nowhere"], {"registry.example.com": "mirror"}), nothing_here)
    text = str(refusal.value)
    assert text.startswith(f"{REFERENCE} could not be pulled by its digest {DIGEST}: /nowhere is no tar file")
    assert "mirror/a/engine: not found; registry.example.com/a/engine: not found. Needed: one place" in text
    assert "engine_image_layouts" in text


def test_without_registries_only_layouts_are_asked(layout, pulls):
    with pytest.raises(ImageError, match="no place is named"):
        ensure_image(REFERENCE, DIGEST, Places(registry=False), nothing_here)
    assert pulls[0] == []


def test_a_port_that_is_taken_is_said(layout, pulls):
    with layout_registry(open_layout(str(layout), DIGEST), 0) as address:
        port = int(address.rpartition(":")[2])
        places = Places([str(layout)], registry=False, port=port)
        with pytest.raises(ImageError) as refusal:
            ensure_image(REFERENCE, DIGEST, places, nothing_here)
    assert f"port {port} of the loopback is taken" in str(refusal.value)
