"""What Prometheus is told to scrape."""

import json

import pytest

from metalserve.errors import Refusal
from metalserve.monitoring.targets import scrape_targets

QWEN = {"name": "qwen", "engine": "vllm", "model": "qwen3.6-35b-a3b-fp8", "port": 8000}
SMALL = {"name": "small", "engine": "sglang", "model": "qwen3-8b", "port": 8001}
HOSTS = [
    {"name": "gpu-1", "address": "10.0.0.1", "deployments": [QWEN, SMALL], "gpu_exporter": True},
    {"name": "cpu-1", "address": "10.0.0.2", "deployments": [SMALL], "gpu_exporter": False},
]


def told(*arguments, **options):
    files = scrape_targets(*arguments, **options)
    return {name.removesuffix(".json"): json.loads(text) for name, text in files.items()}


def test_each_engine_is_a_target_with_its_labels():
    engines = told(HOSTS)["engines"]
    assert engines[0] == {
        "targets": ["10.0.0.1:8000"],
        "labels": {
            "__metrics_path__": "/metrics",
            "host": "gpu-1",
            "deployment": "qwen",
            "model": "qwen3.6-35b-a3b-fp8",
            "engine": "vllm",
        },
    }
    assert [(item["targets"], item["labels"]["engine"]) for item in engines[1:]] == [
        (["10.0.0.1:8001"], "sglang"),
        (["10.0.0.2:8001"], "sglang"),
    ]


def test_every_machine_has_its_node_exporter_once():
    gateway = {"name": "gpu-1", "address": "10.0.0.1", "metrics_bind": "10.0.0.1:8405"}
    found = told(HOSTS, [gateway], [{"name": "watch", "address": "10.0.0.9"}], node_port=9101)["hosts"]
    assert [(item["labels"]["host"], item["targets"]) for item in found] == [
        ("cpu-1", ["10.0.0.2:9101"]),
        ("gpu-1", ["10.0.0.1:9101"]),
        ("watch", ["10.0.0.9:9101"]),
    ]


def test_gpus_are_asked_where_an_exporter_runs():
    assert told(HOSTS)["gpus"] == [{"targets": ["10.0.0.1:9400"], "labels": {"host": "gpu-1"}}]


@pytest.mark.parametrize(
    ("bind", "target"),
    [("*:8405", "10.0.0.9:8405"), (":8405", "10.0.0.9:8405"), ("10.9.9.9:8405", "10.9.9.9:8405")],
)
def test_a_gateway_is_reached_where_it_tells_its_metrics(bind, target):
    gateway = {"name": "gate", "address": "10.0.0.9", "metrics_bind": bind}
    assert told(HOSTS, [gateway])["gateways"] == [{"targets": [target], "labels": {"gateway": "gate"}}]


def test_a_gateway_that_tells_nobody_is_refused():
    gateway = {"name": "gate", "address": "10.0.0.9", "metrics_bind": "127.0.0.1:8405"}
    with pytest.raises(
        Refusal, match=r"gate tells its metrics at 127\.0\.0\.1:8405 only.*Change: gateway_metrics_bind"
    ):
        scrape_targets(HOSTS, [gateway], [{"name": "watch", "address": "10.0.0.8"}])


def test_a_gateway_that_watches_itself_may_tell_itself_only():
    gateway = {"name": "gate", "address": "10.0.0.9", "metrics_bind": "127.0.0.1:8405"}
    found = told(HOSTS, [gateway], [{"name": "gate", "address": "10.0.0.9"}])
    assert found["gateways"] == [{"targets": ["127.0.0.1:8405"], "labels": {"gateway": "gate"}}]
