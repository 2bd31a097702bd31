"""Which GPUs of a host a deployment gets when it asks for a number of them: joined by NVLink, on one NUMA node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from metalserve.errors import Refusal

# Cost of a pair by what joins it, in the words of `nvidia-smi topo -m`: NVLink, one PCIe switch, several, the host
# bridge, the node's interconnect, the link between sockets.
_COST = {"PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5}
_SAME_NODE, _OTHER_NODE = _COST["NODE"], _COST["SYS"]


def gpu_rows(host: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The host's GPUs by index. One seen by PCI only has no index yet; the driver numbers them in PCI order."""
    return {
        place if row.get("index") is None else int(row["index"]): row
        for place, row in enumerate(host.get("gpus") or ())
    }


def pick_gpus(host: Mapping[str, Any], count: int, taken: Sequence[int] = ()) -> tuple[int, ...]:
    """The `count` free GPUs that are joined best; among equals, those that leave the fewest on their NUMA nodes.

    Raises:
        Refusal: fewer whole GPUs are free.
    """
    rows = gpu_rows(host)
    free = [index for index in sorted(rows) if index not in taken and not rows[index].get("mig_enabled")]
    if count > len(free):
        also = f", {len(set(taken) & set(rows))} are given to others" if taken else ""
        raise Refusal(
            found=f"{count} GPU{'s' * (count > 1)} wished for, {len(free)} of {len(rows)} are free{also}",
            needed=f"{count} whole GPUs",
            change="lower `gpus` of this deployment or of another one on this host",
        )
    order = sorted(rows)
    links = host.get("links")

    def pair(a: int, b: int) -> int:
        if links:
            kind = str(links[order.index(a)][order.index(b)])
            return 0 if kind.startswith("NV") else _COST.get(kind, _OTHER_NODE)
        return _SAME_NODE if rows[a].get("numa_node") == rows[b].get("numa_node") else _OTHER_NODE

    costs = {(a, b): pair(a, b) for a, b in combinations(free, 2)}

    def score(chosen: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
        nodes = {rows[index].get("numa_node") for index in chosen}
        left = sum(rows[index].get("numa_node") in nodes for index in free) - count
        return sum(costs[p] for p in combinations(chosen, 2)), len(nodes), left, chosen

    return min(combinations(free, count), key=score)


def assign_gpus(host: Mapping[str, Any], deployments: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """GPUs of each deployment of a host, by its name; never one GPU in two of them.

    `gpus` of a deployment is `all`, a list of indexes, or how many it wants. Lists are kept as they are; numbers are
    then filled in, the largest first.

    Raises:
        Refusal: two deployments want one GPU, an index the host does not have, or more GPUs than there are.
    """
    rows = gpu_rows(host)
    found: dict[str, tuple[int, ...]] = {}
    owner: dict[int, str] = {}
    counted: list[tuple[int, str]] = []
    for item in deployments:
        name, wanted = str(item["name"]), item.get("gpus", "all")
        if isinstance(wanted, int) and not isinstance(wanted, bool):
            if wanted < 1:
                raise Refusal(
                    found=f"gpus {wanted} of the deployment {name}",
                    needed="`all`, a number of GPUs, or a list of indexes",
                    change=f"`gpus` of {name} in serving_deployments",
                )
            counted.append((wanted, name))
            continue
        found[name] = tuple(rows) if wanted == "all" else tuple(int(index) for index in wanted)
        for index in found[name]:
            if index not in rows:
                raise Refusal(
                    found=f"GPU {index} of the deployment {name}, the host has {len(rows)}",
                    needed="indexes of GPUs the host has",
                    change=f"`gpus` of {name} in serving_deployments",
                )
            if index in owner:
                raise Refusal(
                    found=f"the deployments {owner[index]} and {name} both want GPU {index}",
                    needed="each GPU in one deployment",
                    change="`gpus` of both in serving_deployments: a number each, or different indexes",
                )
            owner[index] = name
    for count, name in sorted(counted, key=lambda entry: -entry[0]):
        found[name] = pick_gpus(host, count, tuple(owner))
        owner.update(dict.fromkeys(found[name], name))
    return {str(item["name"]): found[str(item["name"])] for item in deployments}
