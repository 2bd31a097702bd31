"""From what a caller names (a catalogue key, an entry, a directory) to a model the planner can size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from metalserve import catalogue
from metalserve.errors import Refusal
from metalserve.planner.safetensors import StoredBytes, read_index, stored_bytes
from metalserve.planner.shape import Shape, read_shape
from metalserve.planner.weights import weights

# Side files with the quantisation of older repositories, in vLLM's search order (model_loader/weight_utils.py).
_SIDE_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


@dataclass(frozen=True)
class PlannedModel:
    """A model as far as the planner needs it.

    `context_tokens` is its own maximum; `stored` the bytes of its safetensors files, when it was given as a directory.
    """

    key: str
    shape: Shape
    context_tokens: int
    minimum_versions: Mapping[str, str | None]
    stored: StoredBytes | None = None


def resolve(
    model: str | Path | PlannedModel | catalogue.Model | Mapping[str, Any], extra: Mapping[str, Any] | None = None
) -> PlannedModel:
    """Find the model.

    It may have been found before, or be a catalogue entry, a key of the catalogue or of `extra`, a parsed config.json,
    or the path of a config.json or of a directory that holds one.

    Raises:
        Refusal: unknown key, unreadable file, GGUF, or a shape that cannot be planned.
    """
    if isinstance(model, PlannedModel):
        return model
    if isinstance(model, catalogue.Model):
        return _entry(model)
    if isinstance(model, Mapping):
        return _config("model", model)
    if isinstance(model, Path) or "/" in model or model in (".", "..") or model.lower().endswith((".json", ".gguf")):
        return _path(Path(model))
    return _entry(catalogue.model(model, extra))


def _entry(entry: catalogue.Model) -> PlannedModel:
    return PlannedModel(entry.key, read_shape(entry.shape), entry.context_length_tokens, entry.minimum_versions)


def _config(key: str, config: Mapping[str, Any]) -> PlannedModel:
    shape = read_shape(config)
    return PlannedModel(key, shape, shape.max_position_tokens, {})


def _path(path: Path) -> PlannedModel:
    if path.suffix.lower() == ".gguf" or (
        path.is_dir() and not (path / "config.json").exists() and any(path.glob("*.gguf"))
    ):
        raise Refusal(
            found=f"{path} is a GGUF file",
            needed="a checkpoint with config.json and safetensors: vLLM has no GGUF loader in its core any more",
            change="plan the original checkpoint, or a GPTQ, AWQ or FP8 one",
        )
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise Refusal(
            found=f"{file} does not exist",
            needed="a directory with config.json, or the file itself",
            change="correct the path, or give a key of the catalogue",
        )
    config = dict(_read_json(file))
    if "quantization_config" not in config and path.is_dir():
        for name in _SIDE_FILES:
            if (path / name).is_file():
                config["quantization_config"] = _side_file(name, _read_json(path / name))
                break
    name = path.name if path.is_dir() else path.parent.name
    planned = _config(name or "model", config)
    return replace(planned, stored=_stored(path, planned.shape)) if path.is_dir() else planned


def _stored(directory: Path, shape: Shape) -> StoredBytes | None:
    """Bytes of the checkpoint: its files' own, or its index's total while not all files are there."""
    index = read_index(directory)
    if index is None or all((directory / name).is_file() for name in index.files):
        return stored_bytes(directory)
    # The index has no size of each tensor: the total is divided as the shape divides it.
    whole = weights(shape, draft="draft" in index.parts, text_only="vision" not in index.parts)
    scale = Fraction(index.total_bytes, whole.total_bytes)
    return StoredBytes(
        text=int(whole.text_bytes * scale), vision=int(whole.vision_bytes * scale), draft=int(whole.draft_bytes * scale)
    )


def _side_file(name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    if name == "hf_quant_config.json":
        return {"quant_method": "modelopt", **(content.get("quantization") or content)}
    method = "gptq" if "bits" in content and "desc_act" in content else "awq"
    return {"quant_method": method, **content}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise Refusal(
            found=f"{file} cannot be read as JSON ({error})", needed="a JSON object", change="repair the file"
        ) from error
    if not isinstance(content, dict):
        raise Refusal(
            found=f"{file} holds a {type(content).__name__}", needed="a JSON object", change="repair the file"
        )
    return content
