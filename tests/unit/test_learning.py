"""What a start measured reaches the next plan, and nothing restarts for it alone.

The GPU hosts are simulated at the lowest layer: host facts of the catalogue, and an engine that reports as many blocks
as the measured start of vLLM 0.24 on an H200 with the same sizes leaves at the planned share (`h200_predicted.json`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from metalserve import catalogue
from metalserve.deployments import Inputs, plan_table, serving_releases
from metalserve.errors import Refusal
from metalserve.remote.capacity import RECORD_NAME, compare, record
from metalserve.remote.releases import activate_release, mark_good, stage_release
from metalserve.remote.starts import kept_starts

ROOT = Path(__file__).resolve().parents[2]
ROWS = {
    row["name"]: row
    for row in json.loads((ROOT / "tests/unit/planner/fixtures/h200_predicted.json").read_text(encoding="utf-8"))[
        "runs"
    ]
}
ROW = ROWS["qwen3_32b_095"]
MODEL, IMAGE = "qwen3-32b", "vllm/vllm-openai:v0.24.0"
# As that start, but for the context, which is the planner's choice here.
QWEN = {
    "name": "qwen",
    "engine": "vllm",
    "model": MODEL,
    "port": 8000,
    "max_sequences": ROW["max_num_seqs"],
}
FILES = [{"path": "config.json", "size_bytes": 2, "sha256": "a" * 64}]
INPUTS = Inputs(
    models={},
    engines={"vllm": {"version": "0.24.0", "image": IMAGE}},
    lock={
        "images": {IMAGE: {"digest": "sha256:" + "d" * 64}},
        "models": {MODEL: {"revision": "0123abcd", "files": FILES}},
    },
    weight_sources={},
    models_dir="/var/lib/metalserve/models",
)
H200 = catalogue.host_from_shape("1xH200")
# So little memory for this model that the context depends on every gibibyte.
TIGHT = {"memory_share": 0.52}


class Host:
    """A host's releases under a directory, and an engine that reports as a measured start did."""

    def __init__(self, root: Path, facts=H200) -> None:
        self.root, self.facts = root, facts

    def run(self, inputs=INPUTS, facts=None, *, relearn=False, start=True, more_blocks=0, **changes):
        """One run of the playbooks; returns the release and whether anything changed on the host."""
        items = [{**QWEN, **changes}]
        inputs = replace(inputs, kept=kept_starts(self.root, ["qwen"]), relearn=relearn)
        (release,) = serving_releases(items, facts or self.facts, inputs)
        changed = stage_release(self.root, "qwen", release["release_id"], release["files"], dry_run=False)
        changed = activate_release(self.root, "qwen", release["release_id"], dry_run=False) or changed
        gate = self.root / "qwen/releases" / release["release_id"] / "gate.json"
        gate.write_text('{"passed": true}', encoding="utf-8")
        if start and release["plan"]["start"]:
            plan = release["plan"]
            reported = {
                "num_blocks": measured_blocks(plan) + more_blocks,
                "block_size_tokens": plan["block_size_tokens"],
            }
            path = self.root / "qwen/releases" / release["release_id"] / RECORD_NAME
            changed = record(path, compare(plan, reported), dry_run=False) or changed
        return release, changed


