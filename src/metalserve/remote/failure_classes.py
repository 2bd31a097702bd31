"""What the last lines of an engine that did not start mean, as data: constants only, so that it travels to the hosts.

The order matters: the first class that knows a line wins, and a class that stands earlier explains a later one (a CUDA
error is followed by "Engine core initialization failed"). Sources of the patterns:

- vLLM 0.33.0: v1/worker/utils.py, v1/core/kv_cache_utils.py, config/compilation.py, config/model.py,
  model_executor/model_loader, tool_parsers (wheel, read 2026-11-30); 0.32.0 run on the CPU for those marked "seen".
- SGLang 0.5.23: mem_cache, model_executor/model_runner.py, entrypoints (wheel, read 2026-11-30).
- CUDA: docs.nvidia.com/cuda/cuda-runtime-api, cudaError_t (802 cudaErrorSystemNotReady, 803
  cudaErrorSystemDriverMismatch, 804 cudaErrorCompatNotSupportedOnDevice, 35 cudaErrorInsufficientDriver).
- Docker 26 and containerd: texts seen with `docker run` (CDI, image, mount, name).
- PyTorch: c10/cuda/CUDACachingAllocator.cpp. Transformers, huggingface_hub, safetensors: their exception texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Tuple


@dataclass(frozen=True)
class FailureClass:
    """One way in which an engine does not start.

    Args:
        name: one word for tables and tests.
        patterns: any of these regular expressions in a line of the journal.
        cause: what it means, one sentence.
        remedy: what to do, naming the variable or the command.
    """

    name: str
    patterns: Tuple[str, ...]
    cause: str
    remedy: str

    def knows(self, line: str) -> bool:
        """Whether a line of the journal belongs to this class."""
        return any(re.search(pattern, line) for pattern in self.patterns)


FAILURE_CLASSES: Tuple[FailureClass, ...] = (
    # ---- before the engine: Docker and systemd ----
    FailureClass(
        "missing_cdi_device",
        (
            r"unresolvable CDI devices",
            r"CDI device injection failed",
            r"failed to inject CDI devices",
            r"could not select device driver \"cdi\"",
        ),
        "the host has no CDI specification for a GPU of this deployment, or CDI is off in Docker",
        "`nvidia-ctk cdi list`, then `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`; again after each driver "
        "upgrade. Docker needs features.cdi: true in /etc/docker/daemon.json (role docker_engine)",
    ),
    FailureClass(
        "image_missing",
        (r"No such image", r"Unable to find image", r"manifest unknown"),
        "the engine's image is not on this host; units never pull",
        "run playbooks/stage.yml, which puts it there by its digest",
    ),
    FailureClass(
        "weights_missing",
        (
            r"bind source path does not exist",
            r"invalid mount config for type \"bind\"",
            r"Invalid repository ID or local directory specified",
            r"No config\.json found|does not appear to have a file named config\.json",
        ),
        "a directory of the release, most often the weights, is not on this host",
        "run playbooks/stage.yml, which fetches the weights and publishes them whole",
    ),
    FailureClass(
        "disk_full",
        (r"No space left on device", r"Errno 28\b"),
        "a disk of this host is full",
        "free space (docs/operations.md, Free disk space); the line names the path",
    ),
    FailureClass(
        "docker_unreachable",
        (r"Cannot connect to the Docker daemon", r"failed to connect to the docker API"),
        "Docker does not run",
        "`systemctl status docker`, then playbooks/prepare.yml",
    ),
    # ---- the driver ----
    FailureClass(
        "fabric_not_ready",
        (
            r"(Error 802|error code=802|cudaErrorSystemNotReady)",
            r"system not yet initialized",
        ),
        "CUDA cannot start because the NVSwitch fabric is not ready (error 802): Fabric Manager does not run, or has "
        "another version than the driver",
        "`systemctl status nvidia-fabricmanager`; it must have the driver's version. `nvidia-smi -q | grep -A2 Fabric`",
    ),
    FailureClass(
        "driver_mismatch",
        (
            r"(Error 803|error code=803|cudaErrorSystemDriverMismatch)",
            r"unsupported display driver / cuda driver combination",
            r"Driver/library version mismatch",
        ),
        "the loaded driver and the user-space libraries are of different versions (error 803)",
        "reload the driver or reboot the host, then `nvidia-ctk cdi generate`: the CDI spec names the old files",
    ),
    FailureClass(
        "driver_too_old",
        (
            r"CUDA driver version is insufficient",
            r"The NVIDIA driver on your system is too old",
            r"(Error 804|cudaErrorCompatNotSupportedOnDevice)",
            r"forward compatibility was attempted on non supported HW",
            r"unsatisfied condition: cuda>=",
            r"provided PTX was compiled with an unsupported toolchain",
        ),
        "the driver is older than the CUDA version of the engine's image",
        "a newer driver on the host, or an engine_version whose image carries an older CUDA (vLLM before 0.20: 12.9)",
    ),
    FailureClass(
        "gpu_missing",
        (
            r"World size \(\d+\) is larger than the number of available GPUs",
            r"No CUDA GPUs are available",
            r"(CUDA error: |cudaError\w*: ?)?no CUDA-capable device is detected",
            r"invalid device ordinal",
            r"Failed to infer device type",
            r"CUDA error: (unspecified launch failure|uncorrectable ECC error|device .* lost)",
            r"GPU (is lost|has fallen off the bus)",
        ),
        "the engine sees fewer GPUs than its release names, or one of them has failed",
        "`nvidia-smi` and `dmesg | grep -i xid` on the host; a GPU that fell off the bus needs a reboot, and "
        "`gpus` of the deployment can leave it out",
    ),
    FailureClass(
        "gpu_unsupported",
        (
            r"not supported for the current GPU\. Minimum capability",
            r"Bfloat16 is only supported on GPUs with compute capability",
            r"FP8 KV cache is not supported by",
            r"no kernel image is available for execution on the device",
        ),
        "this GPU's compute capability is below what the quantisation, the data type or the KV type needs",
        "another checkpoint (`model`), `kv_cache_dtype`, or another GPU; `metalserve plan` says what fits",
    ),
    # ---- memory ----
    FailureClass(
        "gpu_memory_held",
        (
            r"on startup is less than desired (GPU|CPU) memory utilization",
            r"Error in memory profiling\. Initial free memory",
            r"The memory capacity is unbalanced\. Some GPUs may be occupied",
        ),
        "another process holds memory that this engine was to take",
        "`nvidia-smi` on the host names it; end it, or lower `memory_share` of the deployment",
    ),
    FailureClass(
        "state_blocks",
        (
            r"max_num_seqs \(\d+\) exceeds available Mamba cache blocks",
            r"Not enough GPU memory for hybrid \(mamba/linear-attention\) state cache",
            r"Hybrid \(mamba/linear-attention\) state cache is too small",
        ),
        "this hybrid model keeps one state block for each sequence, and there are fewer blocks than sequences",
        "lower `max_sequences` of the deployment to the number in the line, or more memory (`memory_share`, GPUs)",
    ),
    FailureClass(
        "kv_too_small",
        (
            r"No available memory for the cache blocks",
            r"larger than the available KV cache memory",
            r"Cannot auto-fit max_model_len",
            r"leave no GPU memory for the KV cache under",
            r"Not enough memory\. Please try to increase --mem-fraction-static",
        ),
        "what the weights leave is too small for one request of the full context length",
        "a shorter `context_length`, `kv_cache_dtype: fp8`, a larger `memory_share`, or more GPUs",
    ),
    FailureClass(
        "out_of_memory",
        (
            r"torch\.OutOfMemoryError",
            r"CUDA out of memory",
            r"Capture cuda graph failed",
            r"cudaErrorMemoryAllocation",
            r"CUBLAS_STATUS_ALLOC_FAILED",
        ),
        "the GPU ran out of memory while the model was loaded or warmed up",
        "lower `memory_share`, `max_sequences` or `max_batched_tokens`, or `eager: true`; see `metalserve plan`",
    ),
    FailureClass(
        "host_out_of_memory",
        (
            r"oom-kill",
            r"Out of memory: Killed process",
            r"Cannot allocate memory",
            r"DefaultCPUAllocator: can't allocate",
        ),
        "the host, not the GPU, ran out of memory",
        "fewer or smaller deployments on this host; `free -h`, `journalctl -k | grep -i oom`",
    ),
    FailureClass(
        "shared_memory",
        (
            r"Insufficient space in /dev/shm",
            r"unable to (open|write to|allocate) shared memory",
            r"Bus error.*shm",
            r"DataLoader worker .* Bus error",
        ),
        "the container's shared memory is too small",
        "a larger `serving_unit_shm_size`",
    ),
    # ---- what is served ----
    FailureClass(
        "bad_weights",
        (
            r"SafetensorError",
            r"Error while deserializing header",
            r"Error\(s\) in loading state_dict|size mismatch for ",
            r"Following weights were not initialized from checkpoint",
            r"(Unrecognized|Unsupported) (model|configuration) (class|in /models)",
            r"(Can't|Couldn't) (load|instantiate) (the backend )?tokenizer",
            r"data did not match any variant of untagged enum",
            r"(expected value|EOF while parsing|invalid type|trailing characters) .*at line \d+ column \d+",
            r"json\.decoder\.JSONDecodeError",
            r"incomplete metadata, file not fully covered",
        ),
        "a file of the model (weights, configuration or tokenizer) is damaged or is none of this model's",
        "compare with the source, then lock and stage another revision: playbooks/ops/lock.yml, playbooks/stage.yml",
    ),
    FailureClass(
        "gated_model",
        (r"GatedRepoError", r"Access to model .* is restricted", r"401 Client Error", r"Repository Not Found"),
        "the engine asked a model hub, which refused it; a release serves from the disk and needs no hub",
        "weights by playbooks/stage.yml; remove what makes the engine fetch (a repository name in engine_args)",
    ),
    FailureClass(
        "model_unsupported",
        (
            r"Model architectures .* (are not supported|failed to be inspected)",
            r"does not recognize this architecture",
            r"model type `?\w+`? but Transformers does not recognize",
        ),
        "this engine version does not know the architecture of the model",
        "a newer `engine_version`; the catalogue's minimum_versions says which",
    ),
    FailureClass(
        "wrong_parser",
        (r"invalid (tool call|reasoning) parser", r"[Rr]easoning parser .* not found", r"[Tt]ool parser .* not found"),
        "the engine has no parser of that name",
        "the parsers of the catalogue's entry of the model; the line lists those that there are",
    ),
    FailureClass(
        "bad_argument",
        (
            r"error: (unrecognized arguments|argument |the following arguments|ambiguous option)",
            r"User-specified max_model_len \(",
            r"max_num_batched_tokens \(\d+\) must be greater than or equal to",
            r"must be divisible by tensor parallel size",
            r"is not divisible by",
        ),
        "the engine refuses an argument of its configuration",
        "`engine_args` or the field of the deployment that sets it; engine.yaml of the release holds all of them",
    ),
    FailureClass(
        "engine_config_invalid",
        (
            r"validation errors? for \w*Config",
            r"pydantic_core\._pydantic_core\.ValidationError",
            r"yaml\.(scanner|parser)\.\w+Error",
            r"ValueError: .*config",
        ),
        "the engine cannot work with its configuration as a whole",
        "the lines above it in the journal name the field; engine.yaml of the release holds what was given",
    ),
    FailureClass(
        "port_in_use",
        (r"[Aa]ddress already in use", r"\[Errno 98\]"),
        "another process listens on the port of this deployment",
        "`ss -ltnp` on the host names it; end it, or give the deployment another `port`",
    ),
    FailureClass(
        "nccl",
        (r"NCCL error", r"ncclSystemError", r"ncclUnhandledCudaError", r"ncclInternalError"),
        "the GPUs could not talk to each other",
        "`environment: {NCCL_DEBUG: INFO}` shows why; look at `nvidia-smi topo -m`, Fabric Manager, and "
        "serving_unit_shm_size",
    ),
    FailureClass(
        "load_timeout",
        (r"Timed out waiting for engine core", r"did not (become ready|initialize) within", r"HandshakeTimeout"),
        "the engine gave up waiting for its own workers",
        "VLLM_ENGINE_READY_TIMEOUT_S in `environment` for slow disks and cold compile caches",
    ),
    FailureClass(
        "start_limit",
        (r"[Ss]tart request repeated too quickly", r"start-limit-hit"),
        "the unit has used up its budget of starts",
        "mend what the lines before it say; the next run, or `systemctl reset-failed`, gives a new budget",
    ),
)
