"""What the facts of a host leave open, and so which hosts are asked more."""

from __future__ import annotations

import pytest

from metalserve.verdict.questions import open_questions

GPU = {"docker": {"running": True}, "gpus": [{}], "kernel_headers": True, "secure_boot": False}


@pytest.mark.parametrize(
    ("facts", "managed", "expected"),
    [
        (None, True, set()),
        (GPU, True, set()),
        ({**GPU, "docker": {"running": False}}, True, {"docker"}),
        ({**GPU, "docker": None}, True, {"docker"}),
        ({**GPU, "kernel_headers": False}, True, {"driver"}),
        ({**GPU, "secure_boot": True}, True, {"driver"}),
        ({**GPU, "secure_boot": None}, True, set()),
        ({**GPU, "kernel_headers": False}, False, set()),
        ({**GPU, "kernel_headers": False, "gpus": []}, True, set()),
        ({"docker": {}, "gpus": [{}]}, True, {"docker", "driver"}),
    ],
)
def test_only_what_the_facts_leave_open_is_asked(facts, managed, expected):
    assert open_questions(facts, driver_managed=managed) == expected