def measured_blocks(plan):
    """Blocks that the H200 start would have had at the share of this plan."""
    block = ROW["available_kv_bytes"] // ROW["num_blocks"]
    taken = ROW["requested_bytes"] - ROW["available_kv_bytes"]
    return int((plan["gpu_memory_bytes"] * plan["gpu_memory_utilization"] - taken) // block)


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def test_the_first_run_goes_by_the_estimate(host):
    release, changed = host.run(**TIGHT)
    assert changed
    assert release["plan"]["learned_from"] == release["notes"] == []
    assert measured_blocks(release["plan"]) > release["plan"]["num_blocks"] + 20


@pytest.mark.parametrize("more", [0, -60], ids=["better", "worse"])
def test_the_second_run_changes_nothing_whatever_was_measured(host, more):
    first, _ = host.run(**TIGHT, more_blocks=more)
    for _ in range(3):
        again, changed = host.run(**TIGHT, more_blocks=more)
        assert again["release_id"] == first["release_id"]
        assert not changed


def test_a_better_estimate_alone_is_only_told(host):
    first, _ = host.run(**TIGHT)
    again, _ = host.run(**TIGHT)
    (note,) = again["notes"]
    assert "serving_plan_relearn: true restarts the engine with max_model_len" in note
    assert plan_table([again])[-1] == note
    assert again["files"] == first["files"]


def test_a_release_that_changes_anyway_takes_what_was_measured(host):
    first, _ = host.run(**TIGHT)
    moved, changed = host.run(**TIGHT, port=8001)
    assert changed
    assert moved["plan"]["max_model_len"] > first["plan"]["max_model_len"]
    assert "measured at an earlier start" in moved["plan"]["reasons"]["predicted_bytes"]
    assert (
        moved["notes"]
        == [note for note in moved["notes"] if note.startswith("qwen: measured at an earlier start")]
        != []
    )
    # The engine then holds what the plan says: the share is the same, so the measurement is exact.
    assert abs(measured_blocks(moved["plan"]) - moved["plan"]["num_blocks"]) <= 1


@pytest.mark.parametrize("more", [0, 3, -3, 40, -40])
def test_what_was_learned_stays_when_its_own_start_measures_something_else(host, more):
    host.run(**TIGHT)
    learned, _ = host.run(**TIGHT, port=8001, more_blocks=more)
    for _ in range(3):
        again, changed = host.run(**TIGHT, port=8001, more_blocks=more)
        assert again["release_id"] == learned["release_id"]
        assert not changed


def test_a_run_that_died_before_the_start_goes_on_with_the_same_release(host):
    host.run(**TIGHT)
    learned, _ = host.run(**TIGHT, port=8001, start=False)
    again, changed = host.run(**TIGHT, port=8001, start=False)
    assert (again["release_id"], changed) == (learned["release_id"], False)


def test_what_was_measured_is_taken_at_once_when_asked_for(host):
    first, _ = host.run(**TIGHT)
    learned, changed = host.run(**TIGHT, relearn=True)
    assert changed
    assert learned["release_id"] != first["release_id"]
    for relearn in (True, False, True):
        again, changed = host.run(**TIGHT, relearn=relearn)
        assert (again["release_id"], changed) == (learned["release_id"], False)


def other(inputs=INPUTS, **lock):
    return {"inputs": replace(inputs, lock={**INPUTS.lock, **lock})}


H100_FACTS = catalogue.host_from_shape("1xH100")
RENAMED = {**H200, "gpus": [{**H200["gpus"][0], "name": "NVIDIA H200 NVL"}]}
NEW_DRIVER = {**H200, "driver": {"state": "ok", "loaded": "590.10.01"}}


@pytest.mark.parametrize(
    "change",
    [
        other(images={IMAGE: {"digest": "sha256:" + "e" * 64}}),
        other(models={MODEL: {"revision": "4567abcd", "files": FILES}}),
        {"facts": RENAMED},
        {"facts": NEW_DRIVER},
        {"engine_args": {"enable-flashinfer-autotune": True}},
        {"environment": {"VLLM_USE_DEEP_GEMM": "0"}},
        {"kv_cache_dtype": "fp8"},
        {"max_sequences": 512},
        {"engine_version": "0.32.0", "image": IMAGE},
    ],
    ids=["image", "revision", "gpu", "driver", "engine_args", "environment", "kv dtype", "sequences", "version"],
)
def test_what_was_measured_under_other_conditions_does_not_count(host, tmp_path, change):
    """A larger context than the estimate's must never come from another image, GPU, driver, model or setting."""
    facts = {**H200, "driver": {"state": "ok", "loaded": "580.159.04"}}
    host.facts = facts
    host.run(**TIGHT)
    changed, _ = host.run(**{**TIGHT, **change})
    fresh, _ = Host(tmp_path / "fresh", facts).run(**{**TIGHT, **change})
    sizes = ("max_model_len", "gpu_memory_utilization", "max_num_seqs", "num_blocks")
    if "kv_cache_dtype" in change:
        # KV types differ in the size of a block alone, so the bytes beside the cache still count.
        assert changed["plan"]["learned_from"] != []
        return
    assert [changed["plan"][size] for size in sizes] == [fresh["plan"][size] for size in sizes]


def test_the_previous_release_is_remembered(host):
    host.run(**TIGHT)
    host.run(**{**TIGHT, "max_sequences": 512}, start=False)
    back, _ = host.run(**TIGHT, port=8001)
    assert "measured at an earlier start" in back["plan"]["reasons"]["predicted_bytes"]


def test_a_release_that_runs_stays_even_if_a_measurement_would_refuse_it(host):
    first, _ = host.run(**TIGHT, context_length=12288, more_blocks=-800)
    again, changed = host.run(**TIGHT, context_length=12288, more_blocks=-800)
    assert (again["release_id"], changed) == (first["release_id"], False)
    assert "by what an earlier start measured it would be refused" in again["notes"][0]
    with pytest.raises(Refusal, match="one request of 12288 tokens takes"):
        host.run(**TIGHT, context_length=12288, port=8001)


def test_a_context_that_only_the_measurement_allows_is_served(host):
    first, _ = host.run(**TIGHT)
    wish = first["plan"]["max_model_len"] + 3072
    with pytest.raises(Refusal):
        Host(host.root / "elsewhere").run(**TIGHT, context_length=wish)
    served, _ = host.run(**TIGHT, context_length=wish)
    again, changed = host.run(**TIGHT, context_length=wish)
    assert served["plan"]["max_model_len"] == wish
    assert (again["release_id"], changed) == (served["release_id"], False)


@pytest.mark.parametrize("text", ["", "[]", '{"start": 1}', '{"start": {"schema": 1}}', '{"start": {"schema": 99}}'])
def test_a_record_that_cannot_be_read_says_nothing(host, text):
    first, _ = host.run(**TIGHT, start=False)
    (host.root / "qwen/releases" / first["release_id"] / RECORD_NAME).write_text(text, encoding="utf-8")
    again, changed = host.run(**TIGHT, start=False)
    assert (again["release_id"], changed, again["notes"]) == (first["release_id"], False, [])


def test_an_engine_with_other_blocks_keeps_no_record(host):
    release, _ = host.run(**TIGHT, start=False)
    reported = {"num_blocks": 100, "block_size_tokens": 32}
    assert "start" not in compare(release["plan"], reported)
    assert "start" not in compare(release["plan"], {"num_blocks": 100})
    assert "start" not in compare({**release["plan"], "start": None}, reported)


def test_nothing_is_learned_where_nothing_is_estimated(host):
    fixed, _ = host.run(kv_cache_memory_bytes=20 << 30, context_length=32768)
    assert fixed["plan"]["start"] is None
    again, changed = host.run(kv_cache_memory_bytes=20 << 30, context_length=32768)
    assert (again["release_id"], changed) == (fixed["release_id"], False)


def test_a_cpu_host_runs_twice_without_a_change(tmp_path):
    host = Host(tmp_path, catalogue.host_from_shape("cpu-24GiB"))
    model = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    }
    inputs = replace(
        INPUTS,
        models={
            "small": {"format": "bf16", "context_length": 32768, "shape": model, "repositories": {"huggingface": "a/b"}}
        },
        lock={**INPUTS.lock, "models": {"small": {"revision": "0123abcd", "files": FILES}}},
    )
    wishes = {"model": "small", "max_sequences": 8}
    first, _ = host.run(inputs, **wishes)
    again, changed = host.run(inputs, **wishes)
    assert (again["release_id"], changed, again["plan"]["start"]) == (first["release_id"], False, None)


