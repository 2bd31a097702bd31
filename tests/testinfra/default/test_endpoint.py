"""The endpoint, its unit, its container and its files, as a user would check them."""

import json
import re

import pytest

from metalserve.remote import gate_questions as questions

UNIT = "vllm@tiny.service"


def ask(endpoint, prompt, **more):
    body = {
        "model": "lab-moe-tiny",
        "temperature": 0,
        "max_tokens": 200,
        "messages": [{"role": "user", "content": prompt}],
        **more,
    }
    status, text = endpoint("/v1/chat/completions", body)
    assert status == 200, text
    return json.loads(text)["choices"][0]["message"]


def test_unit_is_enabled_and_running(host, endpoint):
    unit = host.service(UNIT)
    assert unit.is_enabled
    assert unit.is_running


def test_docker_is_new_enough_and_configured(host):
    information = json.loads(host.check_output("docker info --format '{{json .}}'"))
    assert tuple(int(part) for part in information["ServerVersion"].split(".")[:2]) >= (26, 0)
    assert information["LiveRestoreEnabled"]
    configuration = json.loads(host.file("/etc/docker/daemon.json").content_string)
    assert configuration["features"]["cdi"] is True


def test_settings_of_others_survive_in_daemon_json(host, pytestconfig):
    if "molecule" not in str(pytestconfig.getoption("ansible_inventory")):
        pytest.skip("only the Molecule scenario leaves a foreign setting before the first run")
    configuration = json.loads(host.file("/etc/docker/daemon.json").content_string)
    assert configuration["max-concurrent-downloads"] == 4
    assert (configuration["log-driver"], configuration["log-opts"]) == ("journald", {"tag": "lab"})


def test_container_runs_the_pinned_digest(host, endpoint, release, variables):
    (locked,) = variables["serving_lock"]["images"].values()
    container = json.loads(host.check_output("docker inspect metalserve-tiny"))[0]
    assert container["Config"]["Image"].endswith("@" + locked["digest"])
    assert container["Config"]["Image"] == release["image"]
    assert container["Config"]["Labels"]["metalserve.release"] == release["id"]
    image = json.loads(host.check_output("docker image inspect %s", container["Image"]))[0]
    assert any(name.endswith(locked["digest"]) for name in image["RepoDigests"])


def test_no_tag_of_the_engine_exists_on_the_host(host):
    assert host.check_output("docker images --format '{{.Tag}}'").split() == ["<none>"]


def test_weights_are_published_whole_and_as_locked(host, variables):
    locked = variables["serving_lock"]["models"]["lab-moe-tiny"]
    folder = f"/var/lib/metalserve/models/lab-moe-tiny/{locked['revision']}"
    for entry in locked["files"]:
        assert host.file(f"{folder}/{entry['path']}").sha256sum == entry["sha256"]
    assert host.check_output("ls /var/lib/metalserve/models/lab-moe-tiny") == locked["revision"]


def test_model_list_holds_the_served_name(endpoint):
    status, text = endpoint("/v1/models")
    assert status == 200
    assert [model["id"] for model in json.loads(text)["data"]] == ["lab-moe-tiny"]


def test_chat_answers_rightly(endpoint):
    assert ask(endpoint, questions.ARITHMETIC_PROMPT)["content"].strip() == questions.ARITHMETIC_ANSWER


def test_chat_answers_in_chinese(endpoint):
    assert re.search("[一-鿿]", ask(endpoint, questions.GREETING_PROMPT)["content"])


def test_tool_call_is_parsed(endpoint):
    message = ask(endpoint, questions.WEATHER_PROMPT, tools=[questions.WEATHER_TOOL], tool_choice="auto")
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": questions.WEATHER_CITY}


def test_the_gate_has_passed_and_says_so_beside_the_release(host, release):
    result = json.loads(host.file("/etc/metalserve/tiny/current/gate.json").content_string)
    assert result["passed"] is True
    assert result["release"] == release["id"]
    assert {row["name"] for row in result["rows"]} >= {"models", "chat", "stream", "tool_auto", "burst"}


def test_the_engine_reports_the_capacity_that_was_planned(endpoint, release):
    status, text = endpoint("/metrics")
    assert status == 200
    (line,) = re.findall(r"^vllm:cache_config_info\{(.*)\} ", text, re.MULTILINE)
    reported = dict(re.findall(r'(\w+)="([^"]*)"', line))
    plan = release["plan"]
    assert int(reported["num_gpu_blocks"]) == plan["num_blocks"]
    assert int(reported["block_size"]) == plan["block_size_tokens"]
    assert int(reported["kv_cache_size_tokens"]) == plan["kv_cache_tokens"]
    assert float(reported["kv_cache_max_concurrency"]) == pytest.approx(plan["max_concurrency"], abs=0.005)


def test_capacity_and_plan_are_kept_beside_the_release(host):
    kept = json.loads(host.file("/etc/metalserve/tiny/current/capacity.json").content_string)
    assert kept["difference_percent"] == 0.0
    assert kept["values"]["kv_cache_tokens"]["reported"] == kept["values"]["kv_cache_tokens"]["planned"]


def test_a_broken_unit_would_have_been_refused(host):
    """The guard that the role uses before it installs a unit, fed with a unit whose command is missing."""
    broken = "sed s#/usr/bin/docker#/usr/bin/no-such-docker# /etc/systemd/system/vllm@.service > /tmp/broken.service"
    assert host.run(broken).rc == 0
    verify = "systemd-analyze --man=no verify %s:vllm@check.service"
    assert host.run(verify, "/tmp/broken.service").rc != 0
    assert host.run(verify, "/etc/systemd/system/vllm@.service").rc == 0
