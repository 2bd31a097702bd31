"""Memory of one CUDA GPU under vLLM: what is inside its budget, what is outside, and the share that is safe.

Order of events in v1/worker/gpu_worker.py: a first look at free memory; weights; a profile run with T tokens and S
rows; an estimate of the CUDA graphs. available = ceil(total x share) - weights - buffers - activation - non-torch -
graphs. The numbers and their sources are in cuda_memory.yaml.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from metalserve.planner.draft import EAGLE3, STANDALONE, Draft
from metalserve.planner.shape import Shape
from metalserve.planner.units import GIB, ceil_div
from metalserve.planner.versions import LISTED_V2_ARCHITECTURES, VllmBehaviour
from metalserve.planner.weights import Weights, gpt_oss_mxfp4


@dataclass(frozen=True)
class Load:
    """What decides the memory of one rank, weights aside."""

    tensor_parallel_size: int
    max_sequences: int
    max_batched_tokens: int
    eager: bool
    vision: bool
    draft_tokens: int = 0
    capability: int = 90
    """Compute capability x 10 of the GPU."""
    communicating: int = 0
    """Ranks that exchange data: replicas of a mixture of experts too. 0: the tensor parallel size."""
    draft: Draft | None = None
    """A draft model of its own; `draft_tokens` are then drafted by it."""
    adapters: bool = False
    """Whether LoRA adapters are served: each size is then captured twice, with and without them."""

    @property
    def ranks(self) -> int:
        """Ranks that exchange data."""
        return max(self.communicating, self.tensor_parallel_size)


@dataclass(frozen=True)
class Budget:
    """Predicted bytes on one GPU. `outside_bytes` is what the driver, NCCL and the runner take beyond the budget."""

    total_bytes: int
    requested_bytes: int
    weights_bytes: int
    buffers_bytes: int
    activation_bytes: int
    non_torch_bytes: int
    graphs_bytes: int
    outside_bytes: int
    unprofiled_bytes: int

    @property
    def kv_bytes(self) -> int:
        """What is left for the KV cache; below zero when the rest does not fit."""
        return self.requested_bytes - (
            self.weights_bytes + self.buffers_bytes + self.activation_bytes + self.non_torch_bytes + self.graphs_bytes
        )

    def with_measured(self, taken_bytes: int, outside_bytes: int | None) -> Budget:
        """The same budget with what an earlier start took beside the KV cache.

        Weights and buffers are known; the difference is activation. A measurement below them lowers the weights.
        """
        known = self.weights_bytes + self.buffers_bytes + self.non_torch_bytes + self.graphs_bytes
        return replace(
            self,
            weights_bytes=self.weights_bytes + min(taken_bytes - known, 0),
            activation_bytes=max(taken_bytes - known, 0),
            outside_bytes=self.outside_bytes if outside_bytes is None else outside_bytes,
        )


@lru_cache(maxsize=1)
def constants() -> dict[str, Any]:
    """The measured numbers of cuda_memory.yaml."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = (Path(__file__).parent / "cuda_memory.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.load(text, Loader=loader)  # noqa: S506
    return loaded


def runner(shape: Shape, release: VllmBehaviour, draft: Draft | None = None) -> str:
    """Model runner that this release uses for this model: v1 or v2.

    Up to 0.31 the V2 runner drafts with heads only (0.24, VllmConfig._get_v2_model_runner_unsupported_features).
    """
    if draft and draft.method == STANDALONE and release.v2_runner != "all":
        return "v1"
    if release.v2_runner == "all":
        return "v2"
    return "v2" if release.v2_runner == "listed" and shape.architecture in LISTED_V2_ARCHITECTURES else "v1"


