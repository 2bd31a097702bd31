"""The planner's KV arithmetic against the engine's own code, in the engine's image, over the whole catalogue.

    METALSERVE_REQUIRE_ENGINE=1 pytest tests/differential

Needs Docker and the lab's engine image (`make lab`, or METALSERVE_ENGINE_IMAGE). With METALSERVE_REQUIRE_ENGINE=1 a
missing image is a failure; without it, the test says that it did not run.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

from metalserve import catalogue
from metalserve.errors import Refusal
from metalserve.planner import kv_capacity, valid_tensor_parallel_sizes
from metalserve.planner.shape import read_shape

GIB = 1 << 30
SCRIPT = Path(__file__).with_name("engine_kv.py")
ENGINE_VERSION = "0.32.0"
# The container needs about 15 s to import the engine, and some milliseconds for each case.
LIMIT_SECONDS = 480

CONFIGS = {key: entry.as_dict()["shape"] for key, entry in catalogue.models().items()}


def cases():
    """Every model x valid tensor parallel size up to 8 x KV type x prefix caching x drafts x lengths and memories."""
    made = []
    for name, config in CONFIGS.items():
        shape = read_shape(config)
        drafts = (0, 2) if shape.draft_layers else (0,)
        declared = shape.quantization and shape.quantization.kv_cache_dtype
        for tp in valid_tensor_parallel_sizes(shape, 8):
            for dtype in ("bfloat16", "fp8") if declared else ("auto", "fp8"):
                for prefix in (True, False):
                    for draft in drafts:
                        for length, memory, batch, stages in (
                            (shape.max_position_tokens, 20 * GIB + 12345, 8192, 1),
                            (8192, 3 * GIB, 2048, 1),
                            (40000, 60 * GIB, 16384, 2),
                        ):
                            made.append(
                                {
                                    "name": name,
                                    "tensor_parallel_size": tp,
                                    "pipeline_parallel_size": stages,
                                    "kv_cache_dtype": dtype,
                                    "prefix_caching": prefix,
                                    "num_speculative_tokens": draft,
                                    "draft_layers": shape.draft_layers,
                                    "max_num_batched_tokens": batch,
                                    "max_model_len": length,
                                    "available_bytes": memory,
                                }
                            )
    return made


@pytest.fixture(scope="module")
def answers(engine_image):
    asked = cases()
    command = ["docker", "run", "--rm", "-i", "--network", "none", "--env", "VLLM_LOGGING_LEVEL=ERROR"]
    command += ["--volume", f"{SCRIPT}:/engine_kv.py:ro", "--entrypoint", "python3", engine_image, "/engine_kv.py"]
    started = subprocess.run(
        command,
        input=json.dumps({"configs": CONFIGS, "cases": asked}),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert started.returncode == 0, started.stderr[-4000:]
    # The engine may write warnings before the answer.
    return list(zip(asked, json.loads(started.stdout.splitlines()[-1]), strict=True))


def planned(case):
    arguments = {key: value for key, value in case.items() if key not in ("name", "draft_layers")}
    try:
        found = kv_capacity(CONFIGS[case["name"]], engine_version=ENGINE_VERSION, **arguments)
    except Refusal as refusal:
        longest = re.search(r"context_length at most (\d+)", str(refusal))
        return {"refused": True, "longest": int(longest[1]) if longest else 0}
    return {
        "refused": False,
        "block_size_tokens": found.block_size_tokens,
        "num_blocks": found.num_blocks,
        "capacity_tokens": found.capacity_tokens,
        "max_concurrency": found.max_concurrency,
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_equal_to_the_engine(answers, name):
    rows = [(case, answer) for case, answer in answers if case["name"] == name]
    assert len(rows) >= 12
    differences = [(case, answer, planned(case)) for case, answer in rows if planned(case) != answer]
    assert not differences, f"{len(differences)} of {len(rows)}, the first: {differences[0]}"


def test_refusals_are_among_the_cases(answers):
    assert sum(answer["refused"] for _, answer in answers) >= 20
    assert sum(not answer["refused"] for _, answer in answers) >= 500
