"""From deployments and clients to the gateway's pools and look-up files, and every refusal by its words."""

from __future__ import annotations

import hashlib
import json

import pytest

from metalserve import gateway
from metalserve.cli import main
from metalserve.errors import Refusal


def deployment(name="a", port=8000, **fields):
    return {"name": name, "engine": "vllm", "model": "qwen3-8b", "port": port, **fields}


def pools(*hosts, **options):
    named = [{"name": f"gpu-{n}", "address": f"10.0.0.{n}", "deployments": items} for n, items in enumerate(hosts, 1)]
    return gateway.gateway_pools(named, server_max_requests=64, **options)


def client(name="chat", **fields):
    return {"name": name, "key_sha256": hashlib.sha256(name.encode()).hexdigest(), **fields}


def test_deployments_with_the_same_names_share_a_pool():
    first, second = pools(
        [deployment(served_names=["big", "Org/Big"], max_sequences=8), deployment("b", 8001, served_names=["small"])],
        [deployment(served_names=["big", "Org/Big"])],
    )
    assert (first["name"], first["models"]) == ("Org_Big", ["Org/Big", "big"])
    assert first["servers"] == [
        {"name": "gpu-1:a", "address": "10.0.0.1", "port": 8000, "max_requests": 8},
        {"name": "gpu-2:a", "address": "10.0.0.2", "port": 8000, "max_requests": 64},
    ]
    assert (second["name"], [server["name"] for server in second["servers"]]) == ("small", ["gpu-1:b"])


def test_a_name_that_only_some_engines_serve_is_a_pool_of_its_own():
    found = pools([deployment(served_names=["x", "y"])], [deployment(served_names=["x"])])
    assert {pool["name"]: [server["name"] for server in pool["servers"]] for pool in found} == {
        "x": ["gpu-1:a", "gpu-2:a"],
        "y": ["gpu-1:a"],
    }


def test_adapters_are_asked_by_their_names():
    lora = [{"name": "sql"}, {"name": "Org/de", "key": "de"}]
    found = pools([deployment(lora_adapters=lora)], [deployment(lora_adapters=lora[:1])])
    assert {tuple(pool["models"]): [server["name"] for server in pool["servers"]] for pool in found} == {
        ("qwen3-8b", "sql"): ["gpu-1:a", "gpu-2:a"],
        ("Org/de",): ["gpu-1:a"],
    }


def test_sglang_answers_to_an_adapter_behind_the_models_name_only():
    (found,) = pools([deployment(engine="sglang", served_names=["chat"], lora_adapters=[{"name": "sql"}])])
    assert found["models"] == ["chat", "chat:sql"]


def test_pools_never_share_a_name():
    found = pools([deployment(served_names=["a/b"]), deployment("b", 8001, served_names=["a@b"])])
    assert [pool["name"] for pool in found] == ["a_b", "a_b-2"]


@pytest.mark.parametrize(
    ("fields", "direction"),
    [
        ({}, None),
        ({"priority_order": "lower_first"}, "lower"),
        ({"engine": "sglang", "priority_order": "higher_first"}, "higher"),
        ({"engine": "sglang", "priority_order": "lower_first"}, "lower"),
    ],
)
def test_the_direction_of_priorities_is_the_engines(fields, direction):
    assert [pool["priority"] for pool in pools([deployment(**fields)])] == [direction]


def test_engines_of_both_directions_get_no_priority():
    lower = deployment(engine_args={"scheduling-policy": "priority"})
    higher = deployment(engine="sglang", engine_args={"enable-priority-scheduling": True})
    assert pools([lower], [higher])[0]["priority"] is None


def test_the_health_route_is_one_that_all_engines_of_a_pool_know():
    assert pools([deployment()])[0]["health_route"] == "/health"
    assert pools([deployment(engine="sglang")])[0]["health_route"] == "/ready"
    assert pools([deployment()], [deployment(engine="sglang")])[0]["health_route"] == "/health"