def test_nothing_is_kept_of_a_host_that_never_served(tmp_path):
    assert kept_starts(tmp_path, ["qwen"]) == {}


def play(tmp_path, **variables):
    """The role with the real ansible-core on this machine; the GPUs are simulated by their facts."""
    facts = {**H200, "driver": {"state": "ok", "loaded": "580.159.04"}}
    tasks = [
        {"ansible.builtin.set_fact": {"gpu_host": facts, "cacheable": True}},
        {"ansible.builtin.include_role": {"name": "serving_plan"}},
        {"ansible.builtin.debug": {"msg": "{{ ansible_facts['serving_plan_releases'] }}"}},
    ]
    given = {
        "ansible_python_interpreter": sys.executable,
        "serving_plan_deployments": [{**QWEN, **TIGHT}],
        "serving_plan_engines": dict(INPUTS.engines),
        "serving_plan_lock": dict(INPUTS.lock),
        "serving_unit_root": str(tmp_path / "kept"),
        **variables,
    }
    book = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "vars": given, "tasks": tasks}]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(book), encoding="utf-8")
    (tmp_path / "ansible.cfg").touch()
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"),
        "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
        "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
        "ANSIBLE_LOCAL_TEMP": str(tmp_path / "local"),
        "ANSIBLE_REMOTE_TEMP": str(tmp_path / "remote"),
        "ANSIBLE_INJECT_FACT_VARS": "false",
    }
    command = [sys.executable, "-m", "ansible", "playbook", "-i", "localhost,", str(tmp_path / "play.yml")]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert answer.stdout, answer.stderr
    last = json.loads(answer.stdout)["plays"][0]["tasks"][-1]["hosts"]["localhost"]
    return last["msg"] if answer.returncode else last["msg"][0]


