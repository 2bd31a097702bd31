"""What a host says of itself that differs from what it is to have."""

from __future__ import annotations

import json

import pytest

from metalserve.remote import host_drift
from metalserve.remote.host_probe import Output
from metalserve.remote.releases import activate_release, stage_release
from metalserve.remote.rollout_host import HostError
from metalserve.remote.weights_manifest import RECORD_NAME

WANTED = {"tiny": {"release_id": "aaaa", "engine": "vllm"}}


class Engines:
    def __init__(self, *, running=None, states=None, others=None):
        self.running, self.states, self.others = running or {}, states or {}, others or {}

    def running_release(self, deployment):
        answer = self.running.get(deployment)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def unit_state(self, unit):
        return self.states.get(unit, "stopped")

    def other_units(self, deployment, engine):
        return self.others.get(deployment, [])


@pytest.fixture
def root(tmp_path):
    for release in ("aaaa", "bbbb"):
        stage_release(tmp_path, "tiny", release, {"release.json": "{}"}, dry_run=False)
    activate_release(tmp_path, "tiny", "aaaa", dry_run=False)
    return tmp_path


def test_the_planned_release_that_runs_is_no_drift(root):
    assert host_drift.release_drift(root, WANTED, Engines(running={"tiny": "aaaa"})) == []


def test_another_release_or_another_container_is_named(root):
    assert host_drift.release_drift(root, WANTED, Engines(running={"tiny": "bbbb"})) == [
        "tiny runs the release bbbb, current is aaaa"
    ]
    assert host_drift.release_drift(root, WANTED, Engines()) == ["tiny runs the release none, current is aaaa"]
    other = {"tiny": {"release_id": "cccc", "engine": "vllm"}, "new": {"release_id": "dddd", "engine": "vllm"}}
    assert host_drift.release_drift(root, other, Engines()) == [
        "tiny is at the release aaaa, planned is cccc",
        "new is at the release none, planned is dddd",
    ]


def test_a_docker_that_does_not_answer_is_told(root):
    engines = Engines(running={"tiny": HostError("Docker does not say")})
    assert host_drift.release_drift(root, WANTED, engines) == ["Docker does not say"]


def test_units_that_do_not_run_or_are_left_over_are_named():
    well = Engines(states={"vllm@tiny.service": "running"})
    assert host_drift.unit_drift(WANTED, well, lambda unit: True) == []
    ill = Engines(others={"tiny": ["sglang@tiny.service"]})
    assert host_drift.unit_drift(WANTED, ill, lambda unit: False) == [
        "vllm@tiny.service is stopped",
        "vllm@tiny.service does not start at boot",
        "sglang@tiny.service runs or starts at boot beside vllm@tiny.service",
    ]


def test_a_deployment_that_nobody_wants_is_a_stray_when_it_runs(root):
    assert host_drift.strays(root, {}, Engines()) == []
    assert host_drift.strays(root, {}, Engines(others={"tiny": ["vllm@tiny.service"]})) == [
        "tiny is not in the inventory, and vllm@tiny.service runs or starts at boot"
    ]


# ---- driver ----


def played(hold="hold"):
    def run(argv, limit):
        if argv[0] == "dpkg-query":
            return Output(0, f"libcuda1\t580.1\t{hold}\tinstalled\n", "")
        return Output(1, "", "")

    return run


def test_a_driver_that_no_run_has_brought_is_told(tmp_path):
    assert host_drift.driver_drift("580.1", root=str(tmp_path), run=played()) == [
        "/etc/metalserve/driver.json is missing: no run of playbooks/prepare.yml has brought the driver here"
    ]


def test_versions_packages_and_holds_are_compared_with_the_inventory(tmp_path):
    noted = {"version": "570.9", "fabric_manager": False, "manager": "apt", "packages": {"libcuda1": "580.1"}}
    (tmp_path / "etc/metalserve").mkdir(parents=True)
    (tmp_path / "etc/metalserve/driver.json").write_text(json.dumps(noted))
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia/version").write_text("580.1\n")
    found = host_drift.driver_drift("580.1", root=str(tmp_path), run=played("install"))
    assert not [line for line in found if "loaded module" in line]
    assert "the userland is missing, not 580.1" in found
    assert "the package libcuda1 is not held" in found
    assert "the package libcuda1 is not held" not in host_drift.driver_drift("580.1", root=str(tmp_path), run=played())


# ---- weights ----


def publish(folder, *, sha="a" * 64, record=True):
    place = folder / "m" / "r1"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    status = (place / "config.json").stat()
    row = {"size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha}
    if record:
        (place / RECORD_NAME).write_text(json.dumps({"schema": 1, "files": {"config.json": row}}))
    return place


MODEL = {"key": "m", "revision": "r1", "files": [{"path": "config.json", "size_bytes": 2, "sha256": "a" * 64}]}


def test_weights_as_they_were_proven_are_no_drift(tmp_path):
    assert host_drift.weights_drift(tmp_path, [MODEL]) == ["m r1 is not on the disk"]
    publish(tmp_path)
    assert host_drift.weights_drift(tmp_path, [MODEL]) == []


def test_weights_without_a_record_or_with_another_hash_are_named(tmp_path):
    publish(tmp_path / "1", record=False)
    assert host_drift.weights_drift(tmp_path / "1", [MODEL]) == ["m r1 has no record of its hashes"]
    publish(tmp_path / "2", sha="b" * 64)
    assert host_drift.weights_drift(tmp_path / "2", [MODEL]) == ["m r1 differs from its manifest in config.json"]


def test_a_file_that_was_touched_since_is_named(tmp_path):
    (publish(tmp_path) / "config.json").write_text("[]")
    assert host_drift.weights_drift(tmp_path, [MODEL]) == ["m r1 differs from its manifest in config.json"]
    many = {**MODEL, "files": [{**MODEL["files"][0], "path": f"{number}"} for number in range(5)]}
    assert host_drift.weights_drift(tmp_path, [many]) == ["m r1 differs from its manifest in 0, 1, 2 and 2 more"]
