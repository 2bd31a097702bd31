"""A sentence for each choice of a vLLM plan on NVIDIA GPUs."""

from __future__ import annotations

from metalserve.planner.hardware import default_batched_tokens
from metalserve.planner.lora import buffers_sentence
from metalserve.planner.parallel import tensor_parallel_problems
from metalserve.planner.units import gib
from metalserve.planner.versions import newer_than_known
from metalserve.planner.vllm_fit import SEQUENCES, Fit
from metalserve.planner.vllm_room import Split, Task


def reasons(task: Task, fit: Fit) -> dict[str, str]:
    """Field of the plan -> why it has its value."""
    hybrid = task.model.shape.hybrid
    wishes, gpus, split, budget = task.wishes, task.gpus, fit.split, fit.budget
    shape = task.model.shape
    said = {
        "engine_version": _version_reason(task),
        "gpus_used": _gpu_reason(task, split),
        "tensor_parallel_size": _tensor_reason(task, split),
        "max_model_len": _context_reason(task, fit),
        "max_num_seqs": _sequence_reason(task, fit),
        "max_num_batched_tokens": "as the deployment says"
        if wishes.max_batched_tokens
        else f"the engine's own default for this GPU is {default_batched_tokens(gpus)}"
        + (
            f"; a step must hold one block of {fit.cut.block_tokens} tokens"
            if fit.batched_tokens != default_batched_tokens(gpus)
            else ""
        ),
        "block_size_tokens": f"keys and values of {fit.cut.block_tokens} tokens take the room of one linear-attention "
        "state, so both share one pool of blocks"
        if hybrid
        else f"{fit.cut.block_tokens} tokens is the engine's block",
        "kv_cache_tokens": f"{fit.capacity.num_blocks} blocks of {gib(fit.capacity.block_bytes)}; one request of "
        f"{fit.context_tokens} tokens takes {fit.capacity.blocks_per_request}"
        + (f", in each of {split.data} replicas" if split.data > 1 else ""),
        "predicted_bytes": f"requested {gib(budget.requested_bytes)} = weights {gib(budget.weights_bytes)} + buffers "
        f"{gib(budget.buffers_bytes)} + activation {gib(budget.activation_bytes + budget.non_torch_bytes)} + graphs "
        f"{gib(budget.graphs_bytes)} + KV {gib(budget.kv_bytes)}"
        if fit.utilization is not None
        else "the KV pool is fixed; the share of memory is not used",
        "prefix_caching": _prefix_reason(task, hybrid),
    }
    if task.draft:
        said["draft_model"] = (
            f"{gib(fit.draft_bytes)} of the weights are {task.draft.key}, "
            f"whose {len(task.draft.shape.layers)} layers keep keys and values too"
        )
    if task.adapters:
        said["lora_adapters"] = f"{gib(fit.adapter_bytes)} of the weights are {buffers_sentence(task.adapters)}"
    if fit.measured:
        said["predicted_bytes"] += f"; {fit.measured}"
    if fit.utilization is None:
        said["kv_cache_memory_bytes"] = "as the deployment says; the engine then ignores its share of memory"
    else:
        limit = f"memory_share {wishes.memory_share}" if wishes.memory_share is not None else "the largest safe share"
        taken = f"{gib(budget.outside_bytes)} go to context, communication and runner beside the budget"
        if budget.unprofiled_bytes:
            first = "long prefill" if hybrid else "full batch"
            first += " and the drafts of all sequences" if wishes.speculative_tokens else ""
            taken += f", {gib(budget.unprofiled_bytes)} to the first {first}, which the engine does not measure"
        said["gpu_memory_utilization"] = f"{limit}: of {gib(budget.total_bytes)} usable, {taken}"
        if gpus.used_bytes:
            said["gpu_memory_utilization"] += f", and {gib(gpus.used_bytes)} are in use by others"
    if split.data > 1:
        said["data_parallel_size"] = (
            f"{split.data} replicas of tensor parallel {split.tensor} use all {split.gpus} GPUs"
        )
    if split.expert_parallel:
        said["expert_parallel"] = (
            "as the deployment says"
            if wishes.expert_parallel
            else "replicas share the experts; without it each expert would be cut into "
            f"{split.tensor * split.data} pieces"
        )
    if split.tensor > 1 and not gpus.nvlink:
        said["disable_custom_all_reduce"] = "the GPUs are joined by PCIe only, where it hangs or corrupts on some hosts"
    if wishes.kv_cache_dtype == "auto" and shape.quantization and shape.quantization.kv_cache_dtype:
        said["kv_cache_dtype"] = f"the checkpoint declares {shape.quantization.kv_cache_dtype}, which auto becomes"
    if task.vision and shape.vision and shape.vision.kind != "qwen":
        said["predicted_bytes"] += (
            "; the peak of this vision tower's own pass is not known, so 1 GiB more is kept back from the context"
        )
    if shape.multimodal and shape.vision is None and not wishes.text_only:
        said["predicted_bytes"] += "; the vision tower of this model is not counted, its size is not known here"
    return said


