"""A small checkpoint that is whole, in any of the formats, and the safetensors file format by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1}


def safetensors(tensors: Mapping[str, tuple[str, list[int]]]) -> bytes:
    """A file of zeros with these tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        size = BYTES[dtype]
        for side in shape:
            size *= side
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(position)


PLAIN = {"model.embed_tokens.weight": ("BF16", [16, 8]), "model.layers.0.mlp.down_proj.weight": ("BF16", [256, 512])}
LAYER = "model.layers.0.mlp.down_proj"
# A matrix of 256 inputs and 512 outputs in each format.
QUANTISED: dict[str, tuple[dict[str, Any], dict[str, tuple[str, list[int]]]]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        {
            f"{LAYER}.qweight": ("I32", [256, 64]),
            f"{LAYER}.qzeros": ("I32", [2, 64]),
            f"{LAYER}.scales": ("F16", [2, 512]),
        },
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
        {f"{LAYER}.qweight": ("I32", [32, 512]), f"{LAYER}.scales": ("F16", [2, 512])},
    ),
    "fp8": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        {f"{LAYER}.weight": ("F8_E4M3", [512, 256]), f"{LAYER}.weight_scale_inv": ("BF16", [4, 2])},
    ),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128, "symmetric": True}}},
        },
        {f"{LAYER}.weight_packed": ("I32", [512, 32]), f"{LAYER}.weight_scale": ("BF16", [512, 2])},
    ),
}


def checkpoint(kind: str = "bf16") -> dict[str, bytes]:
    """The files of a whole checkpoint in two shards with an index."""
    config: dict[str, Any] = {"architectures": ["TinyForCausalLM"], "model_type": "tiny"}
    second = PLAIN
    if kind != "bf16":
        config["quantization_config"], second = QUANTISED[kind]
    first = {"lm_head.weight": ("BF16", [16, 8])}
    shards = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    index = {name: file for file, tensors in shards.items() for name in tensors}
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": b"{}",
        "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}).encode(),
        "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": index}).encode(),
        **{file: safetensors(tensors) for file, tensors in shards.items()},
    }


def change_json(files: dict[str, bytes], path: str, **changes: Any) -> None:
    """Set keys of a JSON file; None takes one away."""
    content = {**json.loads(files[path]), **changes}
    files[path] = json.dumps({key: value for key, value in content.items() if value is not None}).encode()


def write(directory: Path, files: Mapping[str, bytes]) -> Path:
    for path, data in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return directory
