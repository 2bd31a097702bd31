"""May this host serve its deployments? From its facts and the inventory, before anything changes."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from metalserve import deployments as serving
from metalserve.errors import MetalserveError, Refusal
from metalserve.health.types import Expected, read_expected
from metalserve.verdict import capacity, hardware
from metalserve.verdict.check import AFTER, OK, REFUSED, WARN, Check, from_refusal, ok, refused, worst
from metalserve.verdict.cuda import image_check
from metalserve.verdict.driver import DriverOutlook, driver_outlook
from metalserve.verdict.options import Options, read_options
from metalserve.verdict.rows import split_refusals

# A refusal of these leaves nothing that could be served.
_NOT_ACCEPTABLE = ("facts", "plan")


@dataclass(frozen=True)
class HostVerdict:
    """The answer for one host.

    Attributes:
        verdict: `ok`, `ok_after` or `refused`.
        action: what the playbooks will do first, such as `driver upgrade and reboot`; None for `ok` and `refused`.
        checks: every question with its answer.
        releases: what would be served, as `serving_releases` returns it; empty where the plan is refused.
    """

    verdict: str
    action: str | None
    checks: tuple[Check, ...]
    releases: tuple[Mapping[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Verdict, action and checks of plain types."""
        return {"verdict": self.verdict, "action": self.action, "checks": [check.as_dict() for check in self.checks]}


def host_verdict(
    facts: Mapping[str, Any] | None,
    deployments: Sequence[Mapping[str, Any]],
    inputs: serving.Inputs,
    options: Options,
    today: dt.date,
    *,
    trouble: str = "",
) -> HostVerdict:
    """All checks of one host; never raises for what it finds.

    Args:
        facts: the fact `gpu_host`; None where the host gave none.
        deployments: `serving_deployments` of the host.
        inputs: the rest of the serving inventory.
        options: what the inventory says beside.
        today: the date against which ends of life count.
        trouble: why there are no facts.
    """
    if not facts:
        return _sum_up([_no_facts(trouble)], options)
    try:
        expected = read_expected(options.expected)
    except Refusal as refusal:
        return _sum_up([from_refusal("expected", refusal)], options)
    gpus = facts.get("gpus") or []
    outlook = driver_outlook(facts, options.driver, today) if gpus else DriverOutlook((), None)
    systemd = capacity.systemd_check(facts, options.docker)
    checks = [*([systemd] if systemd else []), capacity.docker_check(facts, options.docker)]
    releases: list[dict[str, Any]] = []
    try:
        releases = serving.serving_releases(deployments, _after(facts, outlook), inputs, check_host=False)
        checks.append(ok("plan", f"{len(releases)} deployments fit"))
    except Refusal as refusal:
        checks.append(from_refusal("plan", refusal))
    except MetalserveError as error:
        checks.append(from_refusal("plan", split_refusals(str(error))[0]))
    groups = tuple(group for release in releases for group in _gpu_groups(release["plan"]))
    checks += hardware.gpu_checks(facts, replace(expected, gpu_groups=groups), outlook) if gpus else _no_gpus(expected)
    if gpus:
        checks += outlook.checks
        checks += hardware.software_checks(facts, outlook, options.driver, options.toolkit)
        checks += hardware.bridge_checks(facts)
        checks += _images(facts, deployments, inputs, outlook.version)
    checks += capacity.disk_checks(facts, releases, inputs.models_dir, options)
    memory = capacity.memory_check(facts, releases)
    return _sum_up([*checks, memory] if memory else checks, options, releases)


def compatibility_verdict(
    facts: Mapping[str, Any],
    deployments: Sequence[Mapping[str, Any]] = (),
    *,
    inputs: serving.Inputs | None = None,
    options: Mapping[str, Any] | None = None,
    today: dt.date | None = None,
) -> dict[str, Any]:
    """The verdict of plain types.

    Raises:
        Refusal: the options have an unknown name.
    """
    given = inputs or serving.Inputs({}, {}, {}, {}, "/var/lib/metalserve/models")
    day = today or dt.datetime.now(tz=dt.UTC).date()
    return host_verdict(facts, deployments, given, read_options(options), day).as_dict()


def _gpu_groups(plan: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The GPUs that share one copy of the model; replicas of an engine do not talk to each other much."""
    used = plan["gpus_used"]
    size = plan["tensor_parallel_size"] * plan.get("pipeline_parallel_size", 1)
    return [tuple(used[start : start + size]) for start in range(0, len(used), size)]


def refused_host(trouble: str) -> HostVerdict:
    """The verdict of a host of which nothing can be known."""
    return _sum_up([_no_facts(trouble)], Options())


def _no_facts(trouble: str) -> Check:
    return refused(
        "facts",
        found=trouble or "the host gave no facts",
        needed="a host that answers, with Python 3.9 or newer",
        change="the connection (ansible HOST -m ping), the login, ansible_python_interpreter",
    )


def _no_gpus(expected: Expected) -> list[Check]:
    if not expected.gpu_count and not expected.gpu_pci_ids:
        return []
    return [
        refused(
            "gpu_count",
            found="no NVIDIA GPU on the PCI bus",
            needed=f"{expected.gpu_count or len(expected.gpu_pci_ids or ())} (gpu_health_expected)",
            change="look at lspci and the slots, or correct gpu_health_expected",
        )
    ]


def _after(facts: Mapping[str, Any], outlook: DriverOutlook) -> dict[str, Any]:
    """The facts as the plan will see them once the driver is in place: a release notes the driver it is for."""
    driver = {**(facts.get("driver") or {}), "loaded": outlook.version}
    return {**facts, "driver": driver} if facts.get("gpus") else dict(facts)


def _images(
    facts: Mapping[str, Any], deployments: Sequence[Mapping[str, Any]], inputs: serving.Inputs, driver: str | None
) -> list[Check]:
    """The image of each deployment against the driver that will be loaded, each image once."""
    checks: dict[tuple[str, str], Check] = {}
    for item in deployments:
        try:
            engine = serving.engine_for(item, inputs.engines)
        except (MetalserveError, KeyError):
            continue  # the plan has refused it
        locked = (inputs.lock.get("images") or {}).get(engine.image)
        environment = item.get("environment")
        check = image_check(
            facts["gpus"], driver, engine, locked, environment if isinstance(environment, Mapping) else None
        )
        checks.setdefault((check.verdict, check.found), check)
    return list(checks.values())


def _sum_up(checks: Sequence[Check], options: Options, releases: Sequence[Mapping[str, Any]] = ()) -> HostVerdict:
    judged = [_accepted(check, options) for check in checks]
    verdict = worst(check.verdict for check in judged)
    actions = dict.fromkeys(check.action for check in judged if check.verdict == AFTER)
    return HostVerdict(
        OK if verdict == WARN else verdict,
        "; ".join(actions) if verdict == AFTER else None,
        tuple(judged),
        tuple(releases),
    )


def _accepted(check: Check, options: Options) -> Check:
    if check.verdict != REFUSED or check.name not in options.accept or check.name in _NOT_ACCEPTABLE:
        return check
    return replace(check, verdict=WARN, change=f"{check.change} (accepted: preflight_accept)")
