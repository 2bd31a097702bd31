"""The Ansible face of the package: plain types in, plain types out, refusals as filter errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError

from metalserve import catalogue, deployments, planner
from metalserve.errors import MetalserveError


def _plain(value: Any) -> Any:
    """Ansible's tagged values as the plain ones under them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, bool) or value is None:
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise AnsibleFilterError(f"cannot use a {type(value).__name__} here")


def _filter(function: Callable[..., Any]) -> Callable[..., Any]:
    def face(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*_plain(list(arguments)), **_plain(options))
        except MetalserveError as refusal:
            raise AnsibleFilterError(str(refusal)) from refusal

    return face


def tensor_parallel_size(model: str, gpu_count: int, models: dict[str, Any] | None = None) -> int:
    return planner.tensor_parallel_size(catalogue.model(model, models), gpu_count)


def gpu_memory_utilization(
    model: str,
    facts: dict[str, Any],
    engine_version: str | None = None,
    wishes: dict[str, Any] | None = None,
    models: dict[str, Any] | None = None,
) -> float:
    return planner.gpu_memory_utilization(catalogue.model(model, models), facts, engine_version, wishes)


def serving_plan(
    model: str,
    facts: dict[str, Any],
    engine: str = "vllm",
    engine_version: str | None = None,
    wishes: dict[str, Any] | None = None,
    models: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return planner.make_plan(catalogue.model(model, models), facts, engine, engine_version, wishes or {}).as_dict()


def plan_table(releases: list[dict[str, Any]]) -> list[str]:
    return deployments.plan_table(releases)


def gate_endpoints(releases: list[dict[str, Any]], root: str = "/etc/metalserve") -> list[dict[str, Any]]:
    return deployments.gate_endpoints(releases, root)


def lock_requests(
    items: list[dict[str, Any]],
    *,
    models: dict[str, Any] | None = None,
    engines: dict[str, Any] | None = None,
    weight_sources: dict[str, Any] | None = None,
) -> dict[str, list[Any]]:
    inputs = deployments.Inputs(models or {}, engines or {}, {}, weight_sources or {}, "")
    return deployments.lock_requests(items, inputs)


class FilterModule:
    """Named after the functions above."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        faces = (
            tensor_parallel_size,
            gpu_memory_utilization,
            serving_plan,
            plan_table,
            gate_endpoints,
            lock_requests,
        )
        return {function.__name__: _filter(function) for function in faces}
