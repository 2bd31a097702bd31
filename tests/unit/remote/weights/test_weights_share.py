"""One host gives to another, while it fetches itself: what is answered when, and to whom."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request

import pytest
from weights_server import BIG, MODEL, REVISION, SECOND, manifest, read_files, write_files

from metalserve.remote.weights import ensure_model, locked
from metalserve.remote.weights_download import Transfer
from metalserve.remote.weights_job import announce, state_path, write_json
from metalserve.remote.weights_share import ShareServer, config_path, write_config


def serve(directory, **changes):
    config = {"models_dir": str(directory), "port": 0, "addresses": ["127.0.0.1"], "idle_seconds": 60, **changes}
    write_config(config)
    server = ShareServer(config_path(directory))
    thread = threading.Thread(target=server.serve_until_idle, daemon=True)
    thread.start()
    return server, thread


@pytest.fixture
def upstream(tmp_path):
    """The models directory of the host that gives, and its address."""
    directory = tmp_path / "upstream"
    directory.mkdir()
    server, thread = serve(directory)
    server.url = f"http://127.0.0.1:{server.port}/tiny/{REVISION}"
    yield server
    server.stop()
    thread.join(5)


def get(server, path, **headers):
    request = urllib.request.Request(f"{server.url}/{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return response.status, response.read(), dict(response.headers)
    except urllib.error.HTTPError as error:
        return error.code, b"", dict(error.headers)


def publish(server, source):
    ensure_model(server.models_dir, "tiny", REVISION, manifest(), [source.url], reserve_bytes=0)


def test_a_published_file_is_given_whole_and_from_a_point_on(upstream, source):
    publish(upstream, source)
    assert get(upstream, BIG)[:2] == (200, MODEL[BIG])
    status, data, headers = get(upstream, BIG, Range="bytes=30000-")
    assert (status, data, headers["Content-Range"]) == (206, MODEL[BIG][30000:], "bytes 30000-39999/40000")
    assert get(upstream, BIG, Range="bytes=40000-")[0] == 416
    assert get(upstream, "empty.txt")[:2] == (200, b"")


@pytest.mark.parametrize(
    "path",
    ["nothing.json", ".metalserve.json", "../other/config.json", "%2e%2e/x", "a/../../b", "", "config.json/", "a//b"],
)
def test_what_is_not_of_the_model_is_not_given(upstream, source, path):
    publish(upstream, source)
    (upstream.models_dir / "x").write_text("secret")
    assert get(upstream, path)[0] in (400, 404)


def test_a_file_that_no_manifest_names_is_not_given(upstream, source):
    publish(upstream, source)
    (upstream.models_dir / "tiny" / REVISION / "stray.safetensors").write_bytes(b"x")
    assert get(upstream, "stray.safetensors")[0] == 404


def test_other_addresses_are_refused_and_names_are_looked_up(upstream, source):
    publish(upstream, source)
    base = {"models_dir": str(upstream.models_dir), "port": 0, "idle_seconds": 60}
    write_config({**base, "addresses": ["192.0.2.1", "no-such-name.invalid"]})
    assert get(upstream, BIG)[0] == 403
    write_config({**base, "addresses": ["localhost"]})
    assert get(upstream, BIG)[0] == 200


def test_a_finished_file_of_a_fetch_is_given_and_the_rest_is_promised(upstream):
    incoming = upstream.models_dir / ".incoming" / f"tiny@{REVISION}"
    write_files(incoming, {BIG: MODEL[BIG], f"{SECOND}.part": MODEL[SECOND][:100]})
    write_json(state_path(upstream.models_dir, "tiny", REVISION), {"state": "running", "updated_at": 0})
    with locked(incoming.with_name(incoming.name + ".lock"), 0):
        assert get(upstream, BIG)[:2] == (200, MODEL[BIG])
        status, _, headers = get(upstream, SECOND)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert get(upstream, f"{SECOND}.part")[0] == 503
    # The worker is gone and has been for long: nobody should wait.
    assert get(upstream, SECOND)[0] == 404


@pytest.mark.parametrize(
    ("state", "age_seconds", "status"),
    [
        ("queued", 1, 503),
        ("queued", 1000, 404),
        ("starting", 1, 503),
        ("running", 30, 503),
        ("running", 100, 404),
        ("failed", 0, 404),
        ("stopped", 0, 404),
        ("done", 0, 404),
    ],
)
def test_who_will_have_the_file_says_so(upstream, state, age_seconds, status):
    content = {"state": state, "updated_at": time.time() - age_seconds}
    write_json(state_path(upstream.models_dir, "tiny", REVISION), content)
    assert get(upstream, BIG)[0] == status


def test_a_host_that_has_said_what_it_will_fetch_is_waited_for(upstream, monkeypatch):
    monkeypatch.setattr("metalserve.remote.weights_job.unit_active", lambda unit: False)
    assert get(upstream, BIG)[0] == 404
    announce({"models_dir": str(upstream.models_dir), "key": "tiny", "revision": REVISION})
    assert get(upstream, BIG)[0] == 503


def test_the_server_ends_when_nobody_asks(tmp_path):
    _, thread = serve(tmp_path, idle_seconds=0.4)
    thread.join(10)
    assert not thread.is_alive()


def test_a_host_takes_each_file_as_soon_as_the_one_before_it_has_it(upstream, source, tmp_path):
    """Both fetch at once; the source is asked once for each file."""
    models = tmp_path / "downstream"
    seen = []

    def before(path):
        if path == SECOND:
            # The first file is through the chain before the source gives the second one.
            deadline = time.monotonic() + 20
            while not (models / ".incoming" / f"tiny@{REVISION}" / BIG).exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            seen.append((models / ".incoming" / f"tiny@{REVISION}" / BIG).exists())

    source.faults.before = before
    write_json(state_path(upstream.models_dir, "tiny", REVISION), {"state": "queued", "updated_at": time.time()})

    def first():
        write_json(state_path(upstream.models_dir, "tiny", REVISION), {"state": "running", "updated_at": time.time()})
        publish(upstream, source)

    head = threading.Thread(target=first)
    tail = threading.Thread(
        target=ensure_model,
        args=(models, "tiny", REVISION, manifest(), [upstream.url, source.url]),
        kwargs={"reserve_bytes": 0, "transfer": Transfer(peers=[upstream.url])},
    )
    tail.start()
    head.start()
    head.join(30)
    tail.join(30)
    assert read_files(models / "tiny" / REVISION) == MODEL
    assert seen == [True]
    assert sorted(path for path, _ in source.requests) == sorted(MODEL)


def test_a_large_file_to_a_slow_receiver_comes_whole(upstream, source):
    """The socket has a time-out, and its buffer is full for most of the time."""
    data = bytes(range(256)) * (64 << 10)
    source.files["big.bin"] = data
    files = manifest({"big.bin": data})
    ensure_model(upstream.models_dir, "big", REVISION, files, [source.url], reserve_bytes=0)
    address = f"http://127.0.0.1:{upstream.port}/big/{REVISION}/big.bin"
    received = b""
    with urllib.request.urlopen(address, timeout=5) as response:
        while chunk := response.read(1 << 20):
            received += chunk
            time.sleep(0.01)
    assert received == data


def test_a_host_whose_fetch_failed_is_left_for_the_source(upstream, source, tmp_path):
    write_json(state_path(upstream.models_dir, "tiny", REVISION), {"state": "failed", "updated_at": time.time()})
    models = tmp_path / "downstream"
    how = Transfer(peers=[upstream.url], attempts=1)
    ensure_model(models, "tiny", REVISION, manifest(), [upstream.url, source.url], reserve_bytes=0, transfer=how)
    assert read_files(models / "tiny" / REVISION) == MODEL


def test_wrong_bytes_of_another_host_are_not_believed(upstream, source, tmp_path):
    publish(upstream, source)
    final = upstream.models_dir / "tiny" / REVISION
    (final / BIG).write_bytes(bytes(len(MODEL[BIG])))
    models = tmp_path / "downstream"
    how = Transfer(peers=[upstream.url])
    ensure_model(models, "tiny", REVISION, manifest(), [upstream.url, source.url], reserve_bytes=0, transfer=how)
    assert read_files(models / "tiny" / REVISION) == MODEL
    assert [path for path, _ in source.requests].count(BIG) == 2


def test_a_configuration_that_stays_is_not_written_again(tmp_path):
    config = {"models_dir": str(tmp_path), "port": 1, "addresses": [], "idle_seconds": 1}
    assert write_config(config) is True
    before = config_path(tmp_path).stat().st_mtime_ns
    assert write_config(config) is False
    assert config_path(tmp_path).stat().st_mtime_ns == before
    assert write_config({**config, "port": 2}) is True
    assert json.loads(config_path(tmp_path).read_text())["port"] == 2
