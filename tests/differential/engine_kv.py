"""Runs inside the engine's image: vLLM's own code answers KV-capacity questions, without a GPU and without weights.

Reads {"configs": {name: config.json}, "cases": [...]} on standard input and writes one answer for each case. The
engine's parts that are used as they are: transformers' reading of config.json, the state shapes and types of the model
class, FlashAttention's block sizes, Platform._align_hybrid_block_size, the cache specifications, get_kv_cache_configs
with its refusal, and get_kv_cache_capacity.
What is put in their place: the configuration objects are bare namespaces, because the engine builds real ones only for
a device it finds, and the layers are listed here instead of being taken from a loaded model.
"""

import json
import re
import sys
from types import SimpleNamespace
from unittest.mock import patch

import torch
from transformers import AutoConfig
from vllm.config import VllmConfig
from vllm.config.cache import _layout_from_name
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForConditionalGeneration
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
from vllm.platforms.interface import Platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)

LAYOUT = _layout_from_name("NHD")
STATE_CLASSES = {"qwen3_next": Qwen3NextForCausalLM}


def read_config(config):
    """The text part of config.json as transformers reads it, with its own defaults for what the file leaves out."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    kind = plain.pop("model_type")
    # Kimi K2 is DeepSeek-V3 under another name, which the engine maps as well.
    return AutoConfig.for_model({"kimi_k2": "deepseek_v3"}.get(kind, kind), **plain).get_text_config()


def engine_config(text, case):
    """What get_kv_cache_configs and the model class look at."""
    hybrid = "linear_attention" in (getattr(text, "layer_types", None) or ())
    latent = getattr(text, "kv_lora_rank", None)
    heads = text.num_key_value_heads
    tp = case["tensor_parallel_size"]
    drafts = case["num_speculative_tokens"]
    speculation = SimpleNamespace(
        num_speculative_tokens=drafts,
        method="mtp",
        use_eagle=lambda: True,
        use_eagle_block_drop=lambda: True,
        use_multi_module_mtp=lambda: False,
    )
    dtype = case["kv_cache_dtype"]
    state_dtype = getattr(text, "mamba_ssm_dtype", None) or "auto"
    own = VllmConfig.__new__(VllmConfig)
    values = {
        "model_config": SimpleNamespace(
            dtype=torch.bfloat16,
            architecture=case["name"],
            hf_config=text,
            hf_text_config=text,
            max_model_len=case["max_model_len"],
            original_max_model_len=case["max_model_len"],
            use_mla=latent is not None,
            get_num_kv_heads=lambda _: 1 if latent is not None else max(1, heads // tp),
            get_head_size=lambda: text.kv_lora_rank + text.qk_rope_head_dim if latent is not None else head_size(text),
        ),
        "cache_config": SimpleNamespace(
            block_size=16,
            cache_dtype={"fp8": "fp8_e4m3"}.get(dtype, dtype),
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype=state_dtype,
            mamba_cache_mode="align" if case["prefix_caching"] and hybrid else "none",
            mamba_block_size=None,
            mamba_page_size_padded=None,
            kv_cache_dtype_skip_layers=[],
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=0,
            get_resolved_kv_cache_layout=lambda: LAYOUT,
        ),
        "parallel_config": SimpleNamespace(
            tensor_parallel_size=tp,
            pipeline_parallel_size=case["pipeline_parallel_size"],
            decode_context_parallel_size=1,
        ),
        "scheduler_config": SimpleNamespace(
            disable_hybrid_kv_cache_manager=False,
            async_scheduling=True,
            max_num_batched_tokens=case["max_num_batched_tokens"],
        ),
        "attention_config": SimpleNamespace(hisparse_config=None),
        "speculative_config": speculation if drafts else None,
        "diffusion_config": None,
        "device_config": SimpleNamespace(device_type="cuda"),
    }
    for name, value in values.items():
        object.__setattr__(own, name, value)
    return own


def head_size(text):
    """As the engine's ModelConfig.get_head_size for plain attention."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def specifications(text, own, case):
    """One specification for each layer, draft layers behind the model's own."""
    model, cache = own.model_config, own.cache_config
    kinds = list(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)
    if getattr(text, "model_type", "") == "mistral" and not getattr(text, "sliding_window", None):
        kinds = ["full_attention"] * text.num_hidden_layers
    if case["num_speculative_tokens"]:
        kinds += ["full_attention"] * case["draft_layers"]
    state_class = STATE_CLASSES.get(text.model_type, Qwen3_5ForConditionalGeneration)
    if "linear_attention" in kinds:
        with (
            patch.object(ModelRegistry, "resolve_model_cls", lambda *_, **__: (state_class, None)),
            patch.object(Platform, "_find_non_ssm_backends", classmethod(lambda *_: [FlashAttentionBackend])),
        ):
            Platform._align_hybrid_block_size(own, FlashAttentionBackend)
    kv_dtype = model.dtype if cache.cache_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[cache.cache_dtype]
    common = {
        "num_kv_heads": model.get_num_kv_heads(None),
        "head_size": model.get_head_size(),
        "dtype": kv_dtype,
        "kv_quant_mode": get_kv_quant_mode(cache.cache_dtype),
    }
    found = {}
    for place, kind in enumerate(kinds):
        name = f"model.layers.{place}.attn"
        if kind == "linear_attention":
            found[name] = MambaSpec(
                shapes=tuple(state_class.get_mamba_state_shape_from_config(own)),
                dtypes=state_class.get_mamba_state_dtype_from_config(own),
                block_size=cache.mamba_block_size or case["max_model_len"],
                page_size_padded=cache.mamba_page_size_padded,
                mamba_cache_mode=cache.mamba_cache_mode,
                num_speculative_blocks=case["num_speculative_tokens"],
            )
        elif model.use_mla:
            found[name] = MLAAttentionSpec(block_size=cache.block_size, cache_dtype_str=cache.cache_dtype, **common)
        elif kind == "sliding_attention":
            found[name] = SlidingWindowSpec(block_size=cache.block_size, sliding_window=text.sliding_window, **common)
        else:
            found[name] = FullAttentionSpec(block_size=cache.block_size, **common)
    return found