def _version_reason(task: Task) -> str:
    if newer_than_known("vllm", task.version):
        return (
            f"{task.version} is newer than the newest release known here; "
            f"planned as {task.release.version} with twice the margin"
        )
    if not task.release.exact_version:
        return f"{task.version} was not looked at itself; planned as {task.release.version}"
    return f"planned with the rules of {task.release.version}"


def _gpu_reason(task: Task, split: Split) -> str:
    left = task.gpus.indexes[split.gpus :]
    sentences = list(task.gpus.notes)
    if left:
        sentences.append(
            f"GPU{'s' * (len(left) > 1)} {', '.join(map(str, left))} stay{'s' * (len(left) == 1)} unused: "
            f"no valid split of {task.model.key} takes all {len(task.gpus.indexes)}"
        )
    return "; ".join(sentences) or f"all {len(task.gpus.indexes)} of the deployment"


def _tensor_reason(task: Task, split: Split) -> str:
    shape, count = task.model.shape, len(task.gpus.indexes)
    if task.wishes.tensor_parallel_size is not None:
        text = "as the deployment says"
    elif count == 1:
        text = "the deployment has one GPU"
    elif task.gpus.nvlink:
        text = _nvlink_reason(task, split)
    else:
        text = f"the smallest size that fits: the {count} GPUs are joined by PCIe only, so replicas serve more"
    if not shape.mla and split.tensor > shape.kv_heads:
        text += (
            f"; beyond {shape.kv_heads} the KV heads are copied, so the KV cache does not grow any more: "
            f"tensor_parallel_size {shape.kv_heads} with replicas holds more"
        )
    if shape.mla and split.tensor > 1:
        text += "; every GPU keeps the whole latent of MLA, so the KV cache does not grow with it"
    return text


def _nvlink_reason(task: Task, split: Split) -> str:
    shape, count = task.model.shape, len(task.gpus.indexes)
    text = f"the largest valid size that divides the {count} GPUs, which are joined by NVLink"
    if not shape.mla and split.tensor == shape.kv_heads < count:
        return text + f", without copies of the {shape.kv_heads} KV heads; replicas use the others"
    if not shape.mla and split.tensor > shape.kv_heads:
        text = f"the smallest size above the {shape.kv_heads} KV heads on which the context fits"
    following = [tp for tp in range(split.tensor + 1, count + 1) if count % tp == 0]
    if following:
        problems = tensor_parallel_problems(shape, following[0], text_only=task.wishes.text_only)
        if problems:
            text += f"; {following[0]} fails: {problems[0]}"
    return text


def _context_reason(task: Task, fit: Fit) -> str:
    if task.wishes.context_length is not None:
        return "as the deployment says"
    if fit.full_context:
        return "the model's own context fits"
    return (
        f"the model's own {task.model.context_tokens} tokens need "
        f"{gib(fit.cut.request_bytes(task.model.context_tokens))} of KV cache; "
        f"this is the longest that fits with {gib(fit.promise_margin_bytes)} kept back"
    )


def _sequence_reason(task: Task, fit: Fit) -> str:
    at_once = int(fit.capacity.max_concurrency)
    if task.wishes.max_sequences is not None:
        return f"as the deployment says; at full length {at_once} run at once, shorter ones more"
    if fit.sequences in SEQUENCES:
        return f"{fit.sequences} rows of activation memory; at full length {at_once} run at once, shorter ones more"
    return (
        f"{fit.capacity.num_blocks} blocks hold no more short requests, "
        f"each of which takes {fit.cut.blocks_per_request(1)}"
    )


def _prefix_reason(task: Task, hybrid: bool) -> str:
    if task.wishes.prefix_caching is not None:
        return "as the deployment says"
    if not hybrid:
        return "the engine's default"
    if task.prefix_caching:
        return f"the default of {task.release.version} for hybrid models; two state blocks per request and group"
    return f"off by default for hybrid models in {task.release.version}; one state block per request and group"
