"""Memory of LoRA adapters: what an engine keeps on each GPU for the adapters that run at once.

The engine reserves the buffers at start, for every module it wraps and every slot, at the largest rank; which adapters
are in them changes nothing. Source: vLLM 0.24 and 0.32, lora/layers (create_lora_weights of base_linear.py,
column_parallel_linear.py, fused_moe.py, vocab_parallel_embedding.py, logits_processor.py) and lora/model_manager.py
(_create_lora_modules). SGLang 0.5.23 keeps buffers of the same shapes (srt/lora/mem_pool.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from metalserve.errors import Refusal
from metalserve.planner.shape import Shape, pipeline_stages
from metalserve.planner.units import ceil_div

# config/lora.py of vLLM 0.17 to 0.33, MaxLoRARanks.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# lora/layers/logits_processor.py of vLLM 0.24: a larger vocabulary stops the start when lm_head is adapted.
LARGEST_VOCABULARY = 258048
# Architectures whose checkpoints have the experts of a layer in one tensor; their gate and up projections share one A
# (`is_3d_moe_weight` in vLLM's models: qwen3_5.py, qwen3_vl_moe.py, gpt_oss.py).
_STACKED_EXPERTS = ("Qwen3_5Moe", "Qwen3VLMoe", "GptOss")
_BYTES = 2
EXPERT_NAMES = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj", "experts"})


@dataclass(frozen=True)
class Adapters:
    """The adapters of a deployment, as far as memory depends on them.

    `rank` is the largest of them, `slots` how many run in one step, `modules` the names that they adapt; None: all that
    the engine wraps.
    """

    rank: int
    slots: int
    modules: frozenset[str] | None = None


@dataclass(frozen=True)
class Wrapped:
    """Equal modules that the engine wraps, on one GPU.

    `inputs` and `outputs` in elements; the engine keeps `slices` matrices A of rank x inputs and together outputs x
    rank elements of B, each `count` times. `names` are those by which an adapter means the module.
    """

    name: str
    names: frozenset[str]
    inputs: int
    outputs: int
    slices: int = 1
    count: int = 1

    def elements(self, rank: int) -> int:
        """Elements of one slot."""
        return rank * (self.slices * self.inputs + self.outputs) * self.count


def buffer_rank(rank: int) -> int:
    """The rank that vLLM's buffers get: the smallest it takes that holds this one.

    Raises:
        Refusal: a rank beyond the largest.
    """
    for known in VLLM_RANKS:
        if rank <= known:
            return known
    raise Refusal(
        found=f"a LoRA adapter of rank {rank}",
        needed=f"at most {VLLM_RANKS[-1]}, the largest that vLLM takes",
        change="an adapter of a smaller rank, or merge it into the weights and serve these as a model",
    )


@lru_cache(maxsize=512)
def adapter_bytes(
    shape: Shape,
    adapters: Adapters | None,
    *,
    tensor_parallel_size: int = 1,
    data_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel: bool = False,
) -> int:
    """Bytes of the buffers on the fullest GPU; 0 without adapters."""
    if adapters is None:
        return 0
    ranks = tensor_parallel_size * data_parallel_size
    total = max(
        sum(
            module.elements(adapters.rank)
            for module in wrapped_modules(stage, tensor_parallel_size, ranks, expert_parallel)
            if adapters.modules is None or module.names & adapters.modules
        )
        for stage in pipeline_stages(shape, pipeline_parallel_size)
    )
    return total * adapters.slots * _BYTES


def buffers_sentence(adapters: Adapters) -> str:
    """What the buffers are for, as the end of a sentence."""
    modules = ", ".join(sorted(adapters.modules)) if adapters.modules else "every module"
    return f"buffers of {adapters.slots} adapter{'s' * (adapters.slots > 1)} of rank {adapters.rank} for {modules}"


def module_names(shape: Shape) -> frozenset[str]:
    """Every name by which an adapter can mean a module of the model."""
    return frozenset().union(*(module.names for module in wrapped_modules(shape)))


def check_modules(key: str, adapter: str, names: Iterable[str], shape: Shape) -> None:
    """Refuse an adapter of modules that the model does not have: it belongs to another model.

    Raises:
        Refusal: naming them, and those the model has.
    """
    known = module_names(shape)
    strange = sorted({name.rsplit(".", 1)[-1] for name in names} - known)
    if strange:
        raise Refusal(
            found=f"the adapter {adapter} of modules {', '.join(strange)}, which {key} does not have",
            needed=f"modules out of {', '.join(sorted(known))}",
            change=f"the adapter in lora_adapters, or `model`: it was made for another model than {key}",
        )


def wrapped_modules(
    shape: Shape, tp: int = 1, expert_ranks: int = 1, expert_parallel: bool = False
) -> Iterator[Wrapped]:
    """What the engine wraps. Vocabulary tables are not split over the GPUs."""
    yield Wrapped("embed_tokens", frozenset({"embed_tokens"}), shape.vocabulary, shape.hidden)
    yield Wrapped("lm_head", frozenset({"lm_head"}), shape.hidden, shape.vocabulary)
    yield from _attention(shape, tp, len(shape.layers) - shape.linear_layers)
    yield from _gated_delta_net(shape, tp, shape.linear_layers)
    if shape.dense_layers and shape.intermediate:
        yield from _mlp(shape.hidden, shape.intermediate, tp, shape.dense_layers)
    if shape.experts and shape.moe_layers:
        yield from _experts(shape, tp, expert_ranks, expert_parallel, shape.moe_layers)


def _attention(shape: Shape, tp: int, layers: int) -> Iterator[Wrapped]:
    if not layers:
        return
    heads = ceil_div(shape.heads, tp)
    if mla := shape.mla:
        query = heads * (mla.nope_dim + mla.rope_dim)
        latent = mla.kv_rank + mla.rope_dim
        if mla.query_rank:
            names = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj"})
            yield Wrapped("fused_qkv_a_proj", names, shape.hidden, mla.query_rank + latent, 2, layers)
            yield Wrapped("q_b_proj", frozenset({"q_b_proj"}), mla.query_rank, query, 1, layers)
        else:
            yield Wrapped("q_proj", frozenset({"q_proj"}), shape.hidden, query, 1, layers)
            names = frozenset({"kv_a_proj_with_mqa"})
            yield Wrapped("kv_a_proj_with_mqa", names, shape.hidden, latent, 1, layers)
        expand = heads * (mla.nope_dim + mla.value_dim)
        yield Wrapped("kv_b_proj", frozenset({"kv_b_proj"}), mla.kv_rank, expand, 1, layers)
        yield Wrapped("o_proj", frozenset({"o_proj"}), heads * mla.value_dim, shape.hidden, 1, layers)
        return
    query = heads * shape.head_dim * (2 if shape.output_gate else 1)
    keys = max(1, shape.kv_heads // tp) * shape.head_dim
    names = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj"})
    yield Wrapped("qkv_proj", names, shape.hidden, query + 2 * keys, 3, layers)
    yield Wrapped("o_proj", frozenset({"o_proj"}), heads * shape.head_dim, shape.hidden, 1, layers)


def _gated_delta_net(shape: Shape, tp: int, layers: int) -> Iterator[Wrapped]:
    if not shape.gdn or not layers:
        return
    gdn = shape.gdn
    keys, values = gdn.key_heads * gdn.key_head_dim // tp, gdn.value_heads * gdn.value_head_dim // tp
    names = frozenset({"in_proj_qkv", "in_proj_z", "in_proj_qkvz"})
    yield Wrapped("in_proj_qkvz", names, shape.hidden, 2 * keys + 2 * values, 4, layers)
    names = frozenset({"in_proj_b", "in_proj_a", "in_proj_ba"})
    yield Wrapped("in_proj_ba", names, shape.hidden, 2 * gdn.value_heads // tp, 2, layers)
    yield Wrapped("conv1d", frozenset({"conv1d"}), gdn.conv_kernel, gdn.conv_dim // tp, 1, layers)
    yield Wrapped("out_proj", frozenset({"out_proj"}), values, shape.hidden, 1, layers)


def _mlp(hidden: int, intermediate: int, tp: int, layers: int) -> Iterator[Wrapped]:
    width = ceil_div(intermediate, tp)
    names = frozenset({"gate_proj", "up_proj", "gate_up_proj"})
    yield Wrapped("gate_up_proj", names, hidden, 2 * width, 2, layers)
    yield Wrapped("down_proj", frozenset({"down_proj"}), width, hidden, 1, layers)


def _experts(shape: Shape, tp: int, ranks: int, expert_parallel: bool, layers: int) -> Iterator[Wrapped]:
    experts = shape.experts
    if experts is None:
        return
    count = ceil_div(experts.count, ranks) if expert_parallel else experts.count
    width = experts.intermediate if expert_parallel else ceil_div(experts.intermediate, ranks)
    slices = 1 if shape.architecture.startswith(_STACKED_EXPERTS) else 2
    # Two pairs in one: A of gate and up (hidden each) and of down (width); B of gate and up (width each) and of down.
    inputs = slices * shape.hidden + width
    yield Wrapped("experts", EXPERT_NAMES, inputs, 2 * width + shape.hidden, 1, layers * count)
    yield Wrapped("gate", frozenset({"gate"}), shape.hidden, experts.count, 1, layers)
    if experts.shared_intermediate:
        yield from _mlp(shape.hidden, experts.shared_intermediate, tp, layers)
    if experts.shared_gate:
        yield Wrapped("shared_expert_gate", frozenset({"shared_expert_gate"}), shape.hidden, 1, 1, layers)