def stages(found, text, size):
    """The layers of each pipeline stage; draft layers live on the last."""
    own = text.num_hidden_layers
    names = list(found)
    parts = []
    for rank in range(size):
        start, end = get_pp_indices(own, rank, size)
        parts.append({name: found[name] for name in names[start:end]})
    parts[-1].update({name: found[name] for name in names[own:]})
    return parts


def answer(text, case):
    """Block size, blocks, tokens and concurrency; or the longest length the engine's refusal names."""
    own = engine_config(text, case)
    parts = stages(specifications(text, own, case), text, case["pipeline_parallel_size"])
    try:
        made = get_kv_cache_configs(own, parts, [case["available_bytes"]] * len(parts))
    except ValueError as error:
        longest = re.search(r"estimated maximum model length is (\d+)", str(error))
        return {"refused": True, "longest": int(longest[1]) if longest else 0}
    tokens, concurrency = get_kv_cache_capacity(own, made[0])
    return {
        "refused": False,
        "block_size_tokens": own.cache_config.block_size,
        "num_blocks": made[0].num_blocks,
        "capacity_tokens": tokens,
        "max_concurrency": concurrency,
    }


def main():
    asked = json.load(sys.stdin)
    texts = {name: read_config(config) for name, config in asked["configs"].items()}
    # On a GPU the V2 runner is this release's default for every model.
    with patch.object(VllmConfig, "use_v2_model_runner", True):
        json.dump([answer(texts[case["name"]], case) for case in asked["cases"]], sys.stdout)


if __name__ == "__main__":
    main()
