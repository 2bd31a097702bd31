"""Which quantisation a checkpoint has, and whether its tensors are what its configuration says.

Where vLLM 0.33 looks (model_executor/model_loader/weight_utils.py): config.json `quantization_config`, then
`text_config.quantization_config`, then `compression_config`; only without any of them a side file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from .weights_manifest import WeightsError
from .weights_safetensors import Tensor

# (file, what makes it that method); an old AutoAWQ repository has w_bit and q_group_size.
_SIDE_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json", "quantization_config.json")
_GROUP_SIZES = (-1, 16, 32, 64, 128, 256, 512, 1024)
_GPTQ_BITS = (2, 3, 4, 8)
# Ends of tensor names that only a quantised checkpoint has.
_QUANTISED = (".qweight", ".qzeros", ".weight_packed", ".weight_scale_inv")


@dataclass(frozen=True)
class Quantization:
    """What the checkpoint says of itself; `place` is the file and key that says it."""

    method: str
    place: str
    config: Mapping[str, Any]


def find_quantization(directory: Path) -> Optional[Quantization]:
    """The quantisation of a checkpoint, or None for a plain one.

    Raises:
        WeightsError: a configuration cannot be read or names no method.
    """
    config = read_json(directory / "config.json")
    text_config = config.get("text_config")
    for place, found in (
        ("config.json quantization_config", config.get("quantization_config")),
        (
            "config.json text_config",
            text_config.get("quantization_config") if isinstance(text_config, Mapping) else None,
        ),
        ("config.json compression_config", config.get("compression_config")),
    ):
        if isinstance(found, Mapping) and found:
            default = "compressed-tensors" if place.endswith("compression_config") else ""
            return _named(str(found.get("quant_method") or default), place, found)
    for name in _SIDE_FILES:
        if (directory / name).is_file():
            found = read_json(directory / name)
            return _named(_side_method(name, found), name, found)
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds a JSON mapping.

    Raises:
        WeightsError: it is missing or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        raise ValueError(f"a {type(content).__name__} instead of a mapping")
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"{path.name} cannot be read: {error}. Needed: a JSON mapping. Change: another revision "
            "(serving_model_revisions), or a manifest that has the file."
        ) from error


def check_format(quantization: Optional[Quantization], expected: str, tensors: Mapping[str, Tensor]) -> None:
    """Hold the format of the catalogue entry, the configuration and the tensors against each other.

    Raises:
        WeightsError: with the two that differ.
    """
    found = quantization.method if quantization else "bf16"
    if found != expected:
        where = quantization.place if quantization else "config.json without a quantization_config"
        raise WeightsError(
            f"The checkpoint is {found} ({where}), its catalogue entry says {expected}. Needed: the same in both: "
            "sizes and kernels are chosen by it. Change: `format` of the model in serving_models, or its repository."
        )
    if quantization is None:
        marked = sorted(name for name in tensors if name.endswith(_QUANTISED))
        if marked:
            raise WeightsError(
                f"config.json names no quantization_config, and {len(marked)} tensors are quantised ({marked[0]}). "
                "Needed: one that describes them, or engines take them for plain numbers. Change: another repository."
            )
    elif quantization.method in _CHECKS:
        _CHECKS[quantization.method](quantization, tensors)


def _named(method: str, place: str, found: Mapping[str, Any]) -> Quantization:
    if not method:
        raise WeightsError(
            f"{place} names no quant_method. Needed: one, such as fp8, awq or gptq. Change: another repository."
        )
    return Quantization(method, place, found)


def _side_method(name: str, found: Mapping[str, Any]) -> str:
    if found.get("quant_method"):
        return str(found["quant_method"])
    if name == "hf_quant_config.json":
        return "modelopt"
    if name == "quantization_config.json":
        return "auto-round"
    return "awq" if {"zero_point", "w_bit", "q_group_size"} & set(found) else "gptq" if "bits" in found else ""


def _check_awq(found: Quantization, tensors: Mapping[str, Tensor]) -> None:
    bits = _number(found, "bits", "w_bit")
    group = _number(found, "group_size", "q_group_size")
    if bits != 4:
        raise _wrong(found, f"bits {bits}", "4: the engines' AWQ kernels know no other")
    _check_group(found, group)
    if not isinstance(found.config.get("zero_point"), bool):
        raise _wrong(
            found, f"zero_point {found.config.get('zero_point')!r}", "true or false: engines refuse without it"
        )
    if found.config["zero_point"] and not any(name.endswith(".qzeros") for name in tensors):
        raise _wrong(found, "zero_point true and no qzeros tensor", "the zero points that it states")
    for name, weight, scales in _pairs(found, tensors, ".qweight", ".scales"):
        # qweight [in, out * bits / 32], scales [in / group, out]
        wanted = (_groups(weight.shape[0], group), weight.shape[1] * 32 // bits)
        _check_scales(found, name, wanted, scales)


def _check_gptq(found: Quantization, tensors: Mapping[str, Tensor]) -> None:
    bits, group = _number(found, "bits"), _number(found, "group_size")
    if bits not in _GPTQ_BITS:
        raise _wrong(found, f"bits {bits}", "one of " + ", ".join(map(str, _GPTQ_BITS)))
    _check_group(found, group)
    if found.config.get("dynamic"):
        # Modules have bits and groups of their own.
        return
    for name, weight, scales in _pairs(found, tensors, ".qweight", ".scales"):
        # qweight [in * bits / 32, out], scales [in / group, out]
        _check_scales(found, name, (_groups(weight.shape[0] * 32 // bits, group), weight.shape[1]), scales)


def _check_fp8(found: Quantization, tensors: Mapping[str, Tensor]) -> None:
    if not any(tensor.dtype == "F8_E4M3" for tensor in tensors.values()):
        raise _wrong(found, "no tensor of type F8_E4M3", "weights in FP8")
    block = found.config.get("weight_block_size")
    if not block:
        return
    for name, weight, scales in _pairs(found, tensors, ".weight", ".weight_scale_inv", only="F8_E4M3"):
        wanted = tuple(math.ceil(size / int(side)) for size, side in zip(weight.shape, block))
        _check_scales(found, name, wanted, scales)


def _check_compressed(found: Quantization, tensors: Mapping[str, Tensor]) -> None:
    groups = found.config.get("config_groups")
    weights = [item.get("weights") for item in groups.values()] if isinstance(groups, Mapping) else []
    settings = [item for item in weights if isinstance(item, Mapping)]
    if found.config.get("format") != "pack-quantized" or len(settings) != 1:
        return
    bits = int(settings[0].get("num_bits") or 0)
    group = settings[0].get("group_size")
    if bits not in (4, 8):
        raise _wrong(found, f"num_bits {bits}", "4 or 8")
    for name, weight, scales in _pairs(found, tensors, ".weight_packed", ".weight_scale"):
        # weight_packed [out, in * bits / 32], weight_scale [out, in / group]
        wanted = (weight.shape[0], _groups(weight.shape[1] * 32 // bits, int(group or -1)))
        _check_scales(found, name, wanted, scales)


_CHECKS = {"awq": _check_awq, "gptq": _check_gptq, "fp8": _check_fp8, "compressed-tensors": _check_compressed}


def _number(found: Quantization, *keys: str) -> int:
    for key in keys:
        value = found.config.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise _wrong(found, f"no number under {' or '.join(keys)}", "the bits and the group size that the kernels need")


def _check_group(found: Quantization, group: int) -> None:
    if group not in _GROUP_SIZES:
        sizes = ", ".join(map(str, _GROUP_SIZES))
        raise _wrong(found, f"group_size {group}", f"one of {sizes}")


def _groups(inputs: int, group: int) -> int:
    return 1 if group <= 0 else math.ceil(inputs / group)


def _pairs(
    found: Quantization, tensors: Mapping[str, Tensor], weight_end: str, scale_end: str, only: Optional[str] = None
) -> list[tuple[str, Tensor, Tensor]]:
    """Each quantised matrix with its scales; vectors and stacked experts are left to the engine."""
    pairs = []
    for name, weight in tensors.items():
        if not name.endswith(weight_end) or len(weight.shape) != 2 or (only and weight.dtype != only):
            continue
        scales = tensors.get(name[: -len(weight_end)] + scale_end)
        if scales is None:
            raise _wrong(found, f"{name} without {scale_end.lstrip('.')}", "scales for each quantised weight")
        pairs.append((name, weight, scales))
    if not pairs and weight_end != ".weight":
        raise _wrong(found, f"no tensor *{weight_end}", "weights in the format that is stated")
    return pairs


def _check_scales(found: Quantization, name: str, wanted: tuple[int, ...], scales: Tensor) -> None:
    if len(scales.shape) == len(wanted) and scales.shape != wanted:
        raise _wrong(
            found,
            f"scales of shape {list(scales.shape)} for {name}",
            f"{list(wanted)} by the bits and group size stated",
        )


def _wrong(found: Quantization, what: str, needed: str) -> WeightsError:
    return WeightsError(
        f"The {found.method} checkpoint has {what} ({found.place}). Needed: {needed}. Change: another repository or "
        "revision; this one would not load, or answer nonsense."
    )
