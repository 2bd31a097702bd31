"""Every engine.yaml that is rendered for SGLang 0.5.23 goes through SGLang's own parser, in SGLang's image.

METALSERVE_REQUIRE_ENGINE=1 pytest tests/differential/test_sglang_parser.py
"""

import json

import pytest
import yaml
from sglang_cases import run_in_image

from metalserve import catalogue
from metalserve.engines.config import engine_config
from metalserve.engines.flags import flags_for
from metalserve.engines.rendering import render_config
from metalserve.errors import Refusal
from metalserve.planner import make_plan

VERSION = "0.5.23"
WORDS = ["--model-path", "/models/x", "--config", "{config}"]
OPTIONS = {
    "schedule_policy": "fcfs",
    "schedule_conservativeness": 0.8,
    "max_queued_requests": 64,
    "disaggregation_mode": "decode",
    "disaggregation_transfer": "nixl",
    "disaggregation_bootstrap_port": 8999,
}
NEUTRAL = {
    "dtype": "bfloat16",
    "structured_output_backend": "guidance",
    "priority_order": "lower_first",
    "kv_offload_gib": 64,
    "log_level": "warning",
}
STATE = {"state_memory_ratio": 2.0, "state_dtype": "bfloat16", "radix_strategy": "no_buffer"}
# What SGLang must refuse, so that this test would notice a parser that takes everything.
REFUSED = {
    "unknown flag": ("awq-ckpt: x", "awq"),
    "vLLM's flag": ("enable-auto-tool-choice: true", "enable-auto-tool-choice"),
    "underscores": ("tp_size: 2", "tp_size"),
    "ambiguous": ("cuda-graph-max-bs: 8", "ambiguous"),
    "choice": ("kv-cache-dtype: fp8", "invalid choice"),
}


TABLE = flags_for("sglang", VERSION)


def fields(text):
    return [TABLE.find(flag).dest for flag in yaml.safe_load(text)]


def rendered():
    """One file for each model of the catalogue that some host can serve, with options in turn."""
    files = {}
    for place, (key, model) in enumerate(catalogue.models().items()):
        deployment = {"name": "d", "engine": "sglang", "model": key, "port": 30000 + place}
        if place % 2:
            deployment |= {"sglang": OPTIONS, **NEUTRAL}
        for host in ("1xH200", "8xH200"):
            try:
                plan = make_plan(key, catalogue.host_from_shape(host), "sglang", VERSION, deployment)
            except Refusal:
                continue
            if plan.state_slots and place % 3 == 0:
                deployment["sglang"] = {**deployment.get("sglang", {}), **STATE}
                plan = make_plan(key, catalogue.host_from_shape(host), "sglang", VERSION, deployment)
            config = engine_config(deployment, {"key": key, **model.as_dict()}, plan.as_dict())
            files[f"{key} on {host}"] = render_config("sglang", config)
    return files


FILES = rendered()


@pytest.fixture(scope="module")
def answers(sglang_image):
    cases = {name: {"file": text, "words": WORDS, "fields": fields(text)} for name, text in FILES.items()}
    cases.update({name: {"file": text, "words": WORDS, "fields": []} for name, (text, _) in REFUSED.items()})
    one_word = ["--model-path", "/models/x", "--config={config}"]
    cases["one word"] = {"file": "port: 31000", "words": one_word, "fields": ["port"]}
    return run_in_image(sglang_image, "sglang_parser.py", {"cases": cases})


def test_every_model_has_a_file():
    assert len({name.split(" on ")[0] for name in FILES}) >= len(catalogue.models()) - 2


@pytest.mark.parametrize("name", FILES)
def test_the_file_is_taken_and_read_as_meant(answers, name):
    answer = answers[name]
    assert answer["status"] == 0, answer
    for flag, value in yaml.safe_load(FILES[name]).items():
        if flag != "model-path":  # the command line wins
            assert answer["arguments"][TABLE.find(flag).dest] == value, flag


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_exist_is_refused(answers, name):
    assert answers[name]["status"] == 2, answers[name]
    assert REFUSED[name][1] in json.dumps(answers[name])


def test_a_file_in_one_word_is_ignored_without_a_sound(answers):
    """Why the start command has `--config` and the file as two words."""
    assert answers["one word"]["arguments"]["port"] == 30000
