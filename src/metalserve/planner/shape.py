"""The shape of a model: the fields of config.json that decide memory and parallelism, read once and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from metalserve.errors import Refusal

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Chunked local attention: the engine's hybrid manager is off for it by default, so its layers keep every token
# (vLLM 0.32 config/vllm.py).
CHUNKED = "chunked_attention"
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
# What to do about layers that are not known here.
_CONSERVATIVE = (
    "describe the model under `serving_models` with full_attention layers only (leave layer_types and the fields of "
    "other layers out): such a plan keeps more memory than the model needs, never less; or plan another model"
)

# Towers beside Qwen's, by the beginning of the architecture's name, and the fields that they are counted from.
_TOWERS = {"Gemma3": "siglip", "Mistral3": "pixtral"}
_TOWER_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")

# State-space layers other than Gated DeltaNet have states of another form, which is not planned here.
_OTHER_STATES = ("mamba_d_state", "ssm_state_size", "mamba_num_heads", "short_conv_kernel")


@dataclass(frozen=True)
class GatedDeltaNet:
    """Sizes of the linear-attention layers (heads and head sizes in elements)."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    state_dtype: str | None
    """`mamba_ssm_dtype` of the checkpoint; None when it does not say."""

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys and values together."""
        return 2 * self.key_heads * self.key_head_dim + self.value_heads * self.value_head_dim


@dataclass(frozen=True)
class Mla:
    """Sizes of multi-head latent attention (elements)."""

    kv_rank: int
    query_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class Experts:
    """Sizes of the mixture of experts (elements; `shared_intermediate` is the sum over shared experts)."""

    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int
    shared_gate: bool


@dataclass(frozen=True)
class Vision:
    """Sizes of a vision tower (elements). `kind`: qwen (Qwen3-VL), siglip (Gemma 3) or pixtral (Mistral 3)."""

    depth: int
    hidden: int
    intermediate: int
    heads: int
    patch_inputs: int
    positions: int
    merged: int
    output: int
    kind: str = "qwen"


@dataclass(frozen=True)
class Quantization:
    """What quantization_config says, reduced to what decides bytes and alignment.

    `block` is the (output, input) block of block-wise FP8; `group` the group length of 4-bit formats, None when
    there is one scale per channel.
    """

    method: str
    bits: int
    block: tuple[int, int] | None
    group: int | None
    symmetric: bool
    excluded: tuple[str, ...]
    targets: tuple[tuple[tuple[str, ...], int, int | None], ...]
    """For mixed precision: (module names, bits, group) in order; empty: the method applies to all linear layers."""
    kv_cache_dtype: str | None
    """KV dtype that `auto` becomes, when the checkpoint declares one."""


@dataclass(frozen=True)
class Shape:
    """One model, as far as memory and parallelism depend on it (sizes in elements, lengths in tokens)."""

    architecture: str
    hidden: int
    layers: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_position_tokens: int
    rotary_dim: int
    rotary_positions: int
    sliding_rotary_positions: int
    """Positions of a second rotary table, of the sliding-window layers."""
    intermediate: int
    moe_at: tuple[int, ...]
    """Places of the layers with experts, from 0."""
    attention_bias: bool
    query_norm: bool
    output_gate: bool
    tied_embeddings: bool
    draft_layers: int
    sliding_window_tokens: int | None
    gdn: GatedDeltaNet | None
    mla: Mla | None
    experts: Experts | None
    vision: Vision | None
    quantization: Quantization | None
    dtype: str
    multimodal: bool

    @property
    def full_layers(self) -> int:
        """Layers that keep keys and values of every token."""
        return self.layers.count(FULL)

    @property
    def sliding_layers(self) -> int:
        """Layers that keep keys and values of a window."""
        return self.layers.count(SLIDING)

    @property
    def linear_layers(self) -> int:
        """Layers that keep a state of fixed size."""
        return self.layers.count(LINEAR)

    @property
    def hybrid(self) -> bool:
        """Whether some layers keep a fixed state instead of keys and values."""
        return self.linear_layers > 0

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return len(self.moe_at)

    @property
    def dense_layers(self) -> int:
        """Layers with an ordinary MLP."""
        return len(self.layers) - self.moe_layers


def read_shape(config: Mapping[str, Any]) -> Shape:
    """Read a parsed config.json; the numbers of a multimodal model are in its `text_config`.

    Raises:
        Refusal: a needed field is missing or not a whole number, or the layers are of an unknown kind.
    """
    if not isinstance(config, Mapping):
        raise _refuse(f"the config is a {type(config).__name__}", "a mapping: the parsed config.json")
    text: Mapping[str, Any] = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise _refuse("text_config is not a mapping", "a mapping, as in config.json")
    architecture = str((config.get("architectures") or [config.get("model_type") or "unknown"])[0])
    for field in _OTHER_STATES:
        if field in text and "linear_num_value_heads" not in text:
            raise _refuse(
                f"{architecture} has state-space layers of another kind ({field})",
                "attention, sliding-window attention or Gated DeltaNet layers",
                _CONSERVATIVE,
            )
    absent = [field for field in _REQUIRED if not _is_whole(text.get(field))]
    if len(absent) > 1:
        raise _refuse(
            f"the shape of {architecture} has no {', '.join(absent)}",
            f"whole numbers, at least 1, for {', '.join(_REQUIRED)}",
        )
    layer_count = _whole(text, "num_hidden_layers")
    hidden = _whole(text, "hidden_size")
    heads = _whole(text, "num_attention_heads")
    head_dim = int(text.get("head_dim") or hidden // heads)
    layers = _layers(text, layer_count)
    gdn = _gdn(text) if LINEAR in layers else None
    mla = _mla(text)
    experts = _experts(text)
    maximum = _whole(text, "max_position_embeddings")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    partial = float(text.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0)
    rotary = mla.rope_dim if mla else int(text.get("rotary_dim") or head_dim * partial)
    positions, sliding_positions = _rotary_positions(architecture, rope, maximum)
    return Shape(
        architecture=architecture,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocabulary=_whole(text, "vocab_size"),
        max_position_tokens=maximum,
        rotary_dim=rotary,
        rotary_positions=positions,
        sliding_rotary_positions=sliding_positions,
        intermediate=int(text.get("intermediate_size") or 0),
        moe_at=_moe_at(text, layer_count) if experts else (),
        attention_bias=bool(text.get("attention_bias", architecture.startswith("Qwen2"))),
        query_norm=bool(text.get("use_qk_norm", architecture.startswith(("Qwen3", "Gemma3")))),
        output_gate=bool(text.get("attn_output_gate", architecture.startswith(("Qwen3Next", "Qwen3_5")))),
        tied_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        draft_layers=int(text.get("mtp_num_hidden_layers") or text.get("num_nextn_predict_layers") or 0),
        sliding_window_tokens=int(text["sliding_window"]) if SLIDING in layers else None,
        gdn=gdn,
        mla=mla,
        experts=experts,
        vision=_vision(config.get("vision_config"), architecture, hidden),
        quantization=read_quantization(config.get("quantization_config") or text.get("quantization_config")),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16"),
        multimodal="vision_config" in config or architecture.endswith("ForConditionalGeneration"),
    )


def _rotary_positions(architecture: str, rope: Mapping[str, Any], maximum: int) -> tuple[int, int]:
    """Positions of the rotary tables: of all layers, and of sliding-window layers that have one of their own.

    M-RoPE keeps four times the context (rotary_embedding/mrope.py), linear scaling as many times as it scales
    (linear_scaling_rope.py). Gemma 3 has a second table for its local layers (models/gemma3.py); its `rope_parameters`
    may have one entry for each kind of layer.
    """
    kinds = {kind: entry for kind, entry in rope.items() if isinstance(entry, Mapping)}
    local = maximum if architecture.startswith("Gemma3") or SLIDING in kinds else 0
    rope = kinds.get(FULL, rope)
    if rope.get("mrope_section"):
        return maximum * 4, local
    if (rope.get("rope_type") or rope.get("type")) == "linear":
        return int(maximum * float(rope.get("factor") or 1)), local
    return maximum, local


def read_quantization(config: Mapping[str, Any] | None) -> Quantization | None:
    """Read a quantization_config; None for a 16-bit checkpoint.

    Raises:
        Refusal: an unknown method.
    """
    if not config:
        return None
    method = str(config.get("quant_method", "")).lower()
    excluded = config.get("modules_to_not_convert") or config.get("ignore") or config.get("exclude_modules") or []
    bits, group, symmetric, block = 8, None, True, None
    targets: tuple[tuple[tuple[str, ...], int, int | None], ...] = ()
    if method == "fp8":
        size = config.get("weight_block_size")
        block = (int(size[0]), int(size[1])) if size else None
    elif method in ("awq", "gptq", "auto-round"):
        bits = int(config.get("bits", config.get("w_bit", 4)))
        group = int(config.get("group_size", config.get("q_group_size", 128)))
        symmetric = not config.get("zero_point", True) if method == "awq" else bool(config.get("sym", True))
    elif method in ("compressed-tensors", "modelopt"):
        groups = [g for g in (config.get("config_groups") or {}).values() if g.get("weights")]
        read = tuple(
            (
                tuple(str(t) for t in g.get("targets") or ()),
                int(g["weights"].get("num_bits", 8)),
                _group(g["weights"].get("group_size")),
            )
            for g in groups
        )
        if read:
            bits, group = read[0][1], read[0][2]
            symmetric = bool(groups[0]["weights"].get("symmetric", True))
        elif "FP4" in str(config.get("quant_algo", "")):
            bits, group = 4, 16
        # `Linear` names every linear layer; anything else is a list of modules.
        targets = () if len(read) <= 1 and (not read or read[0][0] in ((), ("Linear",))) else read
    elif method == "mxfp4":
        bits, group = 4, 32
        targets = ((("mlp.experts",), 4, 32),)
    else:
        raise _refuse(
            f"the quantisation method {method or 'without a name'} is not known",
            "fp8, awq, gptq, auto-round, compressed-tensors, modelopt, mxfp4, or a 16-bit checkpoint",
        )
    return Quantization(
        method=method,
        bits=bits,
        block=block,
        group=_group(group),
        symmetric=symmetric,
        excluded=tuple(str(name) for name in excluded),
        targets=targets,
        kv_cache_dtype=_declared_kv_dtype(config),
    )


def _group(value: int | str | None) -> int | None:
    return int(value) if value and int(value) > 0 else None


def _declared_kv_dtype(config: Mapping[str, Any]) -> str | None:
    """Such a checkpoint turns `auto` into 8 or 4 bit (vLLM utils/torch_utils.py:resolve_kv_cache_dtype_string)."""
    algorithm = str(config.get("kv_cache_quant_algo") or "").upper()
    scheme = config.get("kv_cache_scheme") or {}
    if algorithm == "FP8" or (scheme.get("num_bits") == 8 and scheme.get("type") == "float"):
        return "fp8"
    return "nvfp4" if algorithm == "NVFP4" else None


def _refuse(found: str, needed: str, change: str = "correct the model's `shape`, or plan another model") -> Refusal:
    return Refusal(found=found, needed=needed, change=change)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _whole(text: Mapping[str, Any], field: str) -> int:
    value = text.get(field)
    if not _is_whole(value):
        raise _refuse(f"the model's shape has {field} {value!r}", f"{field} as a whole number, at least 1")
    return int(value)  # type: ignore[arg-type]


def _layers(text: Mapping[str, Any], count: int) -> tuple[str, ...]:
    listed = text.get("layer_types")
    if listed:
        if len(listed) != count:
            raise _refuse(f"layer_types names {len(listed)} layers", f"{count}, as num_hidden_layers says")
        strange = sorted(set(map(str, listed)) - {FULL, SLIDING, LINEAR, CHUNKED})
        if strange:
            raise _refuse(
                f"layer_types has layers of kind {strange[0]!r}",
                f"{FULL}, {SLIDING}, {CHUNKED} or {LINEAR}",
                _CONSERVATIVE,
            )
        return tuple(FULL if kind == CHUNKED else kind for kind in listed)
    if "linear_num_value_heads" in text:
        # transformers' default for Qwen3-Next and Qwen3.5: every n-th layer is full attention.
        interval = int(text.get("full_attention_interval") or 4)
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(count))
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        pattern = text.get("sliding_window_pattern")
        if pattern:
            return tuple(FULL if (i + 1) % int(pattern) == 0 else SLIDING for i in range(count))
        return (SLIDING,) * count
    return (FULL,) * count


def _gdn(text: Mapping[str, Any]) -> GatedDeltaNet:
    return GatedDeltaNet(
        key_heads=_whole(text, "linear_num_key_heads"),
        value_heads=_whole(text, "linear_num_value_heads"),
        key_head_dim=_whole(text, "linear_key_head_dim"),
        value_head_dim=_whole(text, "linear_value_head_dim"),
        conv_kernel=_whole(text, "linear_conv_kernel_dim"),
        state_dtype=text.get("mamba_ssm_dtype"),
    )


def _mla(text: Mapping[str, Any]) -> Mla | None:
    if not text.get("kv_lora_rank"):
        return None
    return Mla(
        kv_rank=_whole(text, "kv_lora_rank"),
        query_rank=text.get("q_lora_rank"),
        nope_dim=_whole(text, "qk_nope_head_dim"),
        rope_dim=_whole(text, "qk_rope_head_dim"),
        value_dim=_whole(text, "v_head_dim"),
    )


def _experts(text: Mapping[str, Any]) -> Experts | None:
    count = text.get("num_experts") or text.get("n_routed_experts") or text.get("num_local_experts")
    if not count:
        return None
    intermediate = text.get("moe_intermediate_size") or text.get("intermediate_size")
    if not intermediate:
        raise _refuse("the shape has experts without moe_intermediate_size", "moe_intermediate_size")
    shared = text.get("shared_expert_intermediate_size")
    shared_gate = shared is not None
    if shared is None:
        number = int(text.get("n_shared_experts") or 0)
        shared = number * int(intermediate) if number else int(text.get("shared_intermediate_size") or 0)
    return Experts(
        count=int(count),
        per_token=int(text.get("num_experts_per_tok") or text.get("experts_per_token") or 1),
        intermediate=int(intermediate),
        shared_intermediate=int(shared),
        shared_gate=shared_gate and int(shared) > 0,
    )


def pipeline_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each pipeline stage: the remainder goes to the second-last stage and those before it.

    Source: vllm/distributed/utils.py:get_pp_indices.
    """
    split = [layers // stages] * stages
    for i in range(2, layers % stages + 2):
        split[-i] += 1
    return tuple(split)


def pipeline_stages(shape: Shape, stages: int) -> Iterator[Shape]:
    """The layers of each pipeline stage, as shapes of their own."""
    begin = 0
    for count in pipeline_layers(len(shape.layers), stages):
        end = begin + count
        experts = tuple(place - begin for place in shape.moe_at if begin <= place < end)
        yield replace(shape, layers=shape.layers[begin:end], moe_at=experts)
        begin = end


def _moe_at(text: Mapping[str, Any], count: int) -> tuple[int, ...]:
    first_dense = int(text.get("first_k_dense_replace") or 0)
    dense = set(text.get("mlp_only_layers") or ())
    step = int(text.get("decoder_sparse_step") or 1)
    return tuple(i for i in range(count) if i >= first_dense and i not in dense and (i + 1) % step == 0)


def _vision(config: Mapping[str, Any] | None, architecture: str, hidden: int) -> Vision | None:
    """The tower of Qwen3-VL, Gemma 3 or Mistral 3; None for others: their bytes are left to the safetensors headers."""
    kind = next((kind for name, kind in _TOWERS.items() if architecture.startswith(name)), None)
    if config and kind and all(_is_whole(config.get(field)) for field in _TOWER_FIELDS):
        width, patch = int(config["hidden_size"]), int(config["patch_size"])
        side = int(config.get("image_size", 0)) // patch
        return Vision(
            depth=int(config["num_hidden_layers"]),
            hidden=width,
            intermediate=int(config["intermediate_size"]),
            heads=int(config["num_attention_heads"]),
            patch_inputs=int(config.get("num_channels", 3)) * patch * patch,
            positions=side * side if kind == "siglip" else 0,
            merged=width * int(config.get("spatial_merge_size", 2)) ** 2,
            output=hidden,
            kind=kind,
        )
    if not config or "out_hidden_size" not in config or "depth" not in config:
        return None
    patch = int(config.get("patch_size", 16))
    return Vision(
        depth=int(config["depth"]),
        hidden=int(config["hidden_size"]),
        intermediate=int(config["intermediate_size"]),
        heads=int(config["num_heads"]),
        patch_inputs=int(config.get("in_channels", 3)) * int(config.get("temporal_patch_size", 2)) * patch * patch,
        positions=int(config.get("num_position_embeddings", 0)),
        merged=int(config["hidden_size"]) * int(config.get("spatial_merge_size", 2)) ** 2,
        output=int(config["out_hidden_size"]),
    )
