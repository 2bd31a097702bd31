"""The filters as a playbook calls them: through Ansible's own templating, with values that Ansible has tagged."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from metalserve import catalogue, deployments, driver, gateway, planner, surveys
from metalserve.monitoring import rules, settings, targets
from metalserve.verdict import host as verdict_host

ROOT = Path(__file__).resolve().parents[2]
MODEL = "qwen3.6-35b-a3b-fp8"
# A model of the inventory: the catalogue's own under another name.
OWN = {"own-model": {"format": "fp8", "context_length": 4096, "shape": catalogue.model(MODEL).as_dict()["shape"]}}
HOST = catalogue.host_from_shape("8xH800")
QWEN = {"name": "qwen", "engine": "vllm", "model": MODEL, "port": 8000}
INPUTS = deployments.Inputs(
    models={},
    engines={},
    lock={
        "images": {"vllm/vllm-openai:v0.33.0": {"digest": "sha256:" + "d" * 64}},
        "models": {
            MODEL: {"revision": "0123", "files": [{"path": "config.json", "size_bytes": 2, "sha256": "a" * 64}]}
        },
    },
    weight_sources={},
    models_dir="/var/lib/metalserve/models",
)
RELEASES = deployments.serving_releases([QWEN], HOST, INPUTS)
POOLS = gateway.gateway_pools(
    [{"name": "gpu-1", "address": "10.0.0.1", "deployments": [QWEN]}], server_max_requests=64, long_prompts=[]
)
CLIENTS = gateway.gateway_clients([{"name": "chat", "key_sha256": "0" * 64}], POOLS)
VARIABLES = {
    "facts": HOST,
    "small_host": catalogue.host_from_shape("1xL40S"),
    "own_models": OWN,
    "releases": RELEASES,
    "items": [QWEN, {**QWEN, "name": "other", "engine": "sglang"}],
    "lock": INPUTS.lock,
    "pools": POOLS,
    "clients": CLIENTS,
    "look": [{"deployment": "qwen", "started": True, "active": "a", "wanted": "b"}],
    "proven": [{"deployment": "qwen", "endpoint": deployments.gate_endpoints(RELEASES, None)[0]}],
    "mine": {"changing": ["gpu-1:qwen"], "touched": ["gpu-1:qwen"], "known": {"gw-1": ["gpu-1:qwen"]}},
    "sources": {MODEL: ["http://mirror/{key}/{revision}"]},
    "pins": {"vllm": {"version": "0.32.0", "image": "registry:5000/vllm:0.32.0"}},
}
DRAIN_SURVEY = surveys.awx_survey(
    [{"question": "Host?", "variable": "gateway_drain_host"}], "drain", surveys.read_options(ROOT / "roles")
)
ANSWERS = {
    f"'{MODEL}' | tensor_parallel_size(8)": planner.tensor_parallel_size(catalogue.model(MODEL), 8),
    "'own-model' | tensor_parallel_size(2, models=own_models)": planner.tensor_parallel_size(
        catalogue.model("own-model", OWN), 2
    ),
    f"'{MODEL}' | gpu_memory_utilization(facts)": planner.gpu_memory_utilization(
        catalogue.model(MODEL), HOST, None, None
    ),
    f"'{MODEL}' | gpu_memory_utilization(facts, '0.20.2', {{'context_length': 8192}})": (
        planner.gpu_memory_utilization(catalogue.model(MODEL), HOST, "0.20.2", {"context_length": 8192})
    ),
    f"'{MODEL}' | serving_plan(facts)": planner.make_plan(catalogue.model(MODEL), HOST, "vllm", None, {}).as_dict(),
    f"'{MODEL}' | serving_plan(facts, engine='sglang', wishes={{'gpus': [0, 1]}})": planner.make_plan(
        catalogue.model(MODEL), HOST, "sglang", None, {"gpus": [0, 1]}
    ).as_dict(),
    "releases | plan_table": deployments.plan_table(RELEASES),
    "releases | gate_endpoints": deployments.gate_endpoints(RELEASES, None),
    "releases | gate_endpoints('/etc/metalserve')": deployments.gate_endpoints(RELEASES, "/etc/metalserve"),
    "items | lock_requests": {
        "images": ["vllm/vllm-openai:v0.33.0", "lmsysorg/sglang:v0.5.23"],
        "models": [
            {
                "key": MODEL,
                "revision": catalogue.model(MODEL).revision,
                "sources": ["huggingface:Qwen/Qwen3.6-35B-A3B-FP8"],
            }
        ],
    },
    "items[:1] | lock_requests(engines=pins, weight_sources=sources)": {
        "images": ["registry:5000/vllm:0.32.0"],
        "models": [
            {
                "key": MODEL,
                "revision": catalogue.model(MODEL).revision,
                "sources": [f"http://mirror/{MODEL}/{{revision}}"],
            }
        ],
    },
    "facts | driver_action('580.178.04', reboot_allowed=true)": driver.driver_action(
        HOST, "580.178.04", reboot_allowed=True
    ),
    "facts | compatibility_verdict(items[:1], lock=lock, options={'toolkit': {'manage': false}})": (
        verdict_host.compatibility_verdict(HOST, [QWEN], inputs=INPUTS, options={"toolkit": {"manage": False}})
    ),
    "['gpu-1'] | gateway_pools([items[:1]], [''], ['10.0.0.1'], server_max_requests=64)": POOLS,
    "[{'name': 'chat', 'key_sha256': '0' * 64}] | gateway_clients(pools)": CLIENTS,
    "pools | gateway_maps(clients)": gateway.gateway_maps(POOLS, CLIENTS),
    f"[{{'question': 'Host?', 'variable': 'gateway_drain_host'}}] | awx_survey('drain', '{ROOT}/roles')": DRAIN_SURVEY,
    "['gpu-1'] | scrape_targets([items[:1]], [''], ['10.0.0.1'], gpu_exporters=[none], "
    "gateways=[['gate'], ['*:8405'], ['10.0.0.9']], others=[['watch'], ['10.0.0.8']])": targets.scrape_targets(
        [{"name": "gpu-1", "address": "10.0.0.1", "deployments": [QWEN], "gpu_exporter": False}],
        [{"name": "gate", "address": "10.0.0.9", "metrics_bind": "*:8405"}],
        [{"name": "watch", "address": "10.0.0.8"}],
    ),
    "releases | metrics_settings(gpu_count=8)": settings.metrics_settings(RELEASES, gpu_count=8),
    "{'down_for': '9m'} | monitoring_rules": rules.rule_files({"down_for": "9m"}),
    f"'{ROOT}' | package_difference": "",
    "['gw-1'] | engine_clients([''], ['10.0.0.5'], others=['10.0.9.0/24'])": ["10.0.0.5", "10.0.9.0/24"],
    "(['gpu-1'] | rollout_plan([look], {}, [])).batches": [["gpu-1"]],
    "mine | rollout_aftermath(drained=true, idle=false, activated=none, proofs=[], verdicts=[])": {
        "undrain": ["gpu-1:qwen"],
        "back": [],
        "stay": {},
        "reasons": [],
    },
    "(proven | proof_endpoints(['gpu-1:qwen'], {'gw-1': ['gpu-1:qwen']}, '%2Fs') | first).url": (
        "http+unix://%2Fs/gpu-1:qwen"
    ),
    # What comes out are plain types that other filters take.
    "(releases | gate_endpoints | to_json | from_json | first).model": MODEL,
}
REFUSALS = {
    "'zzz' | tensor_parallel_size(8)": (
        "model 'zzz' is not in the catalogue. Needed: one of its keys. "
        "Change: set `model` to a known key, or describe the model in `serving_models`."
    ),
    f"'{MODEL}' | gpu_memory_utilization(small_host, wishes={{'context_length': 300000}})": (
        f"context_length 300000, {MODEL} was trained for 262144 tokens. Needed: at most 262144. "
        "Change: lower `context_length`."
    ),
    f"'{MODEL}' | serving_plan(facts, engine='tgi')": (
        "engine 'tgi'. Needed: vllm or sglang. Change: set `engine` to one of them."
    ),
    f"[{{'question': 'Q?', 'variable': 'nobody_x'}}] | awx_survey('s', '{ROOT}/roles')": (
        "the question about nobody_x: no role takes nobody_x. Needed: max, min, option, question, required, variable, "
        "with an option of meta/argument_specs.yml. Change: awx/data/job_templates.yml."
    ),
    "facts | driver_action('580')": (
        "driver version '580'. Needed: a complete version, such as 580.178.04, so that every host and every package "
        "gets the same. Change: nvidia_driver_version."
    ),
    "facts | compatibility_verdict(options={'drivers': {}})": (
        "the option drivers of a verdict. Needed: one of driver, toolkit, docker, expected, accept, "
        "weights_reserve_bytes. Change: the options of compatibility_verdict."
    ),
    "[{'name': 'chat', 'key_sha256': 'sk-1'}] | gateway_clients([])": (
        "the client chat with key_sha256 'sk-1'. Needed: the SHA-256 of its key, 64 lower-case hexadecimal digits, "
        "never the key itself. Change: `key_sha256` of chat in gateway_clients; `metalserve key chat` makes a key and "
        "its hash."
    ),
    "['gpu-1'] | rollout_plan([[]], {}, [], batches=[0])": (
        "the batch 0 in rollout_batches. Needed: numbers of hosts from 1 on, or percentages such as 10%. "
        "Change: rollout_batches."
    ),
    "[{'name': 'qwen', 'engine': 'vlm', 'model': 'm', 'port': 1}] | lock_requests": (
        "engine 'vlm' of the deployment qwen. Needed: one of vllm, sglang. "
        "Change: `engine` of qwen in serving_deployments."
    ),
}


def ansible(program, *arguments, folder):
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_LOAD_CALLBACK_PLUGINS": "true",
        "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
        "ANSIBLE_LOCAL_TEMP": str(folder / "local"),
    }
    command = [Path(sys.executable).with_name(program), *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert run.stdout.startswith("{"), run.stdout + run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What tasks that print the expressions returned: one for all answers, one for each refusal."""
    folder = tmp_path_factory.mktemp("filters")
    prints = {
        "answers": {expression: f"{{{{ {expression} }}}}" for expression in ANSWERS},
        **{expression: f"{{{{ {expression} }}}}" for expression in REFUSALS},
    }
    tasks = [
        {"name": name, "ansible.builtin.debug": {"msg": message}, "ignore_errors": True}
        for name, message in prints.items()
    ]
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "vars_files": ["vars.yml"]}
    (folder / "vars.yml").write_text(yaml.safe_dump(VARIABLES))
    (folder / "play.yml").write_text(yaml.safe_dump([{**play, "tasks": tasks}]))
    report = ansible("ansible-playbook", "-i", "localhost,", folder / "play.yml", folder=folder)
    return {task["task"]["name"]: task["hosts"]["localhost"] for task in report["plays"][0]["tasks"]}


