"""What the same GPUs would hold if they were divided otherwise: said in words, never done unasked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from metalserve.errors import Refusal
from metalserve.planner.parallel import tensor_parallel_problems, valid_tensor_parallel_sizes
from metalserve.planner.vllm_fit import Fit, fit_split
from metalserve.planner.vllm_room import Split, Task

# Less than this much more is not worth a sentence.
WORTH_SAYING = 1.05


def copies_kv_heads(task: Task, tensor_parallel_size: int) -> bool:
    """Whether some GPUs of one replica hold the same keys and values: KV heads, or the one latent of MLA."""
    shape = task.model.shape
    return tensor_parallel_size > (1 if shape.mla else shape.kv_heads)


def alternatives(task: Task, fit: Fit) -> tuple[str, ...]:
    """Sentences on other divisions of all the GPUs, with the tokens they hold at the same context length.

    Only where there is something to weigh: replicas, or KV heads that are copied.
    """
    split, count = fit.split, len(task.gpus.indexes)
    if split.pipeline > 1 or not (split.data > 1 or copies_kv_heads(task, split.tensor)):
        return ()
    wishes = replace(task.wishes, context_length=fit.context_tokens, max_sequences=fit.sequences)
    same = replace(task, wishes=wishes)
    own = split.data * fit.capacity.capacity_tokens
    sizes = [tp for tp in _valid(task, count) if count % tp == 0]
    said = []
    if split.data > 1 and task.gpus.nvlink:
        found = [(tokens, tp) for tp in sizes if tp > split.tensor for tokens in _holds(same, Split(tp, 1, 1, False))]
        if found:
            tokens, tp = max(found, key=lambda entry: entry[1])
            said.append(
                f"tensor_parallel_size {tp} and data_parallel_size 1 answer a single request faster and would hold "
                f"{_millions(tokens)} tokens"
            )
    if split.data == 1 and (task.model.shape.experts or task.wishes.tensor_parallel_size is not None):
        found = [
            (tokens * (count // tp), tp)
            for tp in sizes
            if tp < split.tensor
            for tokens in _holds(same, Split(tp, 1, count // tp, task.model.shape.experts is not None))
        ]
        tokens, tp = max(found, default=(0, 0))
        if tokens > WORTH_SAYING * own:
            said.append(
                f"tensor_parallel_size {tp} with data_parallel_size {count // tp} would hold "
                f"{_millions(tokens)} tokens together"
            )
    found = [
        (tokens * (count // tp), tp) for tp in sizes if tp < count for tokens in _holds(same, Split(tp, 1, 1, False))
    ]
    if found:
        tokens, tp = max(found)
        said.append(
            f"{count // tp} deployments of TP {tp} (`gpus: {tp}` each) would hold {_millions(tokens)} tokens together, "
            "and restart one by one"
        )
    return tuple(said)


def _valid(task: Task, count: int) -> list[int]:
    return valid_tensor_parallel_sizes(task.model.shape, count, text_only=task.wishes.text_only)


def _holds(task: Task, split: Split) -> Iterator[int]:
    """KV tokens of one replica; nothing when it does not fit."""
    ranks = split.tensor * split.data
    if tensor_parallel_problems(
        task.model.shape,
        split.tensor,
        expert_parallel=split.expert_parallel,
        text_only=task.wishes.text_only,
        expert_ranks=ranks,
    ):
        return
    try:
        yield fit_split(task, split).capacity.capacity_tokens
    except Refusal:
        return


def _millions(tokens: int) -> str:
    return f"{tokens / 1e6:.1f}M" if tokens >= 1_000_000 else f"{tokens:,}"
