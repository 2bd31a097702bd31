"""The Ansible face of the package: plain types in, plain types out, refusals as filter errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

from metalserve import catalogue, controller, deployments, driver, gateway, planner, same_source, surveys
from metalserve.errors import MetalserveError
from metalserve.monitoring import rules, settings, targets
from metalserve.plain import plain
from metalserve.rollout import aftermath
from metalserve.rollout import plan as rollout
from metalserve.verdict import host as verdict_host


def _filter(function: Callable[..., Any]) -> Callable[..., Any]:
    def face(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*plain(list(arguments)), **plain(options))
        except MetalserveError as refusal:
            raise AnsibleFilterError(str(refusal)) from refusal

    return face


def tensor_parallel_size(model: str, gpu_count: int, models: dict[str, Any] | None = None) -> int:
    """The largest valid tensor parallel size of a model on that many GPUs."""
    return planner.tensor_parallel_size(catalogue.model(model, models), gpu_count)


def gpu_memory_utilization(
    model: str,
    facts: dict[str, Any],
    engine_version: str | None = None,
    wishes: dict[str, Any] | None = None,
    models: dict[str, Any] | None = None,
) -> float:
    """The largest safe share of each GPU's memory for a model on a host."""
    return planner.gpu_memory_utilization(catalogue.model(model, models), facts, engine_version, wishes)


