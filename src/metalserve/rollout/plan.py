"""Which hosts a rollout changes, in which order and how many at once, so that enough of each model stays up."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from metalserve.errors import MetalserveError, Refusal

# Batches where nothing else is said: with gateways, and without.
DEFAULT_BATCHES = (1, "10%", "100%")
DEFAULT_BATCHES_WITHOUT_GATEWAY = (1,)
# What a person asks for of one deployment, and how it is told.
ACTIONS = {
    "rolled_back": "takes {} back",
    "taken_back": "takes a rollout back",
    "restarted": "restarts {}",
    "retired": "retires {}",
}
_PERCENT = re.compile(r"(\d{1,3})%")


def rollout_plan(
    names: Sequence[str],
    looks: Sequence[Sequence[Mapping[str, Any]]],
    gateways: Mapping[str, Mapping[str, Any]],
    pools: Sequence[Mapping[str, Any]],
    *,
    batches: Any = (),
    min_serving: Any = "50%",
    action: str = "rolled_out",
    deployment: str = "",
) -> dict[str, Any]:
    """The order and the batches of a rollout.

    Args:
        names: the hosts, in the order of the inventory.
        looks: for each host, the outcomes of a check run of `serving_rollout`.
        gateways: by name `present` (whether it runs) and `servers`, as `gateway_servers` looks at them.
        pools: what `gateway_pools` makes of the whole inventory.
        batches: sizes, each a number or a percentage of the hosts that change; the last one is repeated. A batch is cut
            where more at once would leave too little of a model. Empty: 1, 10%, 100% with gateways, else 1.
        min_serving: engines of each model that must serve at any time: a number, a percentage (rounded down, but 1 at
            least), or a mapping of those by model name, with `default` for the others.
        action: the state of `serving_rollout`: `rolled_out`, or one of `ACTIONS`, whose engines on hosts without the
            deployment are left alone. What is `retired` does not come back.
        deployment: of which deployment, for `ACTIONS`; `taken_back` has those that a rollout took up on each host.

    Returns:
        order (hosts that need no change, then those that change), batch_sizes (over `order`), batches (names of those
        that change), unchanged, changes (whether there is anything to do), gateways (those that run), keep (engines up
        at any time, by pool), action, what (one phrase), lines (for people), and hosts: for each host changing (servers
        that are started or stopped), heal (servers that an earlier rollout left drained), touched (both), known (its
        servers by gateway), releases (deployment, from, to), and parked (servers that a person has drained).

    Raises:
        Refusal: a batch or a number that cannot be read, or too few engines of a model to change any.
        MetalserveError: no host has the deployment, or one cannot do what is asked for.
    """
    if action in ACTIONS:
        names, looks = _acting(names, looks, deployment)
    servers = {
        gateway: {row["name"]: row for row in look.get("servers") or ()}
        for gateway, look in gateways.items()
        if look.get("present")
    }
    come_back = action != "retired"
    hosts = {name: _host(name, look, servers, heals=come_back) for name, look in zip(names, looks, strict=True)}
    down = _down(servers)
    changing = [name for name in names if hosts[name]["changing"]]
    # What is out already takes nothing away: first, so that it comes back first.
    changing.sort(key=lambda name: not (servers and set(hosts[name]["changing"]) <= down))
    unchanged = [name for name in names if not hosts[name]["changing"]]
    keep = _keep(pools, servers, down, min_serving) if servers else {}
    # What an earlier rollout left drained is proven and back before the first batch.
    back = {server for name in unchanged for server in hosts[name]["heal"]}
    servers_changing = {server for name in changing for server in hosts[name]["changing"]}
    room = _room(pools, keep, down - back, servers_changing, come_back=come_back)
    sizes = _sizes(batches or (DEFAULT_BATCHES if servers else DEFAULT_BATCHES_WITHOUT_GATEWAY), len(changing))
    cut = _batches(changing, sizes, hosts, room, down) if servers else _split(changing, sizes)
    healing = [name for name in unchanged if hosts[name]["heal"]]
    return {
        "order": unchanged + [name for batch in cut for name in batch],
        "batch_sizes": ([len(unchanged)] if unchanged else []) + [len(batch) for batch in cut],
        "batches": cut,
        "unchanged": unchanged,
        "changes": bool(changing or healing),
        "gateways": sorted(servers),
        "keep": keep,
        "action": action,
        "what": f"{ACTIONS[action].format(deployment)} on {len(changing)} of {len(names)} hosts"
        if action in ACTIONS
        else f"changes {len(changing)} of {len(names)} hosts",
        "lines": _lines(names, hosts, cut, healing, gateways, keep)
        if names or action != "taken_back"
        else ["The rollout took nothing up on these hosts."],
        "hosts": hosts,
    }


def _acting(
    names: Sequence[str], looks: Sequence[Sequence[Mapping[str, Any]]], deployment: str
) -> tuple[list[str], list[Sequence[Mapping[str, Any]]]]:
    """The hosts that have the deployment, or on which a rollout took something up.

    Raises:
        Refusal: none has the deployment that was named.
        MetalserveError: one of them cannot do what is asked for, in its own words.
    """
    here = [(name, look) for name, look in zip(names, looks, strict=True) if any(_present(item) for item in look)]
    if not here and deployment:
        raise Refusal(
            found=f"none of these hosts has a deployment {deployment}: {', '.join(names)}",
            needed="one of those that playbooks/ops/releases.yml lists",
            change="serving_deployment, or --limit",
        )
    unable = [f"{name}: {item['message']}" for name, look in here for item in look if not item["ok"]]
    if unable:
        raise MetalserveError("\n".join(unable))
    return [name for name, _ in here], [look for _, look in here]


def _present(item: Mapping[str, Any]) -> bool:
    return bool(item["active"] or item["ok"])


def _host(
    name: str, look: Sequence[Mapping[str, Any]], servers: Mapping[str, Mapping[str, Any]], *, heals: bool
) -> dict[str, Any]:
    own = {
        gateway: sorted(server for server in rows if server.partition(":")[0] == name)
        for gateway, rows in servers.items()
    }
    interrupted = [item for item in look if item["started"] or item.get("stopped")]
    changing = sorted(f"{name}:{item['deployment']}" for item in interrupted)
    # What is not looked at here cannot be proven, such as the other deployments while one is restarted.
    known = {f"{name}:{item['deployment']}" for item in look} if heals else set()
    heal = sorted(
        {
            server
            for gateway, mine in own.items()
            for server in mine
            if servers[gateway][server]["drained_by"] == "rollout" and server in known.difference(changing)
        }
    )
    return {
        "changing": changing,
        "heal": heal,
        "touched": sorted({*changing, *heal}),
        "known": own,
        "releases": [
            {"deployment": item["deployment"], "from": item["active"], "to": item["wanted"]} for item in interrupted
        ],
        "parked": sorted(
            {
                server
                for gateway, mine in own.items()
                for server in mine
                if servers[gateway][server]["drained_by"] == "operator"
            }
        ),
    }


def _down(servers: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Servers that some gateway gives nothing to."""
    return {name for rows in servers.values() for name, row in rows.items() if not row["up"]}


