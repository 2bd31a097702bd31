"""Which tensor parallel sizes a model can run with, and why the others fail.

Rules and messages: vLLM 0.33 (config/model.py, layers/linear.py, layers/quantization/fp8.py, fused_moe/layer.py)
and SGLang 0.5.23 (layers/linear.py, quantization/fp8.py); both check the same alignments, SGLang without words.
"""

from __future__ import annotations

from metalserve.planner.shape import Shape
from metalserve.planner.units import ceil_div
from metalserve.planner.weights import VOCABULARY_PADDING

# Output columns and input rows one rank must keep for the Marlin kernels of 4-bit weights.
MARLIN_OUTPUT, MARLIN_INPUT = 64, 128


def tensor_parallel_problems(
    shape: Shape,
    tensor_parallel_size: int,
    *,
    engine: str = "vllm",
    expert_parallel: bool = False,
    text_only: bool = False,
    expert_ranks: int | None = None,
) -> list[str]:
    """Sentences that say why this size fails; empty when it is valid.

    `expert_ranks`: number of ranks the routed experts are spread over, when that is more than the tensor
    parallel size (data parallel replicas of a mixture of experts share them).
    """
    tp = tensor_parallel_size
    if tp < 1:
        return [f"tensor_parallel_size {tp} is below 1"]
    problems = _head_problems(shape, tp, text_only)
    padded = ceil_div(shape.vocabulary, VOCABULARY_PADDING) * VOCABULARY_PADDING
    if padded % tp:
        problems.append(f"the vocabulary, padded to {padded}, is not divisible by {tp}")
    if shape.dense_layers and shape.intermediate % tp:
        problems.append(f"intermediate_size {shape.intermediate} is not divisible by {tp}")
    ranks = expert_ranks or tp
    if experts := shape.experts:
        if tp > experts.count:
            problems.append(f"{tp} is more than the {experts.count} experts")
        if not expert_parallel and experts.intermediate % ranks:
            problems.append(f"moe_intermediate_size {experts.intermediate} is not divisible by {ranks}")
        if experts.shared_intermediate % tp:
            problems.append(f"the shared experts' size {experts.shared_intermediate} is not divisible by {tp}")
        if expert_parallel and engine == "sglang" and experts.count % ranks:
            problems.append(f"{experts.count} experts are not divisible by {ranks} ranks")
    if not problems:
        problems = _quantization_problems(shape, tp, ranks, expert_parallel, engine)
    return problems


def valid_tensor_parallel_sizes(
    shape: Shape, limit: int, *, engine: str = "vllm", expert_parallel: bool = False, text_only: bool = False
) -> list[int]:
    """All valid sizes from 1 to the limit, in rising order."""
    return [
        tp
        for tp in range(1, limit + 1)
        if not tensor_parallel_problems(shape, tp, engine=engine, expert_parallel=expert_parallel, text_only=text_only)
    ]


def _head_problems(shape: Shape, tp: int, text_only: bool) -> list[str]:
    problems = []
    if shape.heads % tp:
        problems.append(f"{shape.heads} attention heads are not divisible by {tp}")
    if not shape.mla and shape.kv_heads % tp and tp % shape.kv_heads:
        problems.append(f"{shape.kv_heads} KV heads neither divide {tp} nor are divisible by it")
    if gdn := shape.gdn:
        if gdn.value_heads % tp:
            problems.append(f"{gdn.value_heads} linear-attention value heads are not divisible by {tp}")
        if gdn.key_heads % tp:
            problems.append(f"{gdn.key_heads} linear-attention key heads are not divisible by {tp}")
    if shape.vision and not text_only and shape.vision.heads % tp:
        problems.append(f"{shape.vision.heads} vision heads are not divisible by {tp}")
    return problems


def _inputs(shape: Shape, tp: int) -> list[tuple[str, int]]:
    """Input width per rank of every row-parallel projection."""
    rows = []
    if shape.full_layers or shape.sliding_layers:
        value = shape.mla.value_dim if shape.mla else shape.head_dim
        rows.append(("the attention output projection", shape.heads * value // tp))
    if shape.gdn:
        rows.append(("the linear-attention output projection", shape.gdn.value_heads * shape.gdn.value_head_dim // tp))
    if shape.dense_layers:
        rows.append(("the MLP's down projection", shape.intermediate // tp))
    if shape.experts and shape.experts.shared_intermediate:
        rows.append(("the shared experts' down projection", shape.experts.shared_intermediate // tp))
    return rows


def _quantization_problems(shape: Shape, tp: int, ranks: int, expert_parallel: bool, engine: str) -> list[str]:
    quantization = shape.quantization
    if quantization is None or tp == ranks == 1:
        return []
    problems = []
    if quantization.method == "fp8" and quantization.block:
        _, block = quantization.block
        # vLLM checks layers that are split; rank widths of an unsplit layer are the checkpoint's own business.
        if tp > 1:
            problems += [
                f"{name} keeps {width} inputs per GPU, not a multiple of the FP8 block of {block}"
                for name, width in _inputs(shape, tp)
                if width % block
            ]
        experts = shape.experts
        if experts and not expert_parallel:
            width = experts.intermediate // ranks
            # vLLM 0.33 refines expert blocks down to 32; older releases and SGLang refuse. The safe rule is kept.
            if width % block:
                problems.append(
                    f"each expert keeps {width} columns per GPU, not a multiple of the FP8 block of {block}"
                )
    elif quantization.bits == 4 and quantization.group and quantization.method != "mxfp4":
        group = quantization.group
        if not quantization.targets and tp > 1:
            problems += [
                f"{name} keeps {width} inputs per GPU, not a whole number of groups of {group}"
                for name, width in _inputs(shape, tp)
                if width % group
            ]
        experts = shape.experts
        if experts and not expert_parallel and experts.intermediate // ranks % group:
            problems.append(
                f"each expert keeps {experts.intermediate // ranks} columns per GPU, "
                f"not a whole number of groups of {group}"
            )
        if engine == "sglang" and group > 16 and tp > 1:
            problems += [
                f"{name} keeps {width} inputs per GPU, not a multiple of the {MARLIN_INPUT} that Marlin needs"
                for name, width in _inputs(shape, tp)
                if width % MARLIN_INPUT and width % group == 0
            ]
    return problems