def serving_plan(
    model: str,
    facts: dict[str, Any],
    engine: str = "vllm",
    engine_version: str | None = None,
    wishes: dict[str, Any] | None = None,
    models: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole plan of a model on a host, as plain types."""
    return planner.make_plan(catalogue.model(model, models), facts, engine, engine_version, wishes or {}).as_dict()


def plan_table(releases: list[dict[str, Any]]) -> list[str]:
    """The releases of a host as aligned lines."""
    return deployments.plan_table(releases)


def gate_endpoints(releases: list[dict[str, Any]], root: str | None = None) -> list[dict[str, Any]]:
    """What the role endpoint_gate needs of each release; without `root` no result is kept."""
    return deployments.gate_endpoints(releases, root)


def lock_requests(
    items: list[dict[str, Any]],
    *,
    models: dict[str, Any] | None = None,
    engines: dict[str, Any] | None = None,
    weight_sources: dict[str, Any] | None = None,
) -> dict[str, list[Any]]:
    """The images and models that deployments need locked."""
    inputs = deployments.Inputs(models or {}, engines or {}, {}, weight_sources or {}, "")
    return deployments.lock_requests(items, inputs)


def driver_action(facts: dict[str, Any], wanted_version: str, **options: Any) -> dict[str, Any]:
    """What has to happen to a host's NVIDIA driver."""
    return driver.driver_action(facts, wanted_version, **options)


def compatibility_verdict(
    facts: dict[str, Any],
    items: list[dict[str, Any]] | None = None,
    *,
    models: dict[str, Any] | None = None,
    engines: dict[str, Any] | None = None,
    lock: dict[str, Any] | None = None,
    weight_sources: dict[str, Any] | None = None,
    models_dir: str = "/var/lib/metalserve/models",
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """May a host serve its deployments?"""
    inputs = deployments.Inputs(models or {}, engines or {}, lock or {}, weight_sources or {}, models_dir)
    return verdict_host.compatibility_verdict(facts, items or [], inputs=inputs, options=options)


def _machines(names: list[str], addresses: Sequence[list[str]]) -> list[dict[str, Any]]:
    """Name and address of hosts: of several lists of addresses the first that is not empty counts, at last the name."""
    return [
        {"name": name, "address": next((address for address in known if address), name)}
        for name, *known in zip(names, *addresses, strict=True)
    ]


def gateway_pools(
    names: list[str],
    deployments: list[list[dict[str, Any]]],
    *addresses: list[str],
    server_max_requests: int,
    long_prompts: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """The fleet's engines as pools that serve one set of model names."""
    hosts = [
        {**machine, "deployments": items}
        for machine, items in zip(_machines(names, addresses), deployments, strict=True)
    ]
    return gateway.gateway_pools(hosts, server_max_requests=server_max_requests, long_prompts=long_prompts or [])


def engine_clients(names: list[str], *addresses: list[str], others: list[str]) -> list[str]:
    """The addresses that may reach engines, where there is a gateway."""
    return gateway.engine_clients([machine["address"] for machine in _machines(names, addresses)], others)


def gateway_clients(clients: list[dict[str, Any]], pools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The gateway's clients, checked and filled in."""
    return gateway.gateway_clients(clients, pools)


def gateway_maps(pools: list[dict[str, Any]], clients: list[dict[str, Any]]) -> dict[str, str]:
    """The gateway's look-up files, text by file name."""
    return gateway.gateway_maps(pools, clients)


def awx_survey(questions: list[dict[str, Any]], name: str, roles: str) -> dict[str, Any]:
    """The survey of a job template from the argument specifications of the roles in a directory."""
    return surveys.awx_survey(questions, name, surveys.read_options(Path(roles)))


def scrape_targets(
    names: list[str],
    deployments: list[list[dict[str, Any]]],
    *addresses: list[str],
    gpu_exporters: list[Any],
    gateways: list[list[Any]] | None = None,
    others: list[list[Any]] | None = None,
    **ports: int,
) -> dict[str, str]:
    """Prometheus' target lists of a fleet, text by file name."""
    hosts = [
        {**machine, "deployments": items, "gpu_exporter": bool(exporter)}
        for machine, items, exporter in zip(_machines(names, addresses), deployments, gpu_exporters, strict=True)
    ]
    gateway_names, gateway_binds, *gateway_addresses = gateways or [[], []]
    doors = [
        {**machine, "metrics_bind": bind}
        for machine, bind in zip(_machines(gateway_names, gateway_addresses), gateway_binds, strict=True)
    ]
    other_names, *other_addresses = others or [[]]
    return targets.scrape_targets(hosts, doors, _machines(other_names, other_addresses), **ports)


def monitoring_rules(given: dict[str, Any] | None = None) -> dict[str, str]:
    """Prometheus' rule files, text by file name."""
    return rules.rule_files(given)


def metrics_settings(releases: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """What a host tells Prometheus that only the controller knows."""
    return settings.metrics_settings(releases, **options)


def package_difference(tree: str) -> str:
    """The first file in which the package that runs and the sources of a checkout differ."""
    return same_source.package_difference(Path(tree))


def rollout_plan(
    names: list[str],
    looks: list[list[dict[str, Any]]],
    gateways: dict[str, dict[str, Any]],
    pools: list[dict[str, Any]],
    **options: Any,
) -> dict[str, Any]:
    """The order and the batches of a rollout, and which run of Ansible it is."""
    planned = rollout.rollout_plan(names, looks, gateways, pools, **options)
    return {**planned, "run": {**controller.this_run(), "what": planned["what"]}}


def rollout_aftermath(mine: dict[str, Any], **seen: Any) -> dict[str, Any]:
    """What has to happen to a host at which a rollout stops."""
    return aftermath.rollout_aftermath(mine, **seen)


def proof_endpoints(
    outcomes: list[dict[str, Any]], servers: list[str], known: dict[str, list[str]], socket: str
) -> list[dict[str, Any]]:
    """What the gate asks of each server through each gateway that knows it."""
    return aftermath.proof_endpoints(outcomes, servers, known, socket)


class FilterModule:
    """Named after the functions above."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """The filters by name."""
        faces = (
            tensor_parallel_size,
            gpu_memory_utilization,
            serving_plan,
            plan_table,
            gate_endpoints,
            lock_requests,
            driver_action,
            compatibility_verdict,
            gateway_pools,
            engine_clients,
            gateway_clients,
            gateway_maps,
            awx_survey,
            scrape_targets,
            monitoring_rules,
            metrics_settings,
            package_difference,
            rollout_plan,
            rollout_aftermath,
            proof_endpoints,
        )
        return {function.__name__: _filter(function) for function in faces}
