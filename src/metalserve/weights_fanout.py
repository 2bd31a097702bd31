"""Who fetches a model from its source, and who from which other host: chains, so that every link carries it once.

The first hosts of a site (as many as may ask a source at once) fetch from the source; every other host takes each file
from the host before it as soon as that one has it whole. Wall time is that of one fetch and, for each further host of a
chain, one file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

# A host before the one that is asked first takes over when that one fails; more would only make a failure longer.
_BACKUPS = 2


@dataclass(frozen=True)
class FleetHost:
    """One host of the play: where others reach it, and which revisions (`key@revision`) it wants and does not have."""

    name: str
    address: str
    site: str
    wanted: frozenset[str]
    pending: frozenset[str]


@dataclass(frozen=True)
class FetchPlan:
    """How one host gets one revision: `seed` asks the sources first, the others ask `peers` first."""

    seed: bool
    peers: tuple[str, ...]


def fetch_plan(hosts: Sequence[FleetHost], name: str, model: str, at_once: int, port: int) -> FetchPlan:
    """The plan of the host `name` for a revision.

    Hosts that have it already are the heads of the chains; without any, the first `at_once` of those that want it are.

    Args:
        hosts: the hosts of the play in its order.
        name: the host that fetches.
        model: `key@revision`.
        at_once: hosts of a site that may ask a source at once, at least 1.
        port: where hosts share.
    """
    site = next((host.site for host in hosts if host.name == name), "")
    near = [host for host in hosts if host.site == site and model in host.wanted and reachable(host.address)]
    holders = [host for host in near if model not in host.pending]
    line = holders + [host for host in near if model in host.pending]
    place = next((index for index, host in enumerate(line) if host.name == name), None)
    chains = len(holders) or max(1, at_once)
    if place is None or place < chains:
        return FetchPlan(True, ())
    before = [line[index] for index in range(place - chains, -1, -chains)][: 1 + _BACKUPS]
    key, _, revision = model.partition("@")
    return FetchPlan(False, tuple(f"http://{_bracketed(host.address)}:{port}/{key}/{revision}" for host in before))


def sharing_addresses(hosts: Sequence[FleetHost], name: str) -> list[str]:
    """The other hosts of the site that may ask this one; empty when none of them lacks anything that it wants too."""
    own = next((host for host in hosts if host.name == name), None)
    if own is None or not reachable(own.address):
        return []
    others = [host for host in hosts if host.name != name and host.site == own.site and reachable(host.address)]
    if not any(host.pending & own.wanted for host in others):
        return []
    return [host.address for host in others if host.wanted & own.wanted]


def reachable(address: str) -> bool:
    """Whether another host can mean this one by the address."""
    try:
        return not ip_address(address).is_loopback
    except ValueError:
        return address not in ("", "localhost")


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