@pytest.mark.parametrize("expression", ANSWERS)
def test_a_filter_answers_what_the_package_does(results, expression):
    assert results["answers"]["msg"][expression] == json.loads(json.dumps(ANSWERS[expression]))


@pytest.mark.parametrize("expression", REFUSALS)
def test_a_refusal_reaches_the_user_as_its_sentence(results, expression):
    result = results[expression]
    assert result["failed"] is True
    filter_name = expression.split(" | ")[1].split("(")[0]
    assert result["msg"].endswith(f"The filter plugin '{filter_name}' failed: {REFUSALS[expression]}")


def filter_names() -> set[str]:
    spec = importlib.util.spec_from_file_location("metalserve_filters", ROOT / "filter_plugins/metalserve.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return set(loaded.FilterModule().filters())


def test_each_filter_is_tried_here():
    tried = {name for name in filter_names() for expression in ANSWERS if f"| {name}" in expression}
    assert tried == filter_names()


def test_ansible_doc_shows_each_filter_with_an_example(tmp_path):
    names = sorted(filter_names())
    shown = ansible("ansible-doc", "-t", "filter", "--json", *names, folder=tmp_path)
    assert sorted(shown) == names
    for name in names:
        assert shown[name]["doc"]["short_description"]
        assert name in shown[name]["examples"]
        assert "_value" in shown[name]["return"]
