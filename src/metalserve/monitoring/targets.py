"""What Prometheus scrapes, as target lists for its file discovery, from the inventory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from metalserve.deployments import normalize
from metalserve.engines.info import engine_of
from metalserve.errors import Refusal

_LOOPBACK = ("127.", "localhost", "[::1]")
_ANYWHERE = ("", "*", "0.0.0.0", "[::]")  # noqa: S104 - an address that is read, not bound


def scrape_targets(
    hosts: Sequence[Mapping[str, Any]],
    gateways: Sequence[Mapping[str, Any]] = (),
    others: Sequence[Mapping[str, Any]] = (),
    *,
    node_port: int = 9100,
    gpu_port: int = 9400,
) -> dict[str, str]:
    """The target lists of a fleet, JSON text by file name.

    Engines are reached at their own ports on the internal network, past the gateway: it would spread the questions over
    replicas, and lets no `/metrics` through. A drained engine stays a target: what it still does is to be seen, and
    the alerts know from the gateway that it is drained.

    Args:
        hosts: name, address (as the monitoring reaches it), deployments, and gpu_exporter (whether one runs there).
        gateways: name, address, metrics_bind (where HAProxy tells its metrics).
        others: name and address of further hosts, such as the monitoring's own.
        node_port: node exporter's port.
        gpu_port: dcgm-exporter's port.

    Raises:
        Refusal: a deployment that is wrong by itself, or a gateway whose metrics are told to nobody else.
    """
    engines = [
        _target(
            f"{host['address']}:{deployment['port']}",
            __metrics_path__=engine_of(deployment).metrics_route,
            host=host["name"],
            deployment=deployment["name"],
            model=deployment["model"],
            engine=deployment["engine"],
        )
        for host in hosts
        for deployment in normalize(host["deployments"])
    ]
    named = {machine["name"]: machine["address"] for machine in (*others, *gateways, *hosts)}
    return {
        f"{name}.json": json.dumps(targets, indent=1, sort_keys=True) + "\n"
        for name, targets in {
            "engines": engines,
            "hosts": [_target(f"{address}:{node_port}", host=name) for name, address in sorted(named.items())],
            "gpus": [
                _target(f"{host['address']}:{gpu_port}", host=host["name"]) for host in hosts if host["gpu_exporter"]
            ],
            "gateways": [
                _target(_gateway_address(gateway, [other["name"] for other in others]), gateway=gateway["name"])
                for gateway in gateways
            ],
        }.items()
    }


def _target(address: str, **labels: str) -> dict[str, Any]:
    return {"targets": [address], "labels": labels}


def _gateway_address(gateway: Mapping[str, Any], own: Sequence[str]) -> str:
    """Where the monitoring finds a gateway's metrics; `own` are its own hosts, one of which may be the gateway."""
    place, _, port = str(gateway["metrics_bind"]).rpartition(":")
    if place.startswith(_LOOPBACK) and [gateway["name"]] != list(own):
        raise Refusal(
            found=f"the gateway {gateway['name']} tells its metrics at {gateway['metrics_bind']} only",
            needed="an address of its own in the internal network, which the monitoring reaches",
            change="gateway_metrics_bind, then run playbooks/gateway.yml",
        )
    return f"{gateway['address'] if place in _ANYWHERE else place}:{port}"
