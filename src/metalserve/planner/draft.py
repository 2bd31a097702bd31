"""A draft model of its own: which kind it is, whether it fits the model, and the memory it takes beside it.

Sources: vLLM 0.24 config/speculative.py, v1/spec_decode/draft_model.py and llm_base_proposer.py,
model_executor/models/llama_eagle3.py; SGLang 0.5.23 arg_groups/speculative_hook.py and
model_executor/pool_configurator.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metalserve.errors import Refusal
from metalserve.planner import kv
from metalserve.planner.parallel import tensor_parallel_problems
from metalserve.planner.shape import Shape, read_shape
from metalserve.planner.units import ceil_div
from metalserve.planner.versions import parse
from metalserve.planner.weights import weights

EAGLE3, STANDALONE = "eagle3", "draft_model"
# A head of this kind reads the hidden states of so many layers of the model, unless its configuration says otherwise.
EAGLE3_LAYERS = 3
# The release in which a start with a separate draft model was seen.
VLLM_STANDALONE_SINCE = "0.24.0"


@dataclass(frozen=True)
class Draft:
    """A draft model. `method` is eagle3 (a head on the model's hidden states) or draft_model (a model of its own).

    `vocabulary` is what it drafts from, which may be a part of the model's.
    """

    key: str
    shape: Shape
    method: str
    vocabulary: int
    inputs: int
    """Elements that the projection of a head takes."""


def read_draft(key: str, config: Mapping[str, Any]) -> Draft:
    """A draft model from its config.json.

    Raises:
        Refusal: a shape that cannot be read, or a kind of drafter that is not planned here.
    """
    shape = read_shape(config)
    name = shape.architecture
    if "Eagle3" in name:
        method = EAGLE3
    elif any(word in name for word in ("Eagle", "Medusa", "MLPSpeculator", "DFlash", "DSpark", "MTP", "NextN")):
        raise Refusal(
            found=f"the draft model {key} of the architecture {name}",
            needed="an EAGLE-3 head, or a smaller model with the same vocabulary",
            change="`draft_model` of the deployment",
        )
    else:
        method = STANDALONE
    eagle = config.get("eagle_config") or {}
    layers = eagle.get("eagle_aux_hidden_state_layer_ids") or ()
    hidden = int(config.get("target_hidden_size") or shape.hidden)
    return Draft(
        key=key,
        shape=shape,
        method=method,
        vocabulary=int(config.get("draft_vocab_size") or shape.vocabulary),
        inputs=hidden * (len(layers) or EAGLE3_LAYERS),
    )


def check_draft(draft: Draft, key: str, shape: Shape, tokens: int, pipeline: int, engine: str, version: str) -> None:
    """Refuse a draft model that the engine would refuse, or that is not planned.

    Args:
        draft: the draft model.
        key: of the model.
        shape: of the model.
        tokens: that are drafted at once.
        pipeline: stages of the model.
        engine: vllm or sglang.
        version: of the engine.

    Raises:
        Refusal: with both numbers.
    """
    change = "`draft_model` of the deployment"
    if not tokens:
        raise Refusal(
            found=f"draft_model {draft.key} without speculative_tokens",
            needed="how many tokens it drafts at once, such as 3",
            change="`speculative_tokens` of the deployment, or leave `draft_model` out",
        )
    if draft.shape.vocabulary != shape.vocabulary:
        raise Refusal(
            found=f"the draft model {draft.key} with a vocabulary of {draft.shape.vocabulary} words, {key} has "
            f"{shape.vocabulary}",
            needed="the same vocabulary: a drafted token is a number in it",
            change=change,
        )
    if draft.method == EAGLE3 and draft.inputs % shape.hidden:
        raise Refusal(
            found=f"the EAGLE-3 head {draft.key} for {draft.inputs} elements of hidden state, {key} has {shape.hidden}",
            needed=f"a head that was trained on {key}",
            change=change,
        )
    if pipeline > 1:
        raise Refusal(
            found=f"draft_model {draft.key} with pipeline_parallel_size {pipeline}",
            needed="one stage: a draft model lies on one",
            change="`pipeline_parallel_size` of the deployment",
        )
    if draft.shape.full_layers != len(draft.shape.layers):
        raise Refusal(
            found=f"the draft model {draft.key} with layers that keep a window or a state",
            needed="full attention in every layer; the cache of others beside a second model is not planned here",
            change=change,
        )
    same = kv.token_bytes(draft.shape, 1, 2) == kv.token_bytes(shape, 1, 2)
    only_full = shape.full_layers == len(shape.layers)
    if not same and (engine == "sglang" or not only_full):
        raise Refusal(
            found=f"the draft model {draft.key} with {kv.token_bytes(draft.shape, 1, 2)} B of keys and values a token "
            f"and layer, {key} has {kv.token_bytes(shape, 1, 2)}",
            needed="the same: "
            + (
                "SGLang sizes its pool as if it were so" if engine == "sglang" else f"{key} has layers of several kinds"
            ),
            change=change,
        )
    if engine == "vllm" and draft.method == STANDALONE and parse(version) < parse(VLLM_STANDALONE_SINCE):
        raise Refusal(
            found=f"the draft model {draft.key} with vLLM {version}",
            needed=f"vLLM {VLLM_STANDALONE_SINCE} or newer, or an EAGLE-3 head",
            change="`engine_version` of the deployment, or `draft_model`",
        )


def no_gpus(draft: Draft) -> Refusal:
    """The refusal of a draft model on a host without GPUs."""
    return Refusal(
        found=f"draft_model {draft.key} on a host without GPUs",
        needed="GPUs: a second model on a CPU makes answers slower, and was not seen to run",
        change="leave `draft_model` and `speculative_tokens` out",
    )


def draft_problems(draft: Draft | None, tensor_parallel_size: int, engine: str = "vllm") -> list[str]:
    """Why the draft model cannot be split so: it is split as the model is. Empty without one."""
    if draft is None:
        return []
    found = tensor_parallel_problems(draft.shape, tensor_parallel_size, engine=engine)
    return [f"the draft model {draft.key}: {problem}" for problem in found]


def draft_bytes(draft: Draft | None, tensor_parallel_size: int = 1) -> int:
    """Bytes of the weights of a draft model on one GPU; 0 without one.

    A head of EAGLE-3 is counted with embeddings of its own: the engine shares the model's only when it has none, or the
    same, which its configuration does not say.
    """
    if draft is None:
        return 0
    shape, tp = draft.shape, tensor_parallel_size
    if draft.method == STANDALONE:
        return weights(shape, tensor_parallel_size=tp, text_only=True).total_bytes
    whole = weights(shape, tensor_parallel_size=tp, text_only=True).text_bytes
    if shape.tied_embeddings:
        whole += ceil_div(shape.vocabulary, tp) * shape.hidden * 2
    # Its head is for the words it drafts; the first layer reads embedding and hidden state side by side.
    head = (ceil_div(shape.vocabulary, tp) - ceil_div(draft.vocabulary, tp)) * shape.hidden * 2
    queries = ceil_div(shape.heads, tp) + 2 * max(1, shape.kv_heads // tp)
    second = queries * shape.head_dim * shape.hidden * 2
    projection = draft.inputs * shape.hidden * 2
    return whole - head + second + projection + 2 * shape.hidden + 8 * draft.vocabulary
