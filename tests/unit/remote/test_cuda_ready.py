"""Waiting for CUDA: what passes by itself is waited for, what does not ends the wait."""

from __future__ import annotations

import ctypes.util

import pytest

from metalserve.remote.cuda_ready import call_cuda, wait_for_cuda


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds


def wait(answers, devices=2, timeout=10):
    clock, left = Clock(), list(answers)

    def attempt(_limit):
        return left.pop(0) if len(left) > 1 else left[0]

    outcome = wait_for_cuda(devices, timeout, attempt=attempt, sleep=clock.sleep, clock=clock)
    return outcome, len(left)


def test_a_ready_host_is_not_waited_for():
    outcome, _left = wait([(0, 2, "")])
    assert (outcome.ready, outcome.seconds, outcome.devices) == (True, 0.0, 2)


@pytest.mark.parametrize("early", [(802, 0, "CUDA error 802"), (100, 0, "CUDA error 100"), (0, 1, "")])
def test_a_fabric_that_comes_up_is_waited_for(early):
    outcome, _left = wait([early, early, (0, 2, "")])
    assert (outcome.ready, outcome.seconds) == (True, 4.0)


@pytest.mark.parametrize(
    ("answer", "text"), [((802, 0, "CUDA error 802: not ready"), "802"), ((0, 1, ""), "CUDA knows 1 of 2 GPUs")]
)
def test_the_wait_has_an_end(answer, text):
    outcome, _left = wait([answer])
    assert (outcome.ready, outcome.seconds) == (False, 10.0)
    assert text in outcome.message


@pytest.mark.parametrize("answer", [(803, 0, "CUDA error 803"), (None, 0, "libcuda.so.1: cannot open"), (3, 0, "x")])
def test_what_does_not_pass_ends_the_wait_at_once(answer):
    outcome, left = wait([answer, (0, 2, "")])
    assert (outcome.ready, outcome.seconds, outcome.message, left) == (False, 0.0, answer[2], 1)


def test_the_real_call_says_that_there_is_no_library():
    if ctypes.util.find_library("cuda"):
        pytest.skip("this machine has a CUDA driver")
    code, devices, message = call_cuda(30)
    assert (code, devices) == (None, 0)
    assert "libcuda.so.1" in message
