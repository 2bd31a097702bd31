"""From lines of a journal to a cause and a remedy.

The lines marked "run" were printed by vLLM 0.32.0 on the CPU and by Docker when each was made to fail that way; the
others are the texts in the engines' sources (vLLM 0.33.0, SGLang 0.5.23) and in NVIDIA's documentation, with numbers
filled in from public reports.
"""

from __future__ import annotations

import re

import pytest

from metalserve.remote.failure_classes import FAILURE_CLASSES
from metalserve.remote.failures import LINE_CHARACTERS, find_failures

EXCERPTS = [
    # run
    ("bad_argument", "vllm: error: unrecognized arguments: --enable-cuda-graph"),
    (
        "bad_argument",
        "  Value error, User-specified max_model_len (8192) is greater than the derived max_model_len "
        "(max_position_embeddings=4096.0 or model_max_length=None in model's config.json). To allow overriding this "
        "maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1.",
    ),
    ("engine_config_invalid", "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"),
    ("wrong_parser", "KeyError: 'invalid tool call parser: qwen (chose from { apertus,cohere_command3,hermes,hf })'"),
    ("bad_weights", "json.decoder.JSONDecodeError: Unterminated string starting at: line 152 column 5 (char 2987)"),
    ("weights_missing", "  Value error, Invalid repository ID or local directory specified: '/models/x'."),
    (
        "shared_memory",
        "RuntimeError: Insufficient space in /dev/shm for shared-memory allocation: 160 MiB required, 64 MiB free. "
        "Increase /dev/shm (e.g. --shm-size or --ipc=host).",
    ),
    (
        "missing_cdi_device",
        "docker: Error response from daemon: CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=0.",
    ),
    (
        "missing_cdi_device",
        'docker: Error response from daemon: could not select device driver "cdi" with capabilities: []',
    ),
    ("image_missing", "docker: Error response from daemon: No such image: no-such-image:1"),
    (
        "weights_missing",
        'docker: Error response from daemon: invalid mount config for type "bind": bind source path does not exist: '
        "/var/lib/metalserve/models/x",
    ),
    (
        "docker_unreachable",
        "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
    ),
    # vLLM
    (
        "gpu_memory_held",
        "ValueError: Free memory on device cuda:0 (11.2/79.11 GiB) on startup is less than desired GPU memory "
        "utilization (0.92, 72.78 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
    ),
    ("kv_too_small", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    (
        "kv_too_small",
        "ValueError: To serve at least one request with the model's max seq len (262144), (5.16 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (3.2 GiB).",
    ),
    (
        "state_blocks",
        "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (856). Each decode sequence requires one",
    ),
    ("out_of_memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.90 GiB. GPU 0 has a total"),
    ("gpu_missing", "ValueError: World size (2) is larger than the number of available GPUs (1) in this node."),
    ("gpu_missing", "RuntimeError: No CUDA GPUs are available"),
    (
        "gpu_unsupported",
        "ValueError: The quantization method modelopt is not supported for the current GPU. Minimum capability: 80. "
        "Current capability: 75.",
    ),
    ("gpu_unsupported", "ValueError: FP8 KV cache is not supported by the Triton attention backend on Tesla T4"),
    ("bad_argument", "ValueError: Total number of attention heads (16) must be divisible by tensor parallel size (3)."),
    ("bad_argument", "ValueError: max_num_batched_tokens (4) must be greater than or equal to max_num_seqs (8)."),
    ("model_unsupported", "ValueError: Model architectures ['Qwen9ForCausalLM'] are not supported for now."),
    ("port_in_use", "OSError: [Errno 98] Address already in use"),
    # SGLang
    (
        "state_blocks",
        "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. "
        "Computed max_mamba_cache_size=0 (total_rest_memory=1.02 GB, mamba_cache_per_req=63.6 MB).",
    ),
    ("kv_too_small", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
    (
        "kv_too_small",
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.5. Raise",
    ),
    ("out_of_memory", "Exception: Capture cuda graph failed: CUDA error"),
    (
        "gpu_memory_held",
        "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
    ),
    # CUDA and the driver
    (
        "fabric_not_ready",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
        "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized",
    ),
    ("driver_mismatch", "Error 803: system has unsupported display driver / cuda driver combination"),
    ("driver_mismatch", "Failed to initialize NVML: Driver/library version mismatch"),
    ("driver_too_old", "CUDA error: CUDA driver version is insufficient for CUDA runtime version"),
    ("driver_too_old", "Error 804: forward compatibility was attempted on non supported HW"),
    # hubs
    ("gated_model", "huggingface_hub.errors.GatedRepoError: 401 Client Error."),
    ("bad_weights", "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata"),
    ("host_out_of_memory", "vllm@tiny.service: A process of this unit has been killed by the OOM killer (oom-kill)."),
    ("nccl", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error"),
    ("disk_full", "OSError: [Errno 28] No space left on device: '/root/.cache/vllm'"),
    ("start_limit", "vllm@tiny.service: Start request repeated too quickly."),
]


@pytest.mark.parametrize(("name", "line"), EXCERPTS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(EXCERPTS)])
def test_a_line_is_known_by_its_class(name, line):
    (failure,) = find_failures(["INFO loading", line, "INFO bye"])
    assert failure.name == name
    assert failure.cause
    assert failure.remedy in failure.sentence()
    assert failure.line == " ".join(line.split())


def test_the_telling_one_comes_first_whatever_the_order_of_the_lines():
    lines = [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, User-specified max_model_len (8192) is greater than the derived max_model_len (...)",
        "vllm@tiny.service: Start request repeated too quickly.",
    ]
    assert [each.name for each in find_failures(lines)] == ["bad_argument", "engine_config_invalid", "start_limit"]


def test_a_class_shows_its_first_line_and_no_more_than_it_should():
    lines = ["CUDA out of memory. " + "x" * 1000, "CUDA out of memory. second"]
    (failure,) = find_failures(lines)
    assert failure.line.startswith("CUDA out of memory. xxx")
    assert len(failure.line) == LINE_CHARACTERS + len(" ...")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "INFO 11-30 19:24:46 [model.py:733] Resolved architecture: Qwen3_5MoeForConditionalGeneration",
        "WARNING [system_utils.py:255] Found ulimit of 20000 and failed to automatically increase with error current "
        "limit exceeds maximum limit. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.",
        'INFO: 127.0.0.1:57000 - "GET /health HTTP/1.1" 200 OK',
        "INFO Available KV cache memory: 9.73 GiB",
        "INFO GPU KV cache size: 1,019,791 tokens",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ],
)
def test_what_says_nothing_about_a_cause_is_left_alone(line):
    assert find_failures([line]) == []


def test_each_class_has_an_excerpt_but_one_that_no_start_here_can_show():
    untried = {each.name for each in FAILURE_CLASSES} - {name for name, _ in EXCERPTS}
    assert untried == {"load_timeout"}


def test_the_classes_are_well_formed():
    names = [each.name for each in FAILURE_CLASSES]
    assert len(set(names)) == len(names)
    for each in FAILURE_CLASSES:
        assert re.fullmatch("[a-z_]+", each.name)
        # They stand in the middle of a sentence.
        assert not each.cause.endswith(".")
        assert not each.remedy.endswith(".")