def test_the_role_reads_what_the_host_keeps(tmp_path):
    first = play(tmp_path)
    root, release_id = tmp_path / "kept", first["release_id"]
    stage_release(root, "qwen", release_id, first["files"], dry_run=False)
    activate_release(root, "qwen", release_id, dry_run=False)
    reported = {
        "num_blocks": measured_blocks(first["plan"]),
        "block_size_tokens": first["plan"]["block_size_tokens"],
    }
    record(
        root / "qwen/releases" / release_id / RECORD_NAME,
        compare(first["plan"], reported),
        dry_run=False,
    )
    again = play(tmp_path)
    assert (again["release_id"], again["files"]) == (release_id, first["files"])
    assert "serving_plan_relearn" in again["notes"][0]
    learned = play(tmp_path, serving_plan_relearn=True)
    assert learned["plan"]["max_model_len"] > first["plan"]["max_model_len"]


def test_the_role_refuses_before_it_looks_at_the_host(tmp_path):
    message = play(tmp_path, serving_plan_deployments=[{**QWEN, "name": "../etc"}])
    assert message.startswith("a deployment called '../etc'")


def test_a_first_start_without_graphs_until_the_gate_has_passed_once(host):
    first, _ = host.run(eager="first_start")
    assert first["plan"]["enforce_eager"] is True
    again, changed = host.run(eager="first_start")
    assert (again["release_id"], changed) == (first["release_id"], False)
    mark_good(host.root, "qwen", first["release_id"])
    graphs, _ = host.run(eager="first_start")
    assert graphs["plan"]["enforce_eager"] is False
    assert graphs["release_id"] == host.run(eager=False)[0]["release_id"]


def test_the_role_asks_the_host_whether_a_release_was_proven(tmp_path):
    wanted = {"serving_plan_deployments": [{**QWEN, **TIGHT, "eager": "first_start"}]}
    first = play(tmp_path, **wanted)
    root, release_id = tmp_path / "kept", first["release_id"]
    stage_release(root, "qwen", release_id, first["files"], dry_run=False)
    activate_release(root, "qwen", release_id, dry_run=False)
    assert play(tmp_path, **wanted)["release_id"] == release_id
    mark_good(root, "qwen", release_id)
    assert play(tmp_path, **wanted)["plan"]["enforce_eager"] is False


@pytest.mark.parametrize("value", ["first", 2, "true"])
def test_another_word_for_eager_is_refused(host, value):
    with pytest.raises(Refusal, match=r"true, false, or first_start"):
        host.run(eager=value)
