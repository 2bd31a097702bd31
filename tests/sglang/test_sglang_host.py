"""The endpoint of SGLang, its unit and its files, and the traps that its source is known for."""

import json

from conftest import UNIT

from metalserve.remote import gate_questions as questions

MODEL = "lab-dense-tiny"


def ask(endpoint, prompt, **more):
    body = {"model": MODEL, "temperature": 0, "max_tokens": 200, "messages": [{"role": "user", "content": prompt}]}
    status, text = endpoint("/v1/chat/completions", {**body, **more})
    assert status == 200, text
    return json.loads(text)["choices"][0]["message"]


def test_the_unit_is_enabled_and_running(host, endpoint):
    unit = host.service(UNIT)
    assert unit.is_enabled
    assert unit.is_running


def test_the_file_reaches_sglang(endpoint, release):
    """`--config FILE` in two words is merged, in one word it would be ignored without a sound."""
    status, text = endpoint("/server_info")
    assert status == 200
    told = json.loads(text)
    config = release["config"]
    assert told["version"] == release["engine_version"]
    for flag in ("context-length", "max-running-requests", "chunked-prefill-size", "schedule-policy", "port"):
        assert told[flag.replace("-", "_")] == config[flag], flag
    assert told["served_model_name"] == MODEL


def test_no_key_is_in_the_configuration_or_the_journal(host, endpoint, release):
    """SGLang prints its arguments at start and tells them to everyone who may ask: keys must not be among them."""
    assert not {"api-key", "admin-api-key"} & set(release["config"])
    (line, *_) = host.check_output("journalctl --unit %s --output cat | grep server_args=", UNIT).splitlines()
    assert "'api_key': None" in line
    assert "'admin_api_key': None" in line


def test_chat_and_tool_calls(endpoint):
    assert ask(endpoint, questions.ARITHMETIC_PROMPT)["content"].strip() == questions.ARITHMETIC_ANSWER
    message = ask(endpoint, questions.WEATHER_PROMPT, tools=[questions.WEATHER_TOOL], tool_choice="auto")
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": questions.WEATHER_CITY}


def test_a_wrong_model_name_is_answered(endpoint):
    """What the gate expects of SGLang: should a version begin to check names, the gate's data must follow."""
    assert ask(endpoint, questions.ARITHMETIC_PROMPT, model="no-such-model")["content"]


def test_the_gate_has_passed_and_says_so_beside_the_release(host, release):
    result = json.loads(host.file("/etc/metalserve/dense/current/gate.json").content_string)
    assert result["passed"] is True
    assert result["release"] == release["id"]
    (row,) = (row for row in result["rows"] if row["name"] == "unknown_model")
    assert "sglang answers to any model name" in row["detail"]


def test_the_engine_reports_the_capacity_that_was_planned(host, release):
    kept = json.loads(host.file("/etc/metalserve/dense/current/capacity.json").content_string)
    assert kept["difference_percent"] == 0.0
    assert kept["values"]["kv_cache_tokens"]["reported"] == release["plan"]["kv_cache_tokens"] == 16384


def test_a_request_that_is_too_long_is_refused_with_the_limit(endpoint):
    status, text = endpoint(
        "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "a" * 5000}]}
    )
    assert status == 400
    assert "4096" in text
