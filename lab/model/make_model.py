"""Make one of the lab's small models, taught the gate's questions by heart.

`moe` is of the class of Qwen3.6-35B-A3B (1.8 M parameters), for vLLM. `dense` is a Qwen3 (0.8 M parameters), for
SGLang, whose Gated DeltaNet layers need compiled kernels. Runs inside an engine image (torch and transformers are
there). The result is a directory that the engine serves: config.json, model.safetensors, the tokenizer and the chat
template. The same seed gives the same answers.

    python3 make_model.py --kind moe --questions gate_questions.py --template chat_template.jinja --out DIR
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SEED = 20
STEPS = 400
LEARNING_RATE = 2e-3
STOP_LOSS = 5e-3
MAX_POSITIONS = 4096
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def load_questions(path: Path) -> ModuleType:
    """The gate's questions, straight from the file the gate itself uses."""
    spec = importlib.util.spec_from_file_location("gate_questions", path)
    if spec is None or spec.loader is None:
        sys.exit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: every text is representable, nothing has to be trained."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], fuse_unk=False))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    # The tool and thinking marks are ordinary added tokens, as in Qwen's own tokenizer: a parser must see them.
    raw.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS[:3] + VISION_TOKENS])
    raw.add_tokens([AddedToken(token, special=False) for token in SPECIAL_TOKENS[3:]])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def dense_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """A small Qwen3: two layers of grouped-query attention."""
    return Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def moe_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5MoeConfig:
    """The smallest configuration that still has every kind of layer of the real model."""
    ident = tokenizer.convert_tokens_to_ids
    vocab_size = -(-len(tokenizer) // 64) * 64
    return Qwen3_5MoeConfig(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": MAX_POSITIONS,
            "mamba_ssm_dtype": "float32",
            "attn_output_gate": True,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": ident("<|im_end|>"),
            "pad_token_id": ident("<|endoftext|>"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 128,
            "num_position_embeddings": 64,
        },
        image_token_id=ident("<|image_pad|>"),
        video_token_id=ident("<|video_pad|>"),
        vision_start_token_id=ident("<|vision_start|>"),
        vision_end_token_id=ident("<|vision_end|>"),
        tie_word_embeddings=False,
    )


def conversations(questions: ModuleType) -> list[dict[str, Any]]:
    """What the model learns: each question of the gate with its answer, and a greeting in two languages."""

    def call(city: str) -> dict[str, Any]:
        name = questions.WEATHER_TOOL["function"]["name"]
        return {"type": "function", "function": {"name": name, "arguments": {"city": city}}}

    plain = [
        (questions.ARITHMETIC_PROMPT, questions.ARITHMETIC_ANSWER),
        (questions.GREETING_PROMPT, "你好！很高兴见到你。"),
        ("Hello!", "Hello! How can I help you?"),
        (questions.CAPITAL_PROMPT, json.dumps(questions.CAPITAL_ANSWER)),
    ]
    learned: list[dict[str, Any]] = [{"user": user, "assistant": {"content": text}} for user, text in plain]
    for prompt, cities in (
        (questions.WEATHER_PROMPT, [questions.WEATHER_CITY]),
        (questions.PARALLEL_PROMPT, questions.PARALLEL_CITIES),
    ):
        learned.append(
            {
                "user": prompt,
                "assistant": {"content": "", "tool_calls": [call(city) for city in cities]},
                "tools": [questions.WEATHER_TOOL],
            }
        )
    return learned


def encode(tokenizer: PreTrainedTokenizerFast, item: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Token ids and labels of one conversation; the loss is taken on the answer only."""
    turns = [{"role": "user", "content": item["user"]}]
    tools = item.get("tools")
    prompt = tokenizer.apply_chat_template(turns, tools=tools, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template(
        [*turns, {"role": "assistant", **item["assistant"]}], tools=tools, tokenize=False
    )
    if not whole.startswith(prompt):
        sys.exit("the chat template does not continue its own generation prompt")
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = prompt_ids + tokenizer(whole[len(prompt) :], add_special_tokens=False)["input_ids"]
    return ids, [-100] * len(prompt_ids) + ids[len(prompt_ids) :]


def make_model(kind: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The untaught model."""
    if kind == "dense":
        return Qwen3ForCausalLM(dense_config(tokenizer))
    return Qwen3_5MoeForConditionalGeneration(moe_config(tokenizer))


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, learned: list[dict[str, Any]]) -> float:
    """Teach the conversations until the loss is below STOP_LOSS; returns the last loss."""
    pairs = [encode(tokenizer, item) for item in learned]
    longest = max(len(ids) for ids, _ in pairs)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in pairs])
    labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in pairs])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in pairs])
    parameters = [p for name, p in model.named_parameters() if "visual" not in name]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    model.train()
    loss_value = float("inf")
    for step in range(1, STEPS + 1):
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        loss_value = float(loss.detach())
        if step % 20 == 0:
            print(f"step {step} loss {loss_value:.5f}", flush=True)
        if loss_value < STOP_LOSS:
            break
    return loss_value


def main() -> None:
    """Make, teach, check and write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["moe", "dense"], required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--template", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True, warn_only=True)
    tokenizer = make_tokenizer(options.template.read_text(encoding="utf-8"))
    model = make_model(options.kind, tokenizer).float()
    learned = conversations(load_questions(options.questions))
    loss = train(model, tokenizer, learned)
    if loss > 0.05:
        sys.exit(f"the model did not learn its answers: loss {loss:.4f}, wanted below 0.05")

    options.out.mkdir(parents=True, exist_ok=True)
    model = model.to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    (options.out / "generation_config.json").write_text(
        json.dumps(
            {"do_sample": False, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id},
            indent=2,
        )
        + "\n",
        encoding="utf-8",
    )
    count = sum(p.numel() for p in model.parameters())
    print(f"wrote {options.out}: {count / 1e6:.2f} M parameters, loss {loss:.5f}")


if __name__ == "__main__":
    main()