def test_long_prompts_have_a_pool_of_their_own():
    rule = {"model": "qwen3-8b", "bytes": 1000, "deployments": ["long"]}
    found = pools([deployment(), deployment("long", 8001)], long_prompts=[rule])
    assert [(pool["name"], pool["above_bytes"], [s["name"] for s in pool["servers"]]) for pool in found] == [
        ("qwen3-8b", None, ["gpu-1:a"]),
        ("qwen3-8b_long", 1000, ["gpu-1:long"]),
    ]
    maps = gateway.gateway_maps(found, [])
    assert (maps["pools.map"], maps["long_bytes.map"]) == ("qwen3-8b qwen3-8b\n", "qwen3-8b 1000\n")
    assert maps["long_pools.map"] == "qwen3-8b qwen3-8b_long\n"


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"model": "none", "bytes": 1, "deployments": ["a"]}, "one of qwen3-8b"),
        ({"model": "qwen3-8b", "bytes": "1k", "deployments": ["a"]}, "bytes"),
        ({"model": "qwen3-8b", "bytes": 1, "deployments": ["b"]}, r"of a\)"),
        ({"model": "qwen3-8b", "bytes": 1, "deployments": []}, "deployments that serve that model"),
        ({"model": "qwen3-8b", "bytes": 1, "deployments": ["a"]}, "set aside for long prompts"),
    ],
)
def test_a_rule_for_long_prompts_that_cannot_work_is_refused(rule, words):
    with pytest.raises(Refusal, match=words):
        pools([deployment()], long_prompts=[rule])


def test_a_served_name_that_no_file_could_hold_is_refused():
    with pytest.raises(Refusal, match="the served name 'two words'"):
        pools([deployment(served_names=["two words"])])


def test_a_client_may_use_everything_unless_told():
    served = pools([deployment(served_names=["x", "y"])])
    every, one = gateway.gateway_clients([client(), client("batch", models=["y"], concurrency=3)], served)
    assert every["models"] == ["x", "y"]
    assert [model["id"] for model in json.loads(one["model_list"])["data"]] == ["y"]
    maps = gateway.gateway_maps(served, [every, one])
    assert maps["allowed.map"] == "chat|x 1\nchat|y 1\nbatch|y 1\nrollout|x 1\nrollout|y 1\n"
    assert (maps["concurrency.map"], maps["priorities.map"]) == ("chat 0\nbatch 3\n", "")
    assert maps["keys.map"].splitlines()[0] == f"{client()['key_sha256']} chat"


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ([client(colour="red")], "colour: 'red' of the client chat"),
        ([client(concurrency=0)], "concurrency: 0 of the client chat"),
        ([client(requests_per_minute=True)], "requests_per_minute: True"),
        ([client(name="a b")], "a client called 'a b'"),
        ([client(name="rollout")], "a client called rollout"),
        ([{"name": "chat", "key_sha256": "sk-secret"}], "never the key itself"),
        ([client(), client()], "the clients chat and chat have one name"),
        ([client(), {**client("other"), "key_sha256": client()["key_sha256"]}], "chat and other have one key"),
        ([client(models=["none"])], "may use none, which no deployment serves"),
    ],
)
def test_a_client_that_cannot_be_is_refused(clients, words):
    with pytest.raises(Refusal, match=words):
        gateway.gateway_clients(clients, pools([deployment()]))


def test_the_key_command_prints_a_key_and_the_entry_that_lets_it_in(capsys):
    assert main(["key", "chat"]) == 0
    printed = capsys.readouterr()
    key = printed.out.strip()
    assert key.startswith("sk-")
    assert len(key) > 40
    assert f"key_sha256: {hashlib.sha256(key.encode()).hexdigest()}" in printed.err
    assert key not in printed.err


def test_engines_are_reached_from_the_gateways_and_from_whom_else_is_named():
    names = {"gw-1": ["10.0.0.1", "fd00::1"]}
    found = gateway.engine_clients(["gw-1", "10.0.0.2"], ["10.9.0.1/24"], lambda name: names.get(name, []))
    assert found == ["10.0.0.1", "10.0.0.2", "10.9.0.0/24", "fd00::1"]
    assert gateway.engine_clients([], ["10.9.0.0/24"]) == []


@pytest.mark.parametrize(("gateways", "others"), [(["gw-9"], []), (["10.0.0.1"], ["prometheus"])])
def test_who_has_no_address_cannot_be_let_in(gateways, others):
    with pytest.raises(Refusal, match="among those that may reach the engines"):
        gateway.engine_clients(gateways, others, lambda name: [])


def test_the_key_of_a_rollouts_questions_does_not_exist():
    served = pools([deployment(served_names=["x"])])
    maps = gateway.gateway_maps(served, gateway.gateway_clients([client()], served))
    assert "rollout" not in maps["keys.map"]
    assert json.loads(maps["model_lists.map"].splitlines()[-1].removeprefix("rollout "))["data"][0]["id"] == "x"
