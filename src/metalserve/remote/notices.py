"""What a host holds that the inventory does not expect: deployments that left it, releases that were refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .releases import active_release, deployment_names, link_target, refusal_of
from .rollout_host import LocalHost


def notices(root: Path, wanted: Mapping[str, str]) -> list[str]:
    """A sentence for each deployment that is not in the inventory and each wanted release that was refused here.

    Args:
        root: where deployments keep their releases.
        wanted: the release that the inventory asks for, by deployment.
    """
    host = LocalHost(ready_timeout_seconds=0)
    sentences = []
    for name in deployment_names(root):
        units = host.other_units(name, "") if name not in wanted else []
        if units:
            sentences.append(
                f"{name} is not in the inventory, and {', '.join(units)} runs or starts at boot. It is left alone. "
                f"To stop it: playbooks/ops/retire.yml -e serving_deployment={name}."
            )
    for name, release_id in sorted(wanted.items()):
        refused, good = refusal_of(root, name, release_id), link_target(root, name, "good")
        if refused is not None and good not in (None, release_id):
            sentences.append(
                f"{name}: the release {release_id} was refused here at {refused.when} ({refused.stage}): "
                f"{refused.reason}. Now current: {active_release(root, name)}, last good: {good}."
            )
    return sentences
