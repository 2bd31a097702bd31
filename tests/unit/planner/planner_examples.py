"""Fixtures of the planner's tests, read once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent / "fixtures"

H200 = json.loads((FIXTURES / "h200_runs.json").read_text())
PREDICTED = json.loads((FIXTURES / "h200_predicted.json").read_text())
ADAPTERS_DRAFTS = json.loads((FIXTURES / "h200_adapters_drafts.json").read_text())
SHAPES = json.loads((FIXTURES / "h200_shapes.json").read_text())
CAPACITY = json.loads((FIXTURES / "vllm_033_capacity.json").read_text())

# A tiny hybrid mixture of experts: 3 linear and 1 full attention layers.
TINY: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attn_output_gate": True,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "vocab_size": 320,
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
}
