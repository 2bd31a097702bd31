"""Routes for developers: only where nobody but the host reaches them."""

from __future__ import annotations

import pytest

from metalserve.deployments import normalize
from metalserve.errors import Refusal

DEPLOYMENT = {"name": "chat", "engine": "vllm", "model": "qwen3-32b", "port": 8000}
DEV = "VLLM_SERVER_DEV_MODE"
LOADING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


def refusal_of(**fields):
    with pytest.raises(Refusal) as caught:
        normalize([{**DEPLOYMENT, **fields}])
    return caught.value


@pytest.mark.parametrize("address", ["0.0.0.0", "10.0.0.5", "::"])
@pytest.mark.parametrize(("variable", "route"), [(DEV, "/collective_rpc"), (LOADING, "/v1/load_lora_adapter")])
def test_on_an_address_that_others_reach_they_are_refused(address, variable, route):
    refusal = refusal_of(bind_address=address, environment={variable: 1})
    assert refusal.found == f"{variable} in environment of the deployment chat, which listens on {address}"
    assert refusal.needed.startswith(f"bind_address 127.0.0.1: it opens {route}")
    assert refusal.change == f"`bind_address` of chat in serving_deployments, or remove environment.{variable}"


def test_the_address_that_stands_for_none_is_looked_at_too():
    assert "which listens on 0.0.0.0" in refusal_of(environment={DEV: "1"}).found


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_on_the_loopback_they_are_the_hosts_own(address):
    flags = {"enable_sleep_mode": True}
    (item,) = normalize([{**DEPLOYMENT, "bind_address": address, "environment": {DEV: "1"}, "engine_args": flags}])
    assert item["engine_args"] == flags


@pytest.mark.parametrize("value", ["0", "", "false", 0])
def test_a_variable_that_opens_nothing(value):
    (item,) = normalize([{**DEPLOYMENT, "environment": {DEV: value}}])
    assert item["environment"] == {DEV: value}


def test_a_sleep_that_nobody_could_ask_for_is_refused():
    refusal = refusal_of(engine_args={"enable-sleep-mode": True})
    assert refusal.found == "engine_args.enable-sleep-mode of the deployment chat"
    assert "its route exists only with VLLM_SERVER_DEV_MODE=1" in refusal.needed
    assert refusal.change.endswith("stopping the unit frees the GPU as well")
    assert refusal_of(bind_address="127.0.0.1", engine_args={"enable_sleep_mode": True}).found == refusal.found
    assert normalize([{**DEPLOYMENT, "engine_args": {"enable-sleep-mode": False}}])


def test_they_are_of_vllm_alone():
    assert normalize([{**DEPLOYMENT, "engine": "sglang", "environment": {DEV: "1"}}])
