"""What differs from the inventory, over a fleet: one table host x aspect, every difference below it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from metalserve.errors import Refusal
from metalserve.toolkit import gpu_specs, stale
from metalserve.verdict.fleet import aligned, hosts_named

# In the order of the table's columns. `gateway` is of gateways, the others are of hosts with engines.
ASPECTS = ("release", "units", "driver", "toolkit", "cdi", "weights", "image", "strays", "gateway")
CDI_SPEC = "/var/run/cdi/nvidia.yaml"

# By host: `aspects` (aspect -> sentences, None where it is nobody's matter), and `trouble`, why it could not be looked
# at.
Found = Mapping[str, Mapping[str, Any]]


def host_aspects(
    facts: Mapping[str, Any],
    releases: Sequence[Mapping[str, Any]],
    seen: Mapping[str, Sequence[str] | None],
    files: Sequence[str],
    *,
    toolkit_version: str | None,
) -> dict[str, list[str] | None]:
    """The aspects of one host.

    Args:
        facts: the host facts.
        releases: what it is to run, as `serving_releases` returns it.
        seen: what the host itself has found, by aspect.
        files: unit files that differ from what would be written.
        toolkit_version: the version that the container toolkit is to have; None: it is not managed.
    """
    gpus, toolkit = bool(facts.get("gpus")), (facts.get("container_toolkit") or {}).get("version")
    there = {name.rpartition("@")[2] for name in (facts.get("docker") or {}).get("images") or ()}
    wanted = {str(release["image"]["digest"]): str(release["image"]["reference"]) for release in releases}
    aspects: dict[str, list[str] | None] = {
        name: None if found is None else list(found) for name, found in seen.items()
    }
    aspects["units"] = [*(f"{path} is not as it would be written" for path in files), *(aspects.get("units") or [])]
    aspects["toolkit"] = aspects["cdi"] = None
    if gpus and toolkit_version:
        aspects["toolkit"] = (
            [f"the container toolkit is {toolkit or 'missing'}, not {toolkit_version}"]
            if toolkit != toolkit_version
            else []
        )
        wrong = stale(gpu_specs((facts.get("cdi") or {}).get("specs") or []), CDI_SPEC, facts)
        aspects["cdi"] = [wrong.rstrip(".")] if wrong else []
    aspects["image"] = [
        f"{reference} ({digest[:19]}) is not on the host" for digest, reference in wanted.items() if digest not in there
    ]
    return aspects


def drift_table(found: Found) -> list[str]:
    """One line a host, one column an aspect, aligned; aspects that concern nobody are left out."""
    columns = [name for name in ASPECTS if any(each["aspects"].get(name) is not None for each in found.values())]
    rows = [("host", *columns)]
    rows += [(host, *(_cell(each, name) for name in columns)) for host, each in found.items()]
    return aligned(rows)


def _cell(each: Mapping[str, Any], name: str) -> str:
    if each["trouble"]:
        return "?"
    sentences = each["aspects"].get(name)
    return "-" if sentences is None else "DRIFT" if sentences else "ok"


def drift_remarks(found: Found) -> list[str]:
    """Every difference with its hosts; what several hosts have in common stands once."""
    said: dict[tuple[str, str], list[str]] = {}
    for host, each in found.items():
        if each["trouble"]:
            said.setdefault(("?", str(each["trouble"])), []).append(host)
        for name in ASPECTS:
            for sentence in each["aspects"].get(name) or []:
                said.setdefault((name, sentence), []).append(host)
    order = ("?", *ASPECTS)
    return [
        f"{hosts_named(hosts)}: {'could not be looked at' if name == '?' else name}: {sentence}"
        for (name, sentence), hosts in sorted(said.items(), key=lambda item: order.index(item[0][0]))
    ]


def _bad(found: Found) -> list[str]:
    return [host for host, each in found.items() if each["trouble"] or any(each["aspects"].values())]


def drift_summary(found: Found) -> str:
    """How many hosts are as the inventory wants them."""
    bad, unknown = _bad(found), [host for host, each in found.items() if each["trouble"]]
    parts = [f"{len(found) - len(bad)} as the inventory wants them", f"{len(bad) - len(unknown)} differ"]
    parts += [f"{len(unknown)} could not be looked at"] if unknown else []
    return f"{len(found)} host{'s' * (len(found) != 1)}: {', '.join(parts)}"


def drift_refusal(found: Found) -> Refusal | None:
    """The sentence with which a run ends that is to fail on drift; None without any."""
    bad = _bad(found)
    if not bad:
        return None
    return Refusal(
        found=f"{len(bad)} of {len(found)} hosts are not as the inventory wants them, or could not be looked at: "
        f"{hosts_named(bad)}",
        needed="none; nothing was changed",
        change="bring them back with site.yml (playbooks/gateway.yml for gateways), or the inventory in line with them",
    )


def report_json(found: Found) -> str:
    """What was found as a JSON text: {schema, hosts: {host: {trouble, aspects: {aspect: [sentence]}}}}."""
    return json.dumps({"schema": 1, "hosts": found}, indent=1, sort_keys=True) + "\n"
