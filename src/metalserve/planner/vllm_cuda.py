"""The plan of a vLLM deployment on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metalserve.errors import Refusal
from metalserve.planner.draft import Draft, check_draft
from metalserve.planner.hardware import Gpus, check_capability, chosen_gpus
from metalserve.planner.learned import MeasuredStart
from metalserve.planner.lora import Adapters
from metalserve.planner.plan_types import Plan, PredictedBytes, Wishes
from metalserve.planner.resolve import PlannedModel
from metalserve.planner.versions import behaviour
from metalserve.planner.vllm_alternatives import alternatives
from metalserve.planner.vllm_fit import Fit, best_fit
from metalserve.planner.vllm_reasons import reasons
from metalserve.planner.vllm_room import Task


def plan_cuda(
    model: PlannedModel,
    host: Mapping[str, Any],
    version: str,
    wishes: Wishes,
    *,
    starts: tuple[MeasuredStart, ...] = (),
    image: str | None = None,
    adapters: Adapters | None = None,
    draft: Draft | None = None,
) -> Plan:
    """Plan vLLM on the host's GPUs, by what earlier starts measured where one had the same sizes.

    Raises:
        Refusal: the wishes cannot be met; says by how much and what to change.
    """
    shape = model.shape
    gpus = chosen_gpus(host, wishes)
    check_capability(shape, gpus, "vllm", wishes.kv_cache_dtype)
    if draft:
        stages = wishes.pipeline_parallel_size
        check_draft(draft, model.key, shape, wishes.speculative_tokens, stages, "vllm", version)
    elif wishes.speculative_tokens and not shape.draft_layers:
        raise Refusal(
            found=f"speculative_tokens {wishes.speculative_tokens}, but {model.key} has no MTP layers",
            needed="a model with MTP layers in its checkpoint, or a draft model",
            change="set `speculative_tokens` to 0, or name a `draft_model`",
        )
    if wishes.expert_parallel and not shape.experts:
        raise Refusal(
            found=f"expert_parallel is set, but {model.key} has no experts",
            needed="a mixture of experts",
            change="set `expert_parallel` to false",
        )
    context = check_context(model, wishes)
    release = behaviour(version)
    prefix = wishes.prefix_caching
    task = Task(
        model=model,
        release=release,
        version=version,
        wishes=wishes,
        gpus=gpus,
        vision=shape.vision is not None and not wishes.text_only,
        prefix_caching=(release.hybrid_prefix_caching or not shape.hybrid) if prefix is None else prefix,
        gdn_backend=wishes.gdn_prefill_backend or _gdn_backend(model, gpus),
        context_tokens=context,
        starts=starts,
        image=image,
        adapters=adapters,
        draft=draft,
    )
    return _plan(task, best_fit(task))


def check_context(model: PlannedModel, wishes: Wishes) -> int:
    """The context to plan for, in tokens: the wish, or the model's own.

    Raises:
        Refusal: the wish is longer than the model's own context.
    """
    if wishes.context_length is not None and wishes.context_length > model.context_tokens:
        raise Refusal(
            found=f"context_length {wishes.context_length}, {model.key} was trained for {model.context_tokens} tokens",
            needed=f"at most {model.context_tokens}",
            change="lower `context_length`",
        )
    return wishes.context_length or model.context_tokens


def _gdn_backend(model: PlannedModel, gpus: Gpus) -> str:
    """What `--gdn-prefill-backend` resolves to (vLLM 0.33): FlashInfer on 9.0, and on 10.x/12.x with heads of 128."""
    gdn = model.shape.gdn
    if gdn and (gpus.capability == 90 or (gpus.capability >= 100 and gdn.key_head_dim == 128)):
        return "flashinfer"
    return "triton"


def _plan(task: Task, fit: Fit) -> Plan:
    split, gpus = fit.split, task.gpus
    used = gpus.indexes[: split.gpus]
    return Plan(
        engine="vllm",
        engine_version=task.version,
        device="cuda",
        gpus_used=used,
        tensor_parallel_size=split.tensor,
        pipeline_parallel_size=split.pipeline,
        data_parallel_size=split.data,
        expert_parallel=split.expert_parallel,
        gpu_memory_utilization=fit.utilization,
        kv_cache_memory_bytes=task.wishes.kv_cache_memory_bytes,
        max_model_len=fit.context_tokens,
        max_num_seqs=fit.sequences,
        max_num_batched_tokens=fit.batched_tokens,
        kv_cache_dtype=task.wishes.kv_cache_dtype,
        block_size_tokens=fit.capacity.block_size_tokens,
        num_blocks=fit.capacity.num_blocks,
        kv_cache_tokens=fit.capacity.capacity_tokens,
        max_concurrency=round(fit.capacity.max_concurrency, 2),
        state_slots=None,
        prefix_caching=task.prefix_caching,
        disable_custom_all_reduce=split.tensor > 1 and not gpus.nvlink,
        enforce_eager=task.wishes.eager,
        predicted_bytes=PredictedBytes(
            weights=fit.budget.weights_bytes,
            buffers=fit.budget.buffers_bytes,
            activation=fit.budget.activation_bytes + fit.budget.non_torch_bytes,
            graphs=fit.budget.graphs_bytes,
            kv=fit.kv_bytes,
            outside=fit.budget.outside_bytes,
        ),
        gpu_memory_bytes=gpus.usable_bytes,
        reasons=reasons(task, fit),
        alternatives=alternatives(task, fit),
    )