def buffers_bytes(shape: Shape, vision: bool) -> int:
    """The rotary tables in 16 bit, four 32-bit scales per attention layer, and the vision tower's rotary table.

    Equal to the byte to the buffers of the started engines.
    """
    table = (shape.rotary_positions + shape.sliding_rotary_positions) * shape.rotary_dim * 2
    scales = 16 * (shape.full_layers + shape.sliding_layers)
    # Vision: 8192 positions of half a head.
    qwen = vision and shape.vision is not None and shape.vision.kind == "qwen"
    tower = 8192 * (shape.vision.hidden // shape.vision.heads // 2) * 2 if qwen and shape.vision else 0
    return table + scales + tower


def activation_bytes(shape: Shape, release: VllmBehaviour, load: Load) -> int:
    """Peak of the profile run above weights and buffers."""
    numbers, tp = constants(), load.tensor_parallel_size
    logits = load.max_sequences * shape.vocabulary
    tokens = load.max_batched_tokens
    vision = _kept_images_bytes(shape, load)
    kept = 0
    if load.draft and load.draft.method == EAGLE3:
        kept = 2 * shape.hidden * tokens * int(numbers["head_hidden_states"]["eager" if load.eager else "graphs"])
    experts = shape.experts
    if experts:
        width = 4 * shape.hidden + experts.per_token * (3 * ceil_div(experts.intermediate, tp) + shape.hidden)
    else:
        width = 2 * shape.hidden + 3 * ceil_div(shape.intermediate, tp)
    if runner(shape, release, load.draft) == "v1":
        own = numbers["v1"]
        # One draft for each row, however many are configured (GPUModelRunner._dummy_sampler_run).
        row = own["row_bytes_with_draft" if load.draft_tokens else "row_bytes"]
        # With fused experts the workspaces that are kept are the forward pass's peak.
        forward = 2 * width * tokens if experts is None or gpt_oss_mxfp4(shape) else 0
        return int(
            own["base_bytes"] + kept + max(forward, 2 * _kept_elements(shape, tp) * tokens + row * logits) + vision
        )
    own = numbers["v2"]
    row = own["row_bytes"]
    if release.v2_graph_estimate:
        row = own["row_bytes_newer"] + (own["row_bytes_newer_gathered"] if tp > 1 else 0)
    return int(kept + own["penalty_bytes"] * logits + max(2 * width * tokens, row * logits) + vision)


def _kept_images_bytes(shape: Shape, load: Load) -> int:
    """Encoder outputs that are kept while the language model is profiled (config/scheduler.py, encoder budget).

    Qwen's largest item is a video; other towers take images, up to the batched tokens of them.
    """
    if not load.vision or shape.vision is None:
        return 0
    largest = int(constants()["vision_tokens"]) if shape.vision.kind == "qwen" else load.max_batched_tokens
    return largest * shape.vision.output * 2


def _kept_elements(shape: Shape, tp: int) -> int:
    """16-bit elements per token that are still held while the V1 runner's profile run samples.

    The fused experts' two workspaces stay (fused_moe/experts/triton_moe.py:workspace_shapes, v1/worker/workspace.py).
    The monolithic MXFP4 kernels of gpt-oss allocate theirs for the call (experts/gpt_oss_triton_kernels_moe.py).
    """
    experts = shape.experts
    if experts is None and shape.hybrid:
        return 3 * ceil_div(shape.intermediate, tp)
    if experts is None or gpt_oss_mxfp4(shape):
        return shape.hidden
    width = ceil_div(experts.intermediate, tp)
    return experts.per_token * (max(width, shape.hidden) + max(2 * width, shape.hidden)) + shape.hidden


def unprofiled_sampler_bytes(shape: Shape, release: VllmBehaviour, load: Load) -> int:
    """What verifying all drafts of all sequences takes beyond the profile run.

    V1: the profile verifies one draft for each sequence, each further draft has as many copies of its logits
    (v1/sample/rejection_sampler.py). V2: the profile verifies none; the logits of all rows, and 32-bit copies in chunks
    of at most 1 GiB (v1/worker/gpu/spec_decode/rejection_sampler.py of 0.32). In 0.24 V2 copies all rows at once, at
    the end of its start (warmup_kernels), and the allocator cannot reuse what the profile left.
    """
    drafts, logits = load.draft_tokens, load.max_sequences * shape.vocabulary
    if not drafts:
        return 0
    numbers = constants()
    if runner(shape, release, load.draft) == "v1":
        return int(numbers["v1"]["row_bytes_further_draft"] * (drafts - 1) * logits)
    gathered = 2 if load.tensor_parallel_size > 1 else 1
    if not release.v2_graph_estimate:
        return int((numbers["v2"]["row_bytes_verified"] * (1 + drafts) + numbers["v2"]["row_bytes_lost"]) * logits)
    copies = min(4 * (1 + drafts) * logits, int(numbers["v2"]["draft_chunk_bytes"]))
    return 2 * gathered * drafts * logits + copies


def unprofiled_bytes(shape: Shape, release: VllmBehaviour, load: Load) -> int:
    """What the first requests take that the profile run does not see."""
    return gdn_scratch_bytes(shape, load) + unprofiled_sampler_bytes(shape, release, load)


@lru_cache(maxsize=1024)
def captured(max_sequences: int, draft_tokens: int = 0, limit: int = 512) -> tuple[int, int]:
    """(number, largest) of the batch sizes that are captured: 1, 2, 4, 8..248 by 8, then by 16.

    Up to min(2 S (1 + D), 512) tokens (config/vllm.py:_set_cudagraph_sizes).
    """
    bound = min(2 * max_sequences * (1 + draft_tokens), limit)
    sizes = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16)) if size <= bound]
    return len(sizes), sizes[-1]


@dataclass(frozen=True)
class Graphs:
    """Bytes of the CUDA graphs: what they take, and the range of the V1 runner's own estimate of it."""

    taken_bytes: int
    least_estimate_bytes: int
    most_estimate_bytes: int


