"""What has to happen to a host at which a rollout stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# What the gate has to know of an endpoint.
_ASKED = ("name", "model", "served_names", "engine", "thinking")


def rollout_aftermath(
    mine: Mapping[str, Any],
    *,
    drained: bool,
    idle: bool,
    activated: Mapping[str, Any] | None,
    proofs: Sequence[Mapping[str, Any]],
    verdicts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Which servers of a host go back into the gateways, which release has to go back before, and what stays out.

    Args:
        mine: the host's part of the plan.
        drained: whether all gateways have taken its servers out.
        idle: whether they had nothing left to do, so that the host was changed afterwards.
        activated: the fact `serving_rollout`; of a check run when the change itself was not reached.
        proofs: results of the gate through the gateways, see `proofs_of`.
        verdicts: results of the watch, see `verdicts_of`.

    Returns:
        undrain (servers), back (deployments whose new release the gateway refused, with `reason`; only a rollout goes
        back by itself), stay (servers that stay out, with the reason), and reasons (sentences).
    """
    outcomes = {item["deployment"]: item for item in (activated or {}).get("outcomes", ())}
    asked, watched = proofs_of(proofs), verdicts_of(verdicts)
    touched = drained and idle
    reached = bool(activated) and not activated["check"] if activated else False
    undrain, back, stay, reasons = [], [], {}, []
    for server in mine["touched"]:
        deployment = server.partition(":")[2]
        outcome = outcomes.get(deployment, {})
        wrong = [proof["msg"] for proof in asked if proof["server"] == server and not proof["passed"]]
        wrong += [f"watched: {each['text']}" for each in watched if each["server"] == server and not each["ok"]]
        if not touched and server in mine["changing"]:
            undrain.append(server)
        elif not reached or not outcome:
            stay[server] = "it is not known what became of it"
        elif not outcome["serving"]:
            stay[server] = "nothing that passes the gate runs there"
        elif wrong and outcome["ok"] and outcome["started"] and activated and activated["state"] == "rolled_out":
            back.append({"server": server, "deployment": deployment, "reason": "; ".join(wrong)})
        elif wrong:
            stay[server] = "; ".join(wrong)
        else:
            undrain.append(server)
        reasons += [f"{server} through the gateway: {text}" for text in wrong]
    return {"undrain": undrain, "back": back, "stay": stay, "reasons": reasons}


def proofs_of(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`server`, `passed` and `msg` of each gate, from the results of a task that loops with `__rollout_pair`.

    One that could not be asked has not passed, unless it was the gateway that could not be reached: of the host that
    says nothing.
    """
    return [
        {
            "server": item["__rollout_pair"]["server"],
            "passed": bool(item.get("passed")),
            "msg": str(item.get("msg", "")),
        }
        for item in results
        if "__rollout_pair" in item and not item.get("gateway_lost")
    ]


def verdicts_of(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`server`, `ok` and `text` of each watch, in the same way; a server that the gateway lost sight of is not well."""
    return [
        {
            "ok": False,
            "text": str(item.get("msg", "")),
            **(item.get("verdict") or {}),
            "server": item["__rollout_pair"]["server"],
        }
        for item in results
        if "__rollout_pair" in item and not item.get("gateway_lost")
    ]


def proof_endpoints(
    outcomes: Sequence[Mapping[str, Any]], servers: Sequence[str], known: Mapping[str, Sequence[str]], socket: str
) -> list[dict[str, Any]]:
    """What the gate asks of each server through each gateway that knows it.

    Args:
        outcomes: those of the fact `serving_rollout`, each with its `endpoint`.
        servers: the servers, `host:deployment`.
        known: names of servers by gateway.
        socket: HAProxy's socket for proofs, in percent-encoding.

    Returns:
        For each pair name, model, served_names, engine and thinking of the endpoint, with `gateway`, `server` and
        `url`.
    """
    by_name = {
        str(outcome["deployment"]): {name: outcome["endpoint"][name] for name in _ASKED}
        for outcome in outcomes
        if outcome.get("endpoint")
    }
    return [
        {**by_name[deployment], "gateway": gateway, "server": server, "url": f"http+unix://{socket}/{server}"}
        for server in servers
        if (deployment := server.partition(":")[2]) in by_name
        for gateway, names in known.items()
        if server in names
    ]
