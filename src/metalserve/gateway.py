"""What the gateway serves: pools of engines by model name, and the clients that may ask them."""

from __future__ import annotations

import ipaddress
import json
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from typing import Any

from metalserve.adapters import asked_names
from metalserve.deployments import normalize
from metalserve.engines.info import engine_of
from metalserve.errors import Refusal

_CLIENT_FIELDS = {
    "name": str,
    "key_sha256": str,
    "requests_per_minute": int,
    "concurrency": int,
    "models": list,
    "priority": bool,
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MODEL_NAME = re.compile(r"[A-Za-z0-9._:/@+-]+")
# The client that a rollout is when it proves an engine through the gateway; it has no key.
PROVER = "rollout"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def gateway_pools(
    hosts: Sequence[Mapping[str, Any]],
    *,
    server_max_requests: int,
    long_prompts: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Group the deployments of a fleet into pools that serve one set of model names.

    Args:
        hosts: name, address (as the gateway reaches it) and deployments of each host.
        server_max_requests: requests that one engine is given at a time where its deployment has no max_sequences;
            the others wait in the gateway's queue.
        long_prompts: {model, bytes, deployments}: requests for that model whose body is larger than so many bytes go to
            the deployments of those names, which get nothing else of it.

    Returns:
        One mapping a pool, sorted by its models: name, models, above_bytes (None: the model's ordinary pool),
        health_route, priority ("lower", "higher": what is served first; None: the engines do not order by priority),
        servers {name, address, port, max_requests}.

    Raises:
        Refusal: a deployment that is wrong by itself, or a long-prompt rule that names nothing.
    """
    engines: list[dict[str, Any]] = []
    for host in hosts:
        for deployment in normalize(host["deployments"]):
            asked = asked_names(deployment)
            engines.append({"host": host["name"], "address": host["address"], **deployment, "asked_names": asked})
    names = sorted({name for engine in engines for name in engine["asked_names"]})
    for name in names:
        if not _MODEL_NAME.fullmatch(name):
            raise Refusal(
                found=f"the served name {name!r}",
                needed="letters, digits and ._:/@+- only: the gateway looks it up in a file with a name a line",
                change="`served_names` of the deployment",
            )
    limits = _long_prompt_limits(long_prompts, engines, names)
    members: dict[tuple[tuple[str, ...], int | None], list[dict[str, Any]]] = {}
    models: dict[tuple[tuple[str, ...], int | None], list[str]] = {}
    for model in names:
        for above in (None, limits[model][0]) if model in limits else (None,):
            chosen = [
                engine
                for engine in engines
                if model in engine["asked_names"]
                and (model not in limits or (engine["name"] in limits[model][1]) == (above is not None))
            ]
            if not chosen:
                raise Refusal(
                    found=f"every deployment of {model} is set aside for long prompts",
                    needed="at least one deployment for the others",
                    change="`deployments` of the entry in gateway_long_prompts",
                )
            key = (tuple(f"{engine['host']}:{engine['name']}" for engine in chosen), above)
            members[key] = chosen
            models.setdefault(key, []).append(model)
    pools = [_pool(models[key], key[1], members[key], server_max_requests) for key in members]
    pools.sort(key=lambda pool: (pool["models"], pool["above_bytes"] is not None))
    taken: set[str] = set()
    for pool in pools:
        base = re.sub(r"[^A-Za-z0-9._-]", "_", pool["models"][0]) + ("_long" if pool["above_bytes"] else "")
        pool["name"] = next(name for name in chain([base], (f"{base}-{n}" for n in count(2))) if name not in taken)
        taken.add(pool["name"])
    return pools


def _long_prompt_limits(
    rules: Sequence[Mapping[str, Any]], engines: Sequence[Mapping[str, Any]], models: Sequence[str]
) -> dict[str, tuple[int, frozenset[str]]]:
    limits: dict[str, tuple[int, frozenset[str]]] = {}
    for rule in rules:
        model, wanted = str(rule.get("model")), frozenset(map(str, rule.get("deployments") or ()))
        known = {engine["name"] for engine in engines if model in engine["asked_names"]}
        if model not in models or not wanted or not wanted <= known or not isinstance(rule.get("bytes"), int):
            raise Refusal(
                found=f"the entry {dict(rule)} in gateway_long_prompts",
                needed=f"model (one of {', '.join(models)}), bytes (a number), and deployments that serve that model"
                + (f" (of {', '.join(sorted(known))})" if known else ""),
                change="gateway_long_prompts",
            )
        limits[model] = (rule["bytes"], wanted)
    return limits


def _pool(
    models: list[str], above_bytes: int | None, members: list[dict[str, Any]], server_max_requests: int
) -> dict[str, Any]:
    infos = [engine_of(member) for member in members]
    # Where engines are mixed, only /health is known to all of them.
    routes = {info.ready_route for info in infos}
    # What is served first where a deployment orders its requests at all.
    directions = {(member["priority_order"] or "").removesuffix("_first") or None for member in members}
    return {
        "models": models,
        "above_bytes": above_bytes,
        "health_route": routes.pop() if len(routes) == 1 else "/health",
        "priority": directions.pop() if len(directions) == 1 else None,
        "servers": [
            {
                "name": f"{member['host']}:{member['name']}",
                "address": member["address"],
                "port": member["port"],
                "max_requests": member["max_sequences"] or server_max_requests,
            }
            for member in members
        ],
    }


def engine_clients(
    gateways: Sequence[str], others: Sequence[str], resolve: Callable[[str], Sequence[str]] | None = None
) -> list[str]:
    """The addresses that may reach engines, where there is a gateway.

    Args:
        gateways: addresses or names of the gateways as the engines see them.
        others: further addresses and networks, such as that of a Prometheus.
        resolve: addresses of a name; the system's own when None.

    Returns:
        Addresses and networks, sorted; empty without a gateway, which means that nobody is kept out.

    Raises:
        Refusal: a name that cannot be resolved, or something that is no address.
    """
    if not gateways:
        return []
    found = set()
    for text in (*gateways, *others):
        try:
            found.add(str(ipaddress.ip_network(text, strict=False)) if "/" in text else str(ipaddress.ip_address(text)))
            continue
        except ValueError:
            known = () if text in others else (resolve or _addresses)(text)
        if not known:
            raise Refusal(
                found=f"{text!r} among those that may reach the engines",
                needed="an address such as 10.0.0.5, a network such as 10.0.0.0/24, or a gateway's name that has one",
                change="gateway_address or ansible_host of the gateway, or serving_clients",
            )
        found.update(known)
    return sorted(found)


def _addresses(name: str) -> list[str]:
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def gateway_clients(clients: Sequence[Mapping[str, Any]], pools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check the clients and fill in what each may ask for.

    Args:
        clients: name, key_sha256, and as wished requests_per_minute, concurrency, models, priority.
        pools: what `gateway_pools` returns.

    Returns:
        The clients with all fields; `models` holds every name the client may ask for, `model_list` the answer to
        GET /v1/models as JSON text. No limit is the number 0.

    Raises:
        Refusal: an unknown, missing or malformed field, two clients of one name or key, a model that no pool serves.
    """
    served = sorted({model for pool in pools for model in pool["models"]})
    seen: dict[str, str] = {}
    filled = []
    for client in clients:
        name = str(client.get("name", "(unnamed)"))
        for field, value in client.items():
            kind = _CLIENT_FIELDS.get(field)
            wrong = kind is None or not isinstance(value, kind) or (kind is int and isinstance(value, bool))
            if wrong or (kind is int and value < 1):
                raise Refusal(
                    found=f"{field}: {value!r} of the client {name}",
                    needed="name, key_sha256, requests_per_minute and concurrency (numbers from 1 on), models (a list) "
                    "and priority (true or false)",
                    change=f"the entry of {name} in gateway_clients",
                )
        if not _NAME.fullmatch(name):
            raise Refusal(
                found=f"a client called {name!r}",
                needed="a name of letters, digits, dots, dashes and underscores",
                change="`name` in gateway_clients",
            )
        if name == PROVER:
            raise Refusal(
                found=f"a client called {PROVER}, which is what the gateway calls a rollout's own questions",
                needed="another name",
                change="`name` in gateway_clients",
            )
        key = str(client.get("key_sha256", ""))
        if not _SHA256.fullmatch(key):
            raise Refusal(
                found=f"the client {name} with key_sha256 {key[:12]!r}",
                needed="the SHA-256 of its key, 64 lower-case hexadecimal digits, never the key itself",
                change=f"`key_sha256` of {name} in gateway_clients; `metalserve key {name}` makes a key and its hash",
            )
        for what, value in (("name", name), ("key", key)):
            if value in seen:
                raise Refusal(
                    found=f"the clients {seen[value]} and {name} have one {what}",
                    needed=f"a {what} of its own for each client",
                    change="gateway_clients",
                )
            seen[value] = name
        unknown = sorted(set(map(str, client.get("models") or ())) - set(served))
        if unknown:
            raise Refusal(
                found=f"the client {name} may use {', '.join(unknown)}, which no deployment serves",
                needed=f"names out of {', '.join(served)}",
                change=f"`models` of {name} in gateway_clients, or served_names of a deployment",
            )
        models = sorted(map(str, client["models"])) if client.get("models") else served
        filled.append(
            {
                "name": name,
                "key_sha256": key,
                "requests_per_minute": client.get("requests_per_minute") or 0,
                "concurrency": client.get("concurrency") or 0,
                "priority": bool(client.get("priority")),
                "models": models,
                "model_list": _model_list(models),
            }
        )
    return filled


def _model_list(models: Sequence[str]) -> str:
    listed = [{"id": model, "object": "model", "created": 0, "owned_by": "metalserve"} for model in models]
    return json.dumps({"object": "list", "data": listed}, ensure_ascii=True)


def gateway_maps(pools: Sequence[Mapping[str, Any]], clients: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The look-up files of the gateway: a key, a space and a value in each line.

    Args:
        pools: what `gateway_pools` returns.
        clients: what `gateway_clients` returns.

    Returns:
        Text by file name: keys.map (SHA-256 of a key to its client), model_lists.map (client to its answer of
        GET /v1/models), rates.map, concurrency.map, priorities.map (client to number), allowed.map (client|model),
        pools.map (model to pool), long_bytes.map and long_pools.map (model to its limit and its pool beyond it). The
        client of a rollout's own questions is among them, without a key.
    """
    short = [pool for pool in pools if pool["above_bytes"] is None]
    long = [pool for pool in pools if pool["above_bytes"] is not None]
    served = sorted({model for pool in pools for model in pool["models"]})
    prover = {"name": PROVER, "model_list": _model_list(served), "models": served}
    tables: dict[str, dict[str, Any]] = {
        "keys": {client["key_sha256"]: client["name"] for client in clients},
        "model_lists": {client["name"]: client["model_list"] for client in (*clients, prover)},
        "rates": {client["name"]: client["requests_per_minute"] for client in clients},
        "concurrency": {client["name"]: client["concurrency"] for client in clients},
        "priorities": {client["name"]: 1 for client in clients if client["priority"]},
        "allowed": {f"{client['name']}|{model}": 1 for client in (*clients, prover) for model in client["models"]},
        "pools": {model: pool["name"] for pool in short for model in pool["models"]},
        "long_bytes": {model: pool["above_bytes"] for pool in long for model in pool["models"]},
        "long_pools": {model: pool["name"] for pool in long for model in pool["models"]},
    }
    return {
        f"{name}.map": "".join(f"{key} {value}\n" for key, value in table.items()) for name, table in tables.items()
    }