def graphs(shape: Shape, load: Load) -> Graphs:
    """CUDA graphs of all captured sizes.

    The estimate (0.24, GPUModelRunner.profile_cudagraph_memory) is the first full graph, and for every further one as
    much as the second of its kind took. That second piecewise graph takes a 20 MiB segment of torch's allocator or
    none, by how full the segments before are: times 50 that is 1 GiB more or less for graphs that take the same.
    """
    numbers, tp = constants()["graphs"], load.tensor_parallel_size
    number, largest = captured(load.max_sequences, load.draft_tokens)
    # v1/worker/gpu/lora_utils.py of 0.24, get_lora_capture_cases: without an adapter, and with the most at once.
    number *= 2 if load.adapters else 1
    partial = 0
    if load.capability // 10 == 9:
        width = shape.mla.kv_rank if shape.mla else shape.head_dim
        partial = int(numbers["splits"]) * largest * ceil_div(shape.heads, tp) * width * 4
    full = int(numbers["full_bytes"][1 if tp == 1 else 2])
    least = partial + int(numbers["first_bytes"]) + (number - 1) * (full + int(numbers["piecewise_bytes"]))
    return Graphs(
        taken_bytes=max(partial + int(numbers["layer_bytes"]) * len(shape.layers) * number, least),
        least_estimate_bytes=least,
        most_estimate_bytes=least + (number - 1) * int(numbers["segment_bytes"]),
    )


def graph_bytes(shape: Shape, release: VllmBehaviour, load: Load) -> tuple[int, int]:
    """Bytes of the CUDA graphs (at most taken off the budget, at most taken beside it)."""
    if load.eager:
        return 0, 0
    found = graphs(shape, load)
    if runner(shape, release, load.draft) == "v1":
        if not release.graph_estimate:
            return 0, found.taken_bytes
        return found.most_estimate_bytes, found.taken_bytes - found.least_estimate_bytes
    # The V2 runner measures a whole capture where it estimates at all (0.32, v1/worker/gpu/cudagraph_utils.py).
    return (found.taken_bytes, 0) if release.v2_graph_estimate else (0, found.taken_bytes)


def gdn_scratch_bytes(shape: Shape, load: Load) -> int:
    """Scratch of the first long Gated DeltaNet prefill, which the profile run does not see (Triton kernels).

    vllm-project/vllm#52872; the sum of the temporaries of one chunk in fla/ops (all head sizes equal).
    """
    gdn = shape.gdn
    if gdn is None:
        return 0
    keys = gdn.key_heads // load.tensor_parallel_size
    values = gdn.value_heads // load.tensor_parallel_size
    k, v = gdn.key_head_dim, gdn.value_head_dim
    per_token = (
        2 * (2 * keys * k + values * v)
        + 4 * keys * k
        + 2 * values * v
        + 12 * values
        + 128 * values
        + 2 * values * k
        + 4 * values * v
    )
    tokens = load.max_batched_tokens
    return tokens * per_token + ceil_div(tokens, 64) * values * v * k * 2


def outside_bytes(shape: Shape, release: VllmBehaviour, load: Load) -> int:
    """Bytes that end up in use beyond the budget: context, communication, runner, graphs that are not counted."""
    numbers = constants()
    context = next(size for ranks, size in numbers["context_bytes"].items() if ranks >= min(load.ranks, 8))
    residual = numbers["residual_bytes"][runner(shape, release, load.draft)]
    if load.ranks > 1:
        residual = max(residual, numbers["residual_bytes"]["tensor_parallel"])
    residual += numbers["residual_draft_bytes"] if load.draft else 0
    return int(context + residual + graph_bytes(shape, release, load)[1])


def safe_utilization(
    shape: Shape,
    release: VllmBehaviour,
    load: Load,
    *,
    total_bytes: int,
    used_bytes: int = 0,
    outside: int | None = None,
) -> float:
    """The largest share of the GPU, in hundredths, whose first start does not run out of memory.

    floor((total - used - outside - unprofiled - margin) / total), at most the cap. `outside`: bytes beyond the
    budget where a start measured them.
    """
    numbers = constants()
    room = (
        total_bytes
        - used_bytes
        - (outside_bytes(shape, release, load) if outside is None else outside)
        - unprofiled_bytes(shape, release, load)
        - int(numbers["margin_bytes"])
    )
    large = total_bytes >= 80 * GIB and not load.vision
    cap = float(numbers["utilization_cap_large"] if large else numbers["utilization_cap"])
    # The engine's own default is the most that was ever meant to work without measuring.
    cap = min(cap, release.default_utilization) if release.default_utilization < 0.92 else cap
    return max(0.0, min(cap, math.floor(100 * room / total_bytes) / 100))


def budget(
    shape: Shape,
    release: VllmBehaviour,
    load: Load,
    loaded: Weights,
    *,
    total_bytes: int,
    utilization: float,
) -> Budget:
    """The predicted memory of one GPU for that share."""
    numbers = constants()
    inside, _ = graph_bytes(shape, release, load)
    return Budget(
        total_bytes=total_bytes,
        requested_bytes=math.ceil(total_bytes * utilization),
        weights_bytes=loaded.total_bytes,
        buffers_bytes=buffers_bytes(shape, load.vision)
        + (buffers_bytes(load.draft.shape, vision=False) if load.draft else 0),
        activation_bytes=activation_bytes(shape, release, load),
        non_torch_bytes=numbers["non_torch_bytes"][1 if load.ranks == 1 else 2]
        + (0 if load.eager else numbers["non_torch_graphs_bytes"]),
        graphs_bytes=inside,
        outside_bytes=outside_bytes(shape, release, load),
        unprofiled_bytes=unprofiled_bytes(shape, release, load),
    )
