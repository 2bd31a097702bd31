"""What a deployment says of how its engine behaves, beside sizes and places: neutral words, each engine's own flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metalserve.engines.catalogue_entry import parsers_of
from metalserve.errors import Refusal

# The fields with a fixed set of values; None leaves the engine's own default.
CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("auto", "bfloat16", "float16"),
    "structured_output_backend": ("auto", "xgrammar", "guidance", "outlines"),
    "priority_order": ("lower_first", "higher_first"),
    "log_level": ("debug", "info", "warning", "error"),
}
# Counts, with the least value of each.
COUNTS: dict[str, int] = {"long_prompt_tokens": 1, "kv_offload_gib": 1}
SWITCHES = ("chunked_prefill",)
# Names of parsers; the word `none` turns off what the catalogue names.
PARSERS = ("tool_parser", "reasoning_parser")
NO_PARSER = "none"
FIELDS = (*CHOICES, *COUNTS, *SWITCHES, *PARSERS)
# SGLang's name of what vLLM calls guidance (both are the library llguidance).
_SGLANG_GRAMMAR = {"guidance": "llguidance"}
# Priority scheduling with another policy fails on an assertion at start (0.5.10 and 0.5.23).
SGLANG_PRIORITY_POLICIES = ("fcfs", "lof")


def check_behaviour(name: str, item: Mapping[str, Any]) -> None:
    """The form of these fields of a deployment called ``name``.

    Raises:
        Refusal: a value that is none of the field's.
    """
    for field in FIELDS:
        value = item.get(field)
        if value is None:
            continue
        if field in CHOICES:
            right, needed = value in CHOICES[field], f"one of {', '.join(CHOICES[field])}"
        elif field in COUNTS:
            right = isinstance(value, int) and not isinstance(value, bool) and value >= COUNTS[field]
            needed = f"a whole number from {COUNTS[field]} on"
        elif field in SWITCHES:
            right, needed = isinstance(value, bool), "true or false"
        else:
            right, needed = isinstance(value, str) and value != "", f"the engine's name of a parser, or {NO_PARSER}"
        if not right:
            raise _refuse(name, field, f"{value!r}", needed)


def wanted_parsers(deployment: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Tool-call and reasoning parser: the deployment's own, else the catalogue's; None for none."""
    return tuple(  # type: ignore[return-value]
        None if own == NO_PARSER else own or known
        for own, known in zip(
            (deployment.get(field) for field in PARSERS), parsers_of(model, deployment["engine"]), strict=True
        )
    )


def check_chunked_prefill(deployment: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Refuse whole prompts in one step when a step is smaller than the longest prompt.

    Raises:
        Refusal: with both numbers, in tokens.
    """
    if deployment.get("chunked_prefill") is False and plan["max_num_batched_tokens"] < plan["max_model_len"]:
        raise _refuse(
            deployment["name"],
            "chunked_prefill",
            f"false with {plan['max_num_batched_tokens']} tokens a step and a context of {plan['max_model_len']}",
            "a step that takes the longest prompt: max_batched_tokens of at least the context_length",
        )


def check_offload(deployment: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Refuse an offload without the prefix cache, which is what finds the blocks again.

    vLLM stops at start for a hybrid model ("gpu_block_size not divisible by hash_block_size"; 0.24.0 on an H200), and
    SGLang's hierarchical cache is an extension of its radix cache. With it, the capacity on the GPU stays the same.

    Raises:
        Refusal: where the plan has no prefix cache.
    """
    if deployment.get("kv_offload_gib") and plan.get("prefix_caching") is False:
        raise _refuse(
            deployment["name"],
            "kv_offload_gib",
            f"{deployment['kv_offload_gib']} without the prefix cache, through which moved blocks are found again",
            "prefix_caching: true",
        )


def vllm_behaviour(deployment: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """These fields in vLLM's flags.

    Raises:
        Refusal: the higher priority first, which vLLM cannot do; whole prompts in steps that are too small.
    """
    check_chunked_prefill(deployment, plan)
    check_offload(deployment, plan)
    if deployment.get("priority_order") == "higher_first":
        raise _refuse(
            deployment["name"],
            "priority_order",
            "higher_first with vLLM, which always serves the lower value first",
            "lower_first; the gateway's header X-Priority is turned to the engine's direction",
        )
    settings: dict[str, Any] = {}
    for flag, value in (
        ("dtype", deployment.get("dtype")),
        ("enable-chunked-prefill", deployment.get("chunked_prefill")),
        ("scheduling-policy", "priority" if deployment.get("priority_order") else None),
        ("long-prefill-token-threshold", deployment.get("long_prompt_tokens")),
        # GiB of all ranks together (vllm/config/cache.py, 0.33.0).
        ("kv-offloading-size", deployment.get("kv_offload_gib")),
        # Of the HTTP server; the engine's own level is a variable, because the flag came with 0.33.
        ("uvicorn-log-level", deployment.get("log_level")),
    ):
        if value is not None:
            settings[flag] = value
    if deployment.get("structured_output_backend"):
        settings["structured-outputs-config"] = {"backend": deployment["structured_output_backend"]}
    return settings


def sglang_behaviour(deployment: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """These fields in SGLang's flags.

    Raises:
        Refusal: a limit for long prompts, which SGLang does not have; an offload that is less than one GB a GPU;
            priorities with a schedule policy that SGLang stops on; whole prompts in steps that are too small.
    """
    check_chunked_prefill(deployment, plan)
    check_offload(deployment, plan)
    name = deployment["name"]
    if deployment.get("long_prompt_tokens"):
        raise _refuse(
            name,
            "long_prompt_tokens",
            f"{deployment['long_prompt_tokens']} with SGLang, which has no limit of its own for long prompts",
            "a smaller max_batched_tokens, the chunk in which every prompt is computed",
        )
    settings: dict[str, Any] = {}
    backend = deployment.get("structured_output_backend")
    for flag, value in (
        ("dtype", deployment.get("dtype")),
        ("grammar-backend", None if backend in (None, "auto") else _SGLANG_GRAMMAR.get(backend, backend)),
        ("log-level", deployment.get("log_level")),
    ):
        if value is not None:
            settings[flag] = value
    if deployment.get("kv_offload_gib"):
        ranks = plan["tensor_parallel_size"] * plan.get("pipeline_parallel_size", 1)
        # Whole GB (10^9) of each rank (srt/mem_cache/memory_pool_host.py, 0.5.23).
        each = deployment["kv_offload_gib"] * 2**30 // (ranks * 10**9)
        if each < 1:
            raise _refuse(
                name,
                "kv_offload_gib",
                f"{deployment['kv_offload_gib']} over {ranks} GPUs with SGLang, which counts in whole GB of each",
                f"at least {ranks}",
            )
        settings |= {"enable-hierarchical-cache": True, "hicache-size": each}
    order = deployment.get("priority_order")
    if order:
        policy = (deployment.get("sglang") or {}).get("schedule_policy") or "fcfs"
        if policy not in SGLANG_PRIORITY_POLICIES:
            raise _refuse(
                name,
                "priority_order",
                f"{order} with sglang.schedule_policy {policy}",
                f"schedule_policy {' or '.join(SGLANG_PRIORITY_POLICIES)}: SGLang stops on an assertion otherwise",
            )
        settings["enable-priority-scheduling"] = True
        if order == "lower_first":
            settings["schedule-low-priority-values-first"] = True
    return settings


def _refuse(name: str, field: str, found: str, needed: str) -> Refusal:
    return Refusal(
        found=f"{field} {found} of the deployment {name}",
        needed=needed,
        change=f"`{field}` of {name} in serving_deployments",
    )
