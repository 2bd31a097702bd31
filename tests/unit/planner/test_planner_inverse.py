"""The planner asked the other way round."""

import pytest

from metalserve import catalogue
from metalserve.errors import Refusal
from metalserve.planner import make_plan
from metalserve.planner.inverse import at_once, longest_context, most_requests, smallest_gpus

FP8 = "qwen3.6-35b-a3b-fp8"
L40S = catalogue.host_from_shape("1xL40S")


def test_the_longest_context_fits_and_the_next_step_does_not():
    found = longest_context(FP8, L40S, wishes={"context_length": 4096, "max_sequences": 8})
    assert found.max_model_len > 4096
    make_plan(FP8, L40S, wishes={"context_length": found.max_model_len, "max_sequences": 8})
    with pytest.raises(Refusal, match="context_length at most"):
        make_plan(FP8, L40S, wishes={"context_length": found.max_model_len + 1024, "max_sequences": 8})


def test_most_requests_beats_the_plain_plan():
    wishes = {"context_length": 16384}
    plain, best = make_plan(FP8, L40S, wishes=wishes), most_requests(FP8, L40S, wishes=wishes)
    assert at_once(best) >= at_once(plain) > 0
    assert best.max_model_len == 16384


def test_most_requests_that_do_not_fit_are_refused():
    with pytest.raises(Refusal, match="more"):
        most_requests(FP8, L40S)


def test_smallest_sets_are_minimal_and_sorted():
    found = smallest_gpus(FP8, wishes={"context_length": 65536}, gpus=["L40S", "H100", "L4"], requests=4)
    assert [entry.memory_bytes for entry in found] == sorted(entry.memory_bytes for entry in found)
    assert {entry.gpu for entry in found} == {"L40S", "H100-SXM5-80GB", "L4"}
    for entry in found:
        assert at_once(entry.plan) >= 4
        if entry.count > 1:
            host = catalogue.host_from_shape(f"{entry.count // 2}x{entry.gpu}")
            try:
                half = make_plan(FP8, host, wishes={"context_length": 65536})
            except Refusal:
                continue
            assert at_once(half) < 4


def test_no_set_is_large_enough():
    with pytest.raises(Refusal, match=r"with 1 request of 131072 tokens at once fits on no set of up to 8 GPUs"):
        smallest_gpus("kimi-k2-instruct", gpus=["L4"])


def test_too_many_requests_for_every_set():
    with pytest.raises(Refusal, match=r"with 100000 requests .*8xL4 runs \d+ at once"):
        smallest_gpus("qwen3-32b-fp8", wishes={"context_length": 2048}, gpus=["L4"], requests=100000)
