"""The action plugin: proven and given once in a run, and what an inventory needs is looked for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from metalserve.bundle import write_manifest
from metalserve.errors import Refusal

PLUGIN = Path(__file__).resolve().parents[3] / "roles/serving_bundle/action_plugins/serving_bundle.py"
DEPLOYMENT = {"name": "qwen", "engine": "vllm", "model": "qwen3.6-35b-a3b", "port": 8000}


@pytest.fixture(scope="module")
def plugin():
    spec = importlib.util.spec_from_file_location("serving_bundle_action", PLUGIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def start_run(plugin, tmp_path, monkeypatch):
    """Begins a run: a process that the server follows, in the place of ansible-playbook."""
    monkeypatch.setattr(plugin, "_CACHE", tmp_path / "cache")
    processes = []

    def start():
        processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        monkeypatch.setattr(plugin.os, "getppid", lambda: processes[-1].pid)

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def bundle(tmp_path):
    directory = tmp_path / "bundle"
    directory.mkdir()
    (directory / "file").write_text("content")
    write_manifest(directory, {"images": {}, "models": {}, "systems": ["debian-13"]}, None)
    return directory


def give(plugin, bundle, **more):
    return plugin.ActionModule._give(bundle, {"unsigned_allowed": True, "port": 0, **more})


def test_a_bundle_is_proven_and_given_once_in_a_run(plugin, start_run, bundle):
    start_run()
    first = give(plugin, bundle)
    assert first["systems"] == ["debian-13"]
    assert give(plugin, bundle) == first
    # Another run begins anew.
    start_run()
    assert give(plugin, bundle)["port"] != first["port"]


def test_a_damaged_bundle_is_not_given(plugin, start_run, bundle):
    start_run()
    (bundle / "file").write_text("Content")
    with pytest.raises(Refusal, match="changed: file"):
        give(plugin, bundle)


def test_a_full_hash_believes_nothing(plugin, start_run, bundle, monkeypatch):
    start_run()
    give(plugin, bundle, serve=False)
    hashed = []
    real = sys.modules["metalserve.bundle"].hash_files
    monkeypatch.setattr(
        "metalserve.bundle.hash_files", lambda paths: real(hashed.append(path) or path for path in paths)
    )
    start_run()
    assert give(plugin, bundle, serve=False)["port"] == 0
    assert hashed == []
    start_run()
    give(plugin, bundle, serve=False, full_hash=True)
    assert [path.name for path in hashed] == ["file"]


def test_a_bundle_without_what_is_locked_is_refused(plugin, bundle):
    lock = {"images": {"vllm/vllm-openai:v0.33.0": {"digest": "sha256:" + "0" * 64}}}
    given = {"deployments": [DEPLOYMENT], "engines": {"vllm": {"version": "0.33.0"}}, "lock": lock}
    with pytest.raises(Refusal, match=r"without vllm/vllm-openai:v0\.33\.0 at sha256:0000"):
        plugin.ActionModule._require(bundle, given)


def test_a_model_that_no_hub_has_is_looked_for_as_well(plugin, bundle):
    lock = {"models": {"our-own": {"revision": "r1", "files": [{"path": "a", "size_bytes": 1, "sha256": "a" * 64}]}}}
    given = {"deployments": [{**DEPLOYMENT, "model": "our-own"}], "lock": lock}
    with pytest.raises(Refusal, match="without our-own at revision r1"):
        plugin.ActionModule._require(bundle, given)


def test_wrong_deployments_are_left_to_the_verdict(plugin, bundle):
    plugin.ActionModule._require(bundle, {"deployments": [{"name": "qwen"}]})