def _keep(
    pools: Sequence[Mapping[str, Any]], servers: Mapping[str, Mapping[str, Any]], down: set[str], min_serving: Any
) -> dict[str, int]:
    """Engines that must be up in each pool; one that serves nobody now has nothing to keep."""
    known = {name for rows in servers.values() for name in rows}
    keep = {}
    for pool in pools:
        mine = [server["name"] for server in pool["servers"]]
        if any(name in known and name not in down for name in mine):
            keep[pool["name"]] = max(needed(len(mine), _wanted(min_serving, model)) for model in pool["models"])
    return keep


def _wanted(min_serving: Any, model: str) -> Any:
    if isinstance(min_serving, Mapping):
        return min_serving.get(model, min_serving.get("default", "50%"))
    return min_serving


def needed(replicas: int, wanted: Any) -> int:
    """How many of so many engines must serve.

    Raises:
        Refusal: `wanted` is neither a number nor a percentage.
    """
    percent = _PERCENT.fullmatch(str(wanted))
    if percent and int(percent[1]) <= 100:
        return max(1, replicas * int(percent[1]) // 100)
    if str(wanted).isdigit():
        return int(wanted)
    raise Refusal(
        found=f"rollout_min_serving is {wanted!r}",
        needed="a number such as 2, a percentage such as 50%, or a mapping of model names to those",
        change="rollout_min_serving",
    )


def _room(
    pools: Sequence[Mapping[str, Any]], keep: Mapping[str, int], down: set[str], changing: set[str], *, come_back: bool
) -> dict[str, list[tuple[str, int]]]:
    """For each server that changes and is up, the pools in which it counts, with how many may be out at once there.

    Raises:
        Refusal: not even one may, or, where they do not come back, not all of them.
    """
    room: dict[str, list[tuple[str, int]]] = {}
    for pool in pools:
        if pool["name"] not in keep:
            continue
        mine = [server["name"] for server in pool["servers"]]
        lost = [name for name in mine if name in down and name not in changing]
        out = [name for name in mine if name in changing and name not in down]
        away = out[:1] if come_back else out
        spare = len(mine) - keep[pool["name"]] - len(lost)
        if not come_back:
            # Those that change and serve nobody now do not come back either.
            spare -= sum(name in changing and name in down for name in mine)
        if away and spare < len(away):
            gone = f", of which {', '.join(lost)} serve nobody now" if lost else ""
            raise Refusal(
                found=f"{', '.join(pool['models'])} has {len(mine)} engines behind the gateway{gone}; without "
                f"{', '.join(away)}, which {'changes' if come_back else 'would go'}, "
                f"{spare + keep[pool['name']] - len(away)} would be left",
                needed=f"{keep[pool['name']]} that serve at any time",
                change="rollout_min_serving (0 lets the model be away"
                + (" for the time of its restart" if come_back else "")
                + "), or bring further engines up",
            )
        for name in out:
            room.setdefault(name, []).append((pool["name"], spare))
    return room


def _sizes(batches: Any, total: int) -> list[int]:
    """The batches as numbers of hosts.

    Raises:
        Refusal: one is neither a number from 1 on nor a percentage.
    """
    given = batches if isinstance(batches, Sequence) and not isinstance(batches, str) else [batches]
    sizes = []
    for item in given:
        percent = _PERCENT.fullmatch(str(item))
        if percent:
            sizes.append(max(1, total * int(percent[1]) // 100))
        elif str(item).isdigit() and int(item) > 0:
            sizes.append(int(item))
        else:
            raise Refusal(
                found=f"the batch {item!r} in rollout_batches",
                needed="numbers of hosts from 1 on, or percentages such as 10%",
                change="rollout_batches",
            )
    return sizes


def _split(names: Sequence[str], sizes: Sequence[int]) -> list[list[str]]:
    batches: list[list[str]] = []
    rest = list(names)
    while rest:
        size = sizes[min(len(batches), len(sizes) - 1)]
        batches.append(rest[:size])
        rest = rest[size:]
    return batches


def _batches(
    changing: Sequence[str], sizes: Sequence[int], hosts: Mapping[str, Any], room: Mapping[str, Any], down: set[str]
) -> list[list[str]]:
    """Batches of at most those sizes, cut where a pool would have too little left."""
    cut: list[list[str]] = []
    for batch in _split(changing, sizes):
        out: dict[str, int] = {}
        current: list[str] = []
        for name in batch:
            places = [place for server in hosts[name]["changing"] for place in room.get(server, ())]
            if current and any(out.get(pool, 0) + 1 > spare for pool, spare in places):
                cut.append(current)
                current, out = [], {}
            for pool, _ in places:
                out[pool] = out.get(pool, 0) + 1
            current.append(name)
        cut.append(current)
    return cut


def _change(item: Mapping[str, Any]) -> str:
    if item["to"] is None:
        return f"{item['deployment']} {item['from'] or 'without a release'} is stopped"
    if item["from"] == item["to"]:
        return f"{item['deployment']} {item['to']} is started again"
    return f"{item['deployment']} {item['from'] or 'nothing'} -> {item['to']}"


def _lines(
    names: Sequence[str],
    hosts: Mapping[str, Any],
    cut: Sequence[Sequence[str]],
    healing: Sequence[str],
    gateways: Mapping[str, Mapping[str, Any]],
    keep: Mapping[str, int],
) -> list[str]:
    count = sum(map(len, cut))
    lines = [f"{count} of {len(names)} hosts change" + (f", in {len(cut)} batches:" if count else ".")]
    for number, batch in enumerate(cut, 1):
        for name in batch:
            changes = ", ".join(map(_change, hosts[name]["releases"]))
            lines.append(f"  {number}. {name}: {changes}")
    lines += [f"An earlier rollout left {name} drained: it is proven and put back." for name in healing]
    for name in names:
        if hosts[name]["parked"]:
            lines.append(f"{', '.join(hosts[name]['parked'])} was drained by a person and stays out.")
    for gateway, look in gateways.items():
        if not look.get("present"):
            lines.append(f"{gateway} does not run yet: nothing is drained there. playbooks/gateway.yml brings it up.")
            continue
        known = {row["name"] for row in look.get("servers") or ()}
        strangers = [server for name in names for server in hosts[name]["changing"] if server not in known]
        if strangers:
            lines.append(
                f"{gateway} does not know {', '.join(strangers)} yet: playbooks/gateway.yml lets clients reach it."
            )
    if count and keep:
        lines.append("Serving at any time: " + ", ".join(f"{pool} {number}" for pool, number in keep.items()) + ".")
    return lines
