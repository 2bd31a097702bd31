"""Bytes of the weights on one GPU, tensor by tensor.

What is split and what is copied follows vLLM 0.33 (model_executor/layers/linear.py, vocab_parallel_embedding.py,
fused_moe/layer.py, mla.py). The counts are checked against parameters of started engines, see docs/planner.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache

from metalserve.planner.safetensors import StoredBytes
from metalserve.planner.shape import Experts, Shape, Vision, pipeline_stages
from metalserve.planner.units import ceil_div

VOCABULARY_PADDING = 64


@dataclass(frozen=True)
class Tensor:
    """`count` equal tensors of `elements` each on one GPU, under one module name."""

    name: str
    elements: int
    count: int = 1
    linear: bool = True
    """Whether a quantisation method that converts all linear layers converts this one."""
    bytes_per_element: int = 2


@dataclass(frozen=True)
class Weights:
    """Bytes on one GPU: language model, vision tower, draft layers, buffers of LoRA adapters; all of it as loaded."""

    text_bytes: int
    vision_bytes: int
    draft_bytes: int
    adapter_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return self.text_bytes + self.vision_bytes + self.draft_bytes + self.adapter_bytes


@dataclass(frozen=True)
class Mxfp4Storage:
    """How the engine keeps the MXFP4 experts of gpt-oss (multiples that sizes are rounded up to, in elements)."""

    hidden_multiple: int
    width_multiple: int
    scale_rows_multiple: int = 1
    scales_twice: bool = False


def mxfp4_storage(capability: int, scales_twice: bool) -> Mxfp4Storage:
    """What vLLM makes of MXFP4 experts on a GPU of that compute capability (90 for 9.0).

    Source: 0.24, fused_moe/oracle/mxfp4.py:mxfp4_round_up_hidden_size_and_intermediate_size and the order of backends
    for gpt-oss (TRT-LLM on 10.x, Triton on 9.0, else Marlin); on 9.0 the scales' rows are filled up to 2 x 8 warps x 16
    (triton_kernels hopper_scale.py). `scales_twice`: up to 0.31 the checkpoint's scales stay loaded beside the
    reordered ones; 0.32 drops them (convert_gpt_oss_weight_to_mxfp4_moe_kernel_format).
    """
    if capability // 10 == 10:
        return Mxfp4Storage(hidden_multiple=256, width_multiple=256)
    if capability // 10 == 9:
        return Mxfp4Storage(hidden_multiple=1, width_multiple=64, scale_rows_multiple=256, scales_twice=scales_twice)
    return Mxfp4Storage(hidden_multiple=256, width_multiple=128)


def gpt_oss_mxfp4(shape: Shape) -> bool:
    """Whether this is gpt-oss with its MXFP4 experts."""
    method = shape.quantization.method if shape.quantization else None
    return shape.architecture.startswith("GptOss") and method == "mxfp4"


@lru_cache(maxsize=512)
def weights(
    shape: Shape,
    *,
    tensor_parallel_size: int = 1,
    data_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel: bool = False,
    text_only: bool = False,
    draft: bool = False,
    fp8_marlin: bool = False,
    mxfp4: Mxfp4Storage | None = None,
    stored: StoredBytes | None = None,
) -> Weights:
    """Weight bytes on the fullest GPU.

    `stored`: bytes of the checkpoint's own tensors; they replace the sum over the shape, whose part per GPU is kept.

    `fp8_marlin`: FP8 below compute capability 8.9 runs weight-only and keeps its block scales expanded, about
    1.6 % more (one 16-bit scale per 128 inputs and output row).

    `mxfp4`: how the engine keeps the experts of gpt-oss; None: as in the checkpoint.
    """
    if stored is not None:
        return _scaled(
            shape,
            stored,
            weights(
                shape,
                tensor_parallel_size=tensor_parallel_size,
                data_parallel_size=data_parallel_size,
                pipeline_parallel_size=pipeline_parallel_size,
                expert_parallel=expert_parallel,
                text_only=text_only,
                draft=draft,
                fp8_marlin=fp8_marlin,
                mxfp4=mxfp4,
            ),
            text_only=text_only,
            draft=draft,
        )
    expert_ranks = tensor_parallel_size * data_parallel_size
    last = pipeline_parallel_size - 1
    text = [
        [
            tensor
            for tensor in _text(stage, tensor_parallel_size, expert_ranks, expert_parallel, mxfp4)
            if tensor.name not in _elsewhere(shape, first=number == 0, last=number == last)
        ]
        for number, stage in enumerate(pipeline_stages(shape, pipeline_parallel_size))
    ]
    return Weights(
        text_bytes=max(_sum(shape, tensors, fp8_marlin) for tensors in text),
        vision_bytes=0
        if text_only or not shape.vision
        else sum(t.elements * t.count * t.bytes_per_element for t in _vision(shape.vision, tensor_parallel_size)),
        draft_bytes=_sum(shape, list(_draft(shape, tensor_parallel_size, expert_ranks, expert_parallel)), fp8_marlin)
        if draft
        else 0,
    )


def _scaled(shape: Shape, stored: StoredBytes, share: Weights, *, text_only: bool, draft: bool) -> Weights:
    """The stored bytes times the part of the shape's bytes that one GPU keeps."""
    whole = weights(shape, draft=True)
    return Weights(
        text_bytes=stored.text * share.text_bytes // whole.text_bytes,
        vision_bytes=0
        if text_only
        else (stored.vision * share.vision_bytes // whole.vision_bytes if whole.vision_bytes else stored.vision),
        draft_bytes=stored.draft * share.draft_bytes // whole.draft_bytes if draft and whole.draft_bytes else 0,
    )


def parameters(shape: Shape, tensor_parallel_size: int = 1) -> int:
    """Number of parameters of the language model on one GPU (without vision and draft layers)."""
    tensors = _text(shape, tensor_parallel_size, tensor_parallel_size, False)
    return sum(t.elements * t.count for t in tensors if not t.name.endswith("w_uk_uv"))


def bits_per_weight(shape: Shape, name: str, fp8_marlin: bool = False) -> float:
    """Stored bits of one weight of that module, scales and zero points included."""
    quantization = shape.quantization
    if quantization is None or _excluded(name, quantization.excluded):
        return 16.0
    bits, group = quantization.bits, quantization.group
    if quantization.targets:
        hit = next((t for t in quantization.targets if any(name.endswith(leaf) for leaf in t[0])), None)
        if hit is None:
            return 16.0
        bits, group = hit[1], hit[2]
    elif name in ("lm_head", "embed_tokens"):
        return 16.0
    if quantization.method == "fp8":
        if fp8_marlin:
            return 8.0 + 16.0 / 128
        return 8.0 + 32.0 / (quantization.block[0] * quantization.block[1]) if quantization.block else 8.0
    # NVFP4 and MXFP4 keep an 8-bit scale per group, the integer formats a 16-bit one.
    small = quantization.method in ("modelopt", "mxfp4") or (bits == 4 and group == 16)
    scale = 8.0 if small else 16.0
    zero_points = 0.0 if quantization.symmetric else float(bits)
    return bits + ((scale + zero_points) / group if group else 0.0)


def _excluded(name: str, patterns: tuple[str, ...]) -> bool:
    for pattern in patterns:
        leaf = pattern.split("layers.", 1)[-1].split(".", 1)[-1] if "layers." in pattern else pattern
        leaf = leaf.removeprefix("model.").removeprefix("re:.*")
        if name == leaf or name.startswith(f"{leaf}.") or name.endswith(f".{leaf}") or fnmatch(name, leaf):
            return True
    return False


def _sum(shape: Shape, tensors: list[Tensor], fp8_marlin: bool) -> int:
    total = 0.0
    for tensor in tensors:
        bits = bits_per_weight(shape, tensor.name, fp8_marlin) if tensor.linear else 8.0 * tensor.bytes_per_element
        total += tensor.elements * tensor.count * bits / 8
    return int(total)


def _elsewhere(shape: Shape, *, first: bool, last: bool) -> tuple[str, ...]:
    """The vocabulary tables that this pipeline stage does not hold; one table for both ends is on both."""
    table = () if first or (last and shape.tied_embeddings) else ("embed_tokens",)
    return table if last else (*table, "lm_head")


def _text(
    shape: Shape, tp: int, expert_ranks: int, expert_parallel: bool, mxfp4: Mxfp4Storage | None = None
) -> Iterator[Tensor]:
    vocabulary = ceil_div(ceil_div(shape.vocabulary, VOCABULARY_PADDING) * VOCABULARY_PADDING, tp)
    yield Tensor("embed_tokens", vocabulary * shape.hidden, linear=False)
    if not shape.tied_embeddings:
        yield Tensor("lm_head", vocabulary * shape.hidden)
    attention = len(shape.layers) - shape.linear_layers
    yield from _attention(shape, tp, attention)
    yield from _gated_delta_net(shape, tp, shape.linear_layers)
    yield from _mlp(shape.hidden, shape.intermediate, tp, shape.dense_layers)
    if shape.experts and mxfp4 and gpt_oss_mxfp4(shape):
        yield from _gpt_oss_experts(shape, shape.experts, expert_ranks, expert_parallel, mxfp4)
    elif shape.experts:
        yield from _moe(shape, shape.experts, tp, expert_ranks, expert_parallel, shape.moe_layers)
    yield Tensor("norm", shape.hidden, 2 * len(shape.layers) + 1, linear=False)
    if shape.architecture.startswith("Gemma3"):
        yield Tensor("norm", shape.hidden, 2 * len(shape.layers), linear=False)


def _attention(shape: Shape, tp: int, layers: int) -> Iterator[Tensor]:
    if not layers:
        return
    heads = ceil_div(shape.heads, tp)
    if mla := shape.mla:
        query = heads * (mla.nope_dim + mla.rope_dim)
        if mla.query_rank:
            yield Tensor("self_attn.q_a_proj", shape.hidden * mla.query_rank, layers)
            yield Tensor("self_attn.q_b_proj", mla.query_rank * query, layers)
            yield Tensor("q_a_layernorm", mla.query_rank, layers, linear=False)
        else:
            yield Tensor("self_attn.q_proj", shape.hidden * query, layers)
        yield Tensor("self_attn.kv_a_proj_with_mqa", shape.hidden * (mla.kv_rank + mla.rope_dim), layers)
        yield Tensor("kv_a_layernorm", mla.kv_rank, layers, linear=False)
        expand = heads * (mla.nope_dim + mla.value_dim) * mla.kv_rank
        yield Tensor("self_attn.kv_b_proj", expand, layers)
        yield Tensor("self_attn.o_proj", heads * mla.value_dim * shape.hidden, layers)
        # 16-bit copies of the key and value up-projection are kept beside kv_b_proj (mla attention layer).
        yield Tensor("w_uk_uv", expand, layers, linear=False)
        return
    kv_heads = max(1, shape.kv_heads // tp)
    query = heads * shape.head_dim * (2 if shape.output_gate else 1)
    keys = kv_heads * shape.head_dim
    yield Tensor("self_attn.q_proj", shape.hidden * query, layers)
    yield Tensor("self_attn.k_proj", shape.hidden * keys, layers)
    yield Tensor("self_attn.v_proj", shape.hidden * keys, layers)
    yield Tensor("self_attn.o_proj", heads * shape.head_dim * shape.hidden, layers)
    if shape.attention_bias:
        yield Tensor("bias", query + 2 * keys, layers, linear=False)
    if shape.architecture.startswith("GptOss"):
        # Bias of the output projection, and one sink for each head (models/gpt_oss.py).
        yield Tensor("bias", shape.hidden + heads, layers, linear=False)
    if shape.query_norm:
        yield Tensor("qk_norm", 2 * shape.head_dim, layers, linear=False)


def _gated_delta_net(shape: Shape, tp: int, layers: int) -> Iterator[Tensor]:
    if not shape.gdn or not layers:
        return
    gdn = shape.gdn
    keys, values = gdn.key_heads * gdn.key_head_dim // tp, gdn.value_heads * gdn.value_head_dim // tp
    yield Tensor("linear_attn.in_proj_qkv", shape.hidden * (2 * keys + values), layers)
    yield Tensor("linear_attn.in_proj_z", shape.hidden * values, layers)
    yield Tensor("linear_attn.in_proj_ba", shape.hidden * 2 * gdn.value_heads // tp, layers, linear=False)
    yield Tensor("linear_attn.conv1d", gdn.conv_dim // tp * gdn.conv_kernel, layers, linear=False)
    yield Tensor("linear_attn.out_proj", values * shape.hidden, layers)
    yield Tensor("linear_attn.dt_bias", gdn.value_heads // tp, layers, linear=False)
    # vLLM keeps the decay in 32 bit (qwen_gdn_linear_attn.py).
    yield Tensor("linear_attn.A_log", gdn.value_heads // tp, layers, linear=False, bytes_per_element=4)
    yield Tensor("linear_attn.norm", gdn.value_head_dim, layers, linear=False)


def _mlp(hidden: int, intermediate: int, tp: int, layers: int) -> Iterator[Tensor]:
    if layers and intermediate:
        width = ceil_div(intermediate, tp)
        yield Tensor("mlp.gate_proj", hidden * width, layers)
        yield Tensor("mlp.up_proj", hidden * width, layers)
        yield Tensor("mlp.down_proj", hidden * width, layers)


def _moe(shape: Shape, experts: Experts, tp: int, ranks: int, expert_parallel: bool, layers: int) -> Iterator[Tensor]:
    if expert_parallel:
        routed = ceil_div(experts.count, ranks) * experts.intermediate
    else:
        routed = experts.count * ceil_div(experts.intermediate, ranks)
    yield Tensor("mlp.experts", 3 * shape.hidden * routed, layers)
    yield Tensor("mlp.gate", experts.count * shape.hidden, layers, linear=False)
    if experts.shared_intermediate:
        width = ceil_div(experts.shared_intermediate, tp)
        yield Tensor("mlp.shared_expert.gate_proj", shape.hidden * width, layers)
        yield Tensor("mlp.shared_expert.up_proj", shape.hidden * width, layers)
        yield Tensor("mlp.shared_expert.down_proj", shape.hidden * width, layers)
    if experts.shared_gate:
        yield Tensor("mlp.shared_expert_gate", shape.hidden, layers, linear=False)


def _gpt_oss_experts(
    shape: Shape, experts: Experts, ranks: int, expert_parallel: bool, mxfp4: Mxfp4Storage
) -> Iterator[Tensor]:
    """The experts as the MXFP4 kernels keep them; biases in 32 bit; the router has a bias too."""
    layers = shape.moe_layers
    count = ceil_div(experts.count, ranks) if expert_parallel else experts.count
    width = experts.intermediate if expert_parallel else ceil_div(experts.intermediate, ranks)
    width = _round_up(width, mxfp4.width_multiple)
    hidden = _round_up(shape.hidden, mxfp4.hidden_multiple)
    yield Tensor("mlp.experts", 3 * hidden * width * count, layers)
    rows = mxfp4.scale_rows_multiple
    # One 8-bit scale per 32 inputs: 2 x width rows of hidden inputs, hidden rows of width inputs.
    filled = (_round_up(2 * width, rows) - 2 * width) * hidden + (_round_up(hidden, rows) - hidden) * width
    again = 3 * hidden * width if mxfp4.scales_twice else 0
    yield Tensor("expert_scales", (filled + again) * count // 32, layers, linear=False, bytes_per_element=1)
    yield Tensor("expert_bias", (2 * width + hidden) * count, layers, linear=False, bytes_per_element=4)
    yield Tensor("mlp.gate", experts.count * (shape.hidden + 1), layers, linear=False)


def _round_up(size: int, multiple: int) -> int:
    return ceil_div(size, multiple) * multiple


def _draft(shape: Shape, tp: int, expert_ranks: int, expert_parallel: bool) -> Iterator[Tensor]:
    """The MTP layers: ordinary layers plus the projection of (embedding, hidden) and four norms; head shared."""
    layers = shape.draft_layers
    yield from _attention(shape, tp, layers)
    if shape.experts:
        yield from _moe(shape, shape.experts, tp, expert_ranks, expert_parallel, layers)
    else:
        yield from _mlp(shape.hidden, shape.intermediate, tp, layers)
    yield Tensor("mtp.fc", 2 * shape.hidden * shape.hidden, 1)
    yield Tensor("norm", shape.hidden, 2 * layers + 3, linear=False)


def _vision(vision: Vision, tp: int) -> Iterator[Tensor]:
    """The tower and what joins it to the language model, in 16 bit."""
    return {"qwen": _qwen_tower, "siglip": _siglip_tower, "pixtral": _pixtral_tower}[vision.kind](vision, tp)


def _siglip_tower(vision: Vision, tp: int) -> Iterator[Tensor]:
    """Gemma 3's, with biases (vLLM models/siglip.py), and its projection (gemma3_mm.py)."""
    yield Tensor("visual.patch_embed", (vision.patch_inputs + 1 + vision.positions) * vision.hidden, linear=False)
    attention = (4 * vision.hidden * vision.hidden + 3 * vision.hidden) // tp + vision.hidden
    mlp = (2 * vision.hidden * vision.intermediate + vision.intermediate) // tp + vision.hidden
    yield Tensor("visual.blocks", attention + mlp + 4 * vision.hidden, vision.depth, linear=False)
    yield Tensor("visual.merger", vision.hidden * vision.output + 3 * vision.hidden, linear=False)


def _pixtral_tower(vision: Vision, tp: int) -> Iterator[Tensor]:
    """Mistral 3's, without biases (vLLM models/pixtral.py), and its projector with a patch merger (mistral3.py)."""
    yield Tensor("visual.patch_embed", (vision.patch_inputs + 1) * vision.hidden, linear=False)
    blocks = (4 * vision.hidden * vision.hidden + 3 * vision.hidden * vision.intermediate) // tp + 2 * vision.hidden
    yield Tensor("visual.blocks", blocks, vision.depth, linear=False)
    projector = (vision.hidden * vision.output + vision.output * vision.output) // tp
    yield Tensor("visual.merger", vision.merged * vision.hidden + vision.hidden + projector, linear=False)


def _qwen_tower(vision: Vision, tp: int) -> Iterator[Tensor]:
    """The Qwen3-VL tower with biases; blocks and merger split over the ranks, embeddings copied."""
    yield Tensor("visual.patch_embed", vision.patch_inputs * vision.hidden + vision.hidden, linear=False)
    yield Tensor("visual.pos_embed", vision.positions * vision.hidden, linear=False)
    attention = (4 * vision.hidden * vision.hidden + 3 * vision.hidden) // tp + vision.hidden
    mlp = (2 * vision.hidden * vision.intermediate + vision.intermediate) // tp + vision.hidden
    yield Tensor("visual.blocks", attention + mlp + 4 * vision.hidden, vision.depth, linear=False)
    merger = (vision.merged * vision.merged + vision.merged + vision.merged * vision.output) // tp + vision.output
    yield Tensor("visual.merger", merger + 2 * vision.hidden, linear=False)
