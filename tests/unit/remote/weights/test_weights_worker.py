"""The worker as the program that a host runs: packed, started, killed, stopped, watched through its state file."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from weights_model import checkpoint
from weights_server import REVISION, flipped, manifest, read_files

from metalserve.remote import weights_job
from metalserve.remote.weights_job import (
    announce,
    install_worker,
    job_state,
    read_json,
    request_path,
    start_job,
    state_path,
    unit_name,
    write_json,
)
from metalserve.remote.weights_worker import main

ROOT = Path(__file__).resolve().parents[4]
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="session")
def action():
    """The role's action plugin, which packs the worker."""
    path = ROOT / "roles/model_weights/action_plugins/model_weights.py"
    spec = importlib.util.spec_from_file_location("model_weights_action", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def program(action, tmp_path_factory):
    path = tmp_path_factory.mktemp("worker") / "weights.pyz"
    path.write_bytes(base64.b64decode(action.packed_worker()))
    return path


@pytest.fixture
def whole(source):
    source.files.clear()
    source.files.update(checkpoint())
    return source


@pytest.fixture
def request_of(models, whole, tmp_path):
    def make(**changes):
        return {
            "models_dir": str(models),
            "key": "tiny",
            "revision": REVISION,
            "files": manifest(checkpoint()),
            "sources": [whole.url],
            "peers": [],
            "seed": True,
            "format": "bf16",
            "require_chat_template": True,
            "reserve_bytes": 0,
            "full_hash": False,
            "connections": 2,
            "rate_limit_bytes_per_second": 0,
            "attempts": 2,
            "patience_seconds": 10,
            "read_timeout_seconds": 5,
            "tokens_path": str(tmp_path / "tokens.json"),
            **changes,
        }

    return make


@pytest.fixture
def run(program, models):
    """Start the packed worker as a host would, without this checkout in its path; ends what is left."""
    processes = []

    def start(request):
        place = request_path(models, request["key"], request["revision"])
        write_json(place, request)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = subprocess.Popen(
            [sys.executable, "-I", program, "fetch", place],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_the_same_sources_make_the_same_program(action):
    assert action.packed_worker() == action.packed_worker()


def test_a_model_is_fetched_and_the_state_says_so(run, request_of, models, whole, final):
    process = run(request_of())
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert out == f"fetched 6 files, 0.00 GB, for {final}\n"
    assert read_files(final) == checkpoint()
    state = read_json(state_path(models, "tiny", REVISION))
    size = sum(map(len, checkpoint().values()))
    assert state["state"] == "done"
    assert state["changed"] is True
    assert state["total_bytes"] == state["done_bytes"] == state["received_bytes"] == size
    assert state["by_source"] == {whole.url: size}
    assert sorted(state["fetched_files"]) == sorted(checkpoint())


def test_a_refusal_is_in_the_state_and_in_the_journal(run, request_of, models, whole, final):
    whole.files[SHARD] = flipped(whole.files[SHARD])
    process = run(request_of())
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    state = read_json(state_path(models, "tiny", REVISION))
    assert state["state"] == "failed"
    assert f"{SHARD} could not be had with the right content; nothing was published" in state["message"]
    assert state["message"] in err
    assert not final.exists()


def test_a_checkpoint_of_another_format_is_refused(run, request_of, models, final):
    run(request_of(format="fp8")).communicate(timeout=30)
    assert "catalogue entry says fp8" in read_json(state_path(models, "tiny", REVISION))["message"]
    assert not final.exists()


def test_a_killed_worker_leaves_a_state_that_is_told_from_a_running_one(run, request_of, models, whole, final):
    whole.faults.silent_after_bytes[SHARD] = 1000
    process = run(request_of(connections=1))
    part = models / ".incoming" / f"tiny@{REVISION}" / f"{SHARD}.part"
    wait_for(part.exists)
    assert job_state(models, "tiny", REVISION, active=lambda unit: True)["state"] == "running"
    process.kill()
    process.wait(10)
    assert job_state(models, "tiny", REVISION, active=lambda unit: False)["state"] == "died"
    assert not final.exists()
    whole.faults.silent_after_bytes.clear()
    assert run(request_of()).wait(30) == 0
    assert read_files(final) == checkpoint()
    assert job_state(models, "tiny", REVISION, active=lambda unit: False)["state"] == "done"


def test_a_worker_that_is_told_to_stop_says_so(run, request_of, models, whole):
    whole.faults.silent_after_bytes[SHARD] = 1000
    process = run(request_of())
    wait_for(lambda: whole.requested(SHARD))
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    state = read_json(state_path(models, "tiny", REVISION))
    assert state["state"] == "stopped"
    assert state["message"] == "The worker was told to stop. Run again: what is complete is kept."


def test_two_workers_at_once_fetch_once(run, request_of, whole, final):
    first, second = run(request_of()), run(request_of())
    assert [first.wait(30), second.wait(30)] == [0, 0]
    assert read_files(final) == checkpoint()
    assert sorted(path for path, _ in whole.requests) == sorted(checkpoint())


def test_the_state_is_written_while_bytes_come(run, request_of, models, whole):
    data = bytes(400_000)
    whole.files["extra.bin"] = data
    files = manifest(whole.files)
    run(request_of(files=files, rate_limit_bytes_per_second=100_000, connections=4))
    seen = []

    def moving():
        state = read_json(state_path(models, "tiny", REVISION))
        seen.append(state.get("done_bytes", 0))
        return state.get("state") == "running" and state.get("bytes_per_second", 0) > 0

    wait_for(moving)
    state = read_json(state_path(models, "tiny", REVISION))
    assert state["eta_seconds"] is not None


def test_a_host_that_is_no_seed_asks_its_peers_first(run, request_of, whole, other, models):
    other.files.clear()
    other.files.update(checkpoint())
    process = run(request_of(seed=False, peers=[other.url]))
    assert process.wait(30) == 0
    assert whole.requests == []
    assert read_json(state_path(models, "tiny", REVISION))["by_source"] == {
        other.url: sum(map(len, checkpoint().values()))
    }


def test_tokens_come_from_their_file_and_show_nowhere(run, request_of, tmp_path, whole, models):
    (tmp_path / "tokens.json").write_text(json.dumps({"127.0.0.1": "hf_secret"}))
    whole.faults.status[SHARD] = 403
    process = run(request_of())
    out, err = process.communicate(timeout=30)
    text = (
        out
        + err
        + state_path(models, "tiny", REVISION).read_text()
        + request_path(models, "tiny", REVISION).read_text()
    )
    assert "model_weights_tokens for this host" in text
    assert "hf_secret" not in text


# ---- starting and joining; systemd's part is played by functions ----


class Systemd:
    def __init__(self):
        self.units, self.calls = set(), []

    def active(self, unit):
        return unit in self.units

    def launch(self, unit, properties, argv):
        self.calls.append(("launch", unit, list(argv)))
        self.units.add(unit)

    def stop(self, unit):
        self.calls.append(("stop", unit))
        self.units.discard(unit)


@pytest.fixture
def start(tmp_path):
    systemd = Systemd()

    def call(request, worker=b"program"):
        return start_job(
            request,
            worker,
            worker_path=tmp_path / "lib/weights.pyz",
            active=systemd.active,
            launch=systemd.launch,
            stop=systemd.stop,
        )

    call.systemd = systemd
    return call


def test_a_job_is_started_with_its_request(start, request_of, models, tmp_path):
    unit = f"metalserve-weights@tiny:{REVISION}.service"
    assert unit_name("tiny", REVISION) == unit
    assert start(request_of()) == "started"
    place = request_path(models, "tiny", REVISION)
    program = tmp_path / "lib/weights.pyz"
    assert start.systemd.calls == [("launch", unit, ["/usr/bin/python3", str(program), "fetch", str(place)])]
    assert read_json(place) == request_of()
    assert program.read_bytes() == b"program"
    assert read_json(state_path(models, "tiny", REVISION))["state"] == "starting"


def test_a_second_run_joins_the_job(start, request_of):
    start(request_of())
    # Other peers and another pace are the same job: --limit must not start it over.
    assert start(request_of(peers=["http://other"], connections=1)) == "joined"
    assert [call[0] for call in start.systemd.calls] == ["launch"]


def test_another_source_replaces_the_job(start, request_of, models):
    start(request_of())
    assert start(request_of(sources=["http://better"])) == "replaced"
    assert [call[0] for call in start.systemd.calls] == ["launch", "stop", "launch"]
    assert read_json(request_path(models, "tiny", REVISION))["sources"] == ["http://better"]


def test_a_job_is_announced_unless_it_runs(request_of, models, monkeypatch):
    monkeypatch.setattr(weights_job, "unit_active", lambda unit: False)
    announce(request_of())
    assert job_state(models, "tiny", REVISION)["state"] == "queued"
    write_json(state_path(models, "tiny", REVISION), {"state": "running"})
    monkeypatch.setattr(weights_job, "unit_active", lambda unit: True)
    announce(request_of())
    assert job_state(models, "tiny", REVISION)["state"] == "running"


def test_without_a_job_there_is_none(models):
    assert job_state(models, "tiny", REVISION) == {"state": "absent"}


def test_the_program_is_replaced_only_by_another_one(tmp_path):
    path = tmp_path / "lib/weights.pyz"
    assert install_worker(b"one", path) is True
    assert install_worker(b"one", path) is False
    assert install_worker(None, path) is False
    assert install_worker(b"two", path) is True
    assert path.read_bytes() == b"two"


# ---- the full hash of everything ----


def test_everything_that_is_published_is_hashed(run, request_of, models, final, capsys):
    run(request_of()).wait(30)
    assert main(["verify", str(models)]) == 0
    assert capsys.readouterr().out.startswith(f"{final}: proven in ")


def test_damage_that_keeps_size_and_time_is_named(run, request_of, models, final, capsys):
    run(request_of()).wait(30)
    before = (final / SHARD).stat()
    (final / SHARD).write_bytes(flipped(checkpoint()[SHARD]))
    os.utime(final / SHARD, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert main(["verify", str(models)]) == 1
    out = capsys.readouterr().out
    assert f"{final}: damaged or missing: {SHARD}" in out
    assert "model_weights_full_hash=true" in out


def test_a_stranger_is_named_by_the_full_hash(run, request_of, models, final, capsys):
    run(request_of()).wait(30)
    (final / "adapter.safetensors").write_bytes(b"x")
    assert main(["verify", str(models)]) == 1
    assert "does not name: adapter.safetensors" in capsys.readouterr().out
