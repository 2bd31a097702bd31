"""The role on this machine: plugin, module and trial are the real ones; engines, gate and benchmark are played."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from metalserve import catalogue
from metalserve.deployments import Inputs, serving_releases
from metalserve.remote.releases import activate_release, link_target, mark_good, stage_release

ROOT = Path(__file__).resolve().parents[3]
MODEL = "qwen3.6-35b-a3b-fp8"
QWEN = {"name": "qwen", "engine": "vllm", "model": MODEL, "port": 8000}
LOCK = {
    "images": {"vllm/vllm-openai:v0.33.0": {"digest": "sha256:" + "d" * 64}},
    "models": {MODEL: {"revision": "0123abcd", "files": [{"path": "x", "size_bytes": 2, "sha256": "a" * 64}]}},
}
FACTS = catalogue.host_from_shape("1xH800")
SPACE = {"max_batched_tokens": [8192, 16384], "eager": [True]}
MODELS_DIR = "/var/lib/metalserve/models"
# Appended to the modules of the same name, in a copy of the role.
PLAYED = {
    "rollout_host.py": '''

class LocalHost:
    """Starts are notes in a file."""

    def __init__(self, **settings):
        self._root = Path(__import__("os").environ["PLAYED_ROOT"])

    def running_release(self, deployment):
        return (self._root / "running").read_text() if (self._root / "running").exists() else None

    def unit_state(self, unit):
        return "running"

    def other_units(self, deployment, engine):
        return []

    def start(self, unit):
        current = self._root / "qwen" / "current"
        (self._root / "running").write_text(current.resolve().name)
        with (self._root / "starts").open("a") as stream:
            stream.write(current.resolve().name + "\\n")

    def prove(self, deployment, release_id, directory, endpoint):
        eager = json.loads((directory / "release.json").read_text())["plan"]["enforce_eager"]
        return Proof(not eager, "gate", "eager is refused here", "")
''',
    "benchmark.py": '''

def benchmark(root, deployment, settings):
    """More tokens a step give more tokens a second."""
    record = read_json_object(root / deployment / "current" / "release.json")
    if (root / "gone").exists():
        raise OSError("the disk is gone")
    runs = [dict.fromkeys(MEASURES, float(record["plan"]["max_num_batched_tokens"] + number)) for number in range(3)]
    workload = {"asked": {"prompts": settings.prompts or 64}, "runs": runs, "summary": summary(runs)}
    return Path("x.json"), {"workloads": {settings.workloads[0]: workload}}


def check_unused(deployment, endpoint, *, force):
    return 0.0
''',
}
OPEN = """
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule(argument_spec={"state": {}, "absent_ok": {}}, supports_check_mode=True)
module.exit_json(servers=[
    {"name": "localhost:qwen", "pool": "chat", "drained_by": None},
    {"name": "localhost:other", "pool": "other", "drained_by": None},
])
"""


def releases(**changes):
    inputs = Inputs(models={}, engines={}, lock=LOCK, weight_sources={}, models_dir=MODELS_DIR)
    (release,) = serving_releases([{**QWEN, **changes}], FACTS, inputs)
    return release


@pytest.fixture(scope="module")
def roles(tmp_path_factory):
    """The role, with what it links to, and what is played in it."""
    folder = tmp_path_factory.mktemp("roles")
    shutil.copytree(ROOT / "roles/tune", folder / "tune", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in PLAYED.items():
        with (folder / "tune/module_utils/metalserve_remote" / name).open("a", encoding="utf-8") as stream:
            stream.write(text)
    (folder / "tune/library/gateway_servers.py").write_text(OPEN, encoding="utf-8")
    return folder


@pytest.fixture
def root(tmp_path):
    """A host that serves the deployment."""
    release = releases()
    stage_release(tmp_path, "qwen", release["release_id"], release["files"], dry_run=False)
    activate_release(tmp_path, "qwen", release["release_id"], dry_run=False)
    mark_good(tmp_path, "qwen", release["release_id"])
    (tmp_path / "running").write_text(release["release_id"], encoding="utf-8")
    return tmp_path


@pytest.fixture
def tune(roles, root):
    """Run the role; its exit status, and what it said with single blanks."""

    def run(*options, **variables):
        given = {
            "ansible_python_interpreter": sys.executable,
            "tune_deployment": "qwen",
            "tune_hosts": ["localhost"],
            "tune_root": str(root),
            "tune_results_dir": str(root / "results"),
            "tune_space": SPACE,
            "tune_inputs": {"deployments": [QWEN], "lock": LOCK, "models_dir": MODELS_DIR, "relearn": False},
            **variables,
        }
        task = {"name": "Tune", "ansible.builtin.include_role": {"name": "tune"}}
        facts = {"name": "Give facts", "ansible.builtin.set_fact": {"gpu_host": FACTS, "cacheable": True}}
        play = {"name": "T", "hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": [facts, task]}
        (root / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
        (root / "variables.json").write_text(json.dumps(given), encoding="utf-8")
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_ROLES_PATH": str(roles),
            "ANSIBLE_LOCAL_TEMP": str(root / "local"),
            "ANSIBLE_NOCOLOR": "true",
            "PLAYED_ROOT": str(root),
        }
        argv = [str(Path(sys.executable).with_name("ansible-playbook")), str(root / "play.yml"), "-i", "localhost,"]
        done = subprocess.run(
            [*argv, "-e", f"@{root / 'variables.json'}", *options],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, " ".join((done.stdout + done.stderr).replace("''", "'").split())

    return run


def starts(root):
    path = root / "starts"
    return path.read_text(encoding="utf-8").split() if path.exists() else []


def test_candidates_are_tried_and_the_host_gets_its_release_back(tune, root):
    before = releases()["release_id"]
    rc, text = tune(tune_runs="3", tune_candidates="5", tune_space=json.dumps(SPACE))
    assert rc == 0, text
    assert releases(max_batched_tokens=16384)["release_id"] in starts(root)
    assert starts(root)[-1] == before
    assert [link_target(root, "qwen", name) for name in ("current", "good", "previous")] == [before, before, None]
    assert [path.name for path in (root / "qwen/releases").iterdir()] == [before]
    assert "localhost: max_batched_tokens 16384: median_ttft_ms" in text
    assert "failed: gate: eager is refused here" in text
    assert "max_batched_tokens: 16384" in text
    (document,) = (root / "results").glob("*.json")
    tuned = json.loads(document.read_text(encoding="utf-8"))
    assert tuned["release"] == before
    assert yaml.safe_load(tuned["snippet"]) == [{**QWEN, "max_batched_tokens": 16384}]
    assert tuned["present_again"]["summary"] == tuned["candidates"][0]["result"]["summary"]


def test_a_run_that_was_killed_is_mended_first(tune, root):
    before, candidate = releases(), releases(max_batched_tokens=16384)
    stage_release(root, "qwen", candidate["release_id"], candidate["files"], dry_run=False)
    activate_release(root, "qwen", candidate["release_id"], dry_run=False)
    (root / "running").write_text(candidate["release_id"], encoding="utf-8")
    note = {"former": before["release_id"], "trial": candidate["release_id"], "made": [candidate["release_id"]]}
    (root / "qwen/trial.json").write_text(json.dumps(note), encoding="utf-8")
    rc, text = tune(tune_candidates=1)
    assert rc == 0, text
    assert f"a trial was killed while {candidate['release_id']} was current; {before['release_id']} is back" in text
    assert starts(root)[0] == before["release_id"]


def test_a_host_that_fails_meanwhile_is_said_and_comes_back(tune, root):
    (root / "gone").touch()
    rc, text = tune()
    assert rc != 0
    assert "the disk is gone" in text
    assert link_target(root, "qwen", "current") == releases()["release_id"]
    assert not (root / "qwen/trial.json").exists()


def test_a_check_run_tells_what_would_be_tried_and_starts_nothing(tune, root):
    rc, text = tune("--check")
    assert rc == 0, text
    assert f"max_batched_tokens 16384: {releases(max_batched_tokens=16384)['release_id']}" in text
    assert starts(root) == []
    assert not (root / "results").exists()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"tune_deployment": ""}, "No deployment was named. Needed: one of this host"),
        ({"tune_hosts": ["a", "b"]}, "2 hosts would be tuned: a, b. Needed: one"),
        (
            {"tune_gateways": ["localhost"]},
            "localhost:qwen takes traffic of chat, which every candidate would break off. Needed: a host that is "
            "drained. Change: playbooks/ops/drain.yml -e gateway_drain_host=localhost",
        ),
    ],
)
def test_what_is_refused_changes_nothing(tune, root, variables, said):
    rc, text = tune(**variables)
    assert rc != 0
    assert said in text
    assert starts(root) == []


def test_a_host_that_takes_traffic_is_tuned_when_it_is_said(tune):
    rc, text = tune(tune_gateways=["localhost"], tune_force="true", tune_candidates=1)
    assert rc == 0, text
