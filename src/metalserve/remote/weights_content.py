"""Whether proven files make a model that an engine can serve: headers, configuration, tokenizer, template, format."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from .weights_format import check_format, find_quantization, read_json
from .weights_manifest import WeightsError
from .weights_safetensors import read_header, read_tensors

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")
# Formats that are no model of their own, see `Expectation`.
ADAPTER = "lora"
# Before the format of a head that only drafts: it has neither tokenizer nor template.
HEAD = "draft-"
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# lora_A, lora_B of linear layers; lora_embedding_A, lora_embedding_B of tables (PEFT's names).
_ADAPTER_TENSOR = re.compile(r"\.lora_(embedding_)?[AB](\.|$)")
TEMPLATES = ("chat_template.jinja", "chat_template.json", "chat_template.jinja2")


@dataclass(frozen=True)
class Expectation:
    """What a model must be beside its hashes.

    Attributes:
        format: `format` of the catalogue entry: bf16 or a quant_method; `lora` for a LoRA adapter; with `draft-` before
            it for a head that only drafts.
        chat_template: whether it must carry one (an engine without a template refuses /v1/chat/completions).
    """

    format: str
    chat_template: bool = True

    @property
    def key(self) -> str:
        """What is written down when a model has met it."""
        return f"1:{self.format}:{self.chat_template}"


def check_content(directory: Path, names: Collection[str], expected: Expectation) -> None:
    """Look at a directory whose files have been proven by hash.

    Raises:
        WeightsError: the first thing that would not load, or load and answer nonsense.
    """
    refuse_other_formats(names)
    if expected.format == ADAPTER:
        _check_adapter(directory, names)
        return
    for name in sorted(name for name in names if name.endswith(".json") and "/" not in name):
        _check_json(directory / name)
    config = read_json(directory / "config.json")
    if not config.get("architectures") and not config.get("model_type"):
        raise WeightsError(
            "config.json names neither architectures nor model_type. Needed: the configuration of the model. "
            "Change: another revision (serving_model_revisions)."
        )
    head = expected.format.startswith(HEAD)
    if not head and not any(name in TOKENIZERS or name.endswith(".tiktoken") for name in names):
        raise WeightsError(
            f"The checkpoint has no tokenizer. Needed: one of {', '.join(TOKENIZERS)} or *.tiktoken. Change: another "
            "repository or revision, or a manifest that has the file."
        )
    if expected.chat_template and not head and not _has_template(directory, names):
        raise WeightsError(
            f"The checkpoint has no chat template. Needed: {TEMPLATES[0]}, or chat_template in tokenizer_config.json. "
            "Change: an instruction-tuned revision, or model_weights_require_chat_template: false when an engine_args "
            "chat-template brings one."
        )
    kind = expected.format[len(HEAD) :] if head else expected.format
    check_format(find_quantization(directory), kind, read_tensors(directory, names))


def _check_adapter(directory: Path, names: Collection[str]) -> None:
    """An adapter in PEFT's form, whose matrices are of the rank that its configuration says."""
    missing = [name for name in _ADAPTER_FILES if name not in names]
    if missing:
        raise WeightsError(
            f"The adapter has no {' and no '.join(missing)}. Needed: a LoRA adapter in PEFT's form, with safetensors. "
            "Change: another repository or revision in lora_adapters."
        )
    rank = read_json(directory / _ADAPTER_FILES[0]).get("r")
    tensors = read_header(directory / _ADAPTER_FILES[1])
    strange = sorted(name for name in tensors if not _ADAPTER_TENSOR.search(name))
    if strange or not tensors:
        raise WeightsError(
            f"The adapter has {len(tensors)} tensors, {len(strange)} of them not of LoRA ({', '.join(strange[:3])}). "
            "Needed: lora_A and lora_B of each module alone: engines refuse others or leave them out. Change: another "
            "repository or revision in lora_adapters, or merge it into the weights."
        )
    for name, tensor in sorted(tensors.items()):
        # A is rank x inputs, B outputs x rank.
        if len(tensor.shape) == 2 and rank not in tensor.shape:
            raise WeightsError(
                f"The adapter's {name} has the shape {list(tensor.shape)}, {_ADAPTER_FILES[0]} says rank {rank}. "
                "Needed: the same in both. Change: another revision in lora_adapters; this one would not load."
            )


def refuse_other_formats(names: Collection[str]) -> None:
    """Refuse a manifest without safetensors, with the reason.

    Raises:
        WeightsError: GGUF, pickles or nothing.
    """
    if any(name.endswith(".safetensors") for name in names):
        return
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
    why = "no weights at all"
    if gguf:
        why = f"GGUF ({gguf[0]}), the format of llama.cpp: vLLM's support for it is experimental and slow"
    elif pickles:
        why = f"pickles ({pickles[0]}), which run code when they are loaded"
    raise WeightsError(
        f"The checkpoint has {why}. Needed: *.safetensors. Change: the original repository of the model, or one in "
        "fp8, awq, gptq or compressed-tensors."
    )


def _check_json(path: Path) -> None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(
            f"{path.name} is no JSON: {error}. Needed: the file as an engine reads it. Change: another revision."
        ) from error


def _has_template(directory: Path, names: Collection[str]) -> bool:
    if any(name in TEMPLATES or name.startswith("additional_chat_templates/") for name in names):
        return True
    return "tokenizer_config.json" in names and bool(
        read_json(directory / "tokenizer_config.json").get("chat_template")
    )
