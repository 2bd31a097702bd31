"""What is known about a deployment that does not do what it should, collected on its host; changes nothing."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

from .failures import find_failures
from .files import read_json_object
from .readiness import read_journal, run_command
from .releases import active_release, link_target, refusal_of, release_directory, release_ids

Runner = Callable[[Sequence[str]], str]
_PROPERTIES = "ActiveState,SubState,Result,ExecMainStatus,NRestarts,ActiveEnterTimestamp,UnitFileState"
_LABEL = '{{ index .Config.Labels "metalserve.release" }} since {{ .State.StartedAt }}'
_GPUS = ["nvidia-smi", "--query-gpu=index,name,memory.used,memory.total", "--format=csv,noheader"]


def diagnose(
    root: Path,
    deployment: str,
    *,
    run: Runner = run_command,
    status_of: Optional[Callable[[str], str]] = None,
    journal_lines: int = 20,
) -> dict[str, Any]:
    """The state of a deployment with what its journal says.

    Args:
        root: where deployments keep their releases.
        deployment: its name.
        run: runs a command and returns its output.
        status_of: asks a URL and says what came.
        journal_lines: how many of the journal's last lines are shown.

    Returns:
        {deployment, healthy, lines, failures [{name, cause, remedy, line}]}.
    """
    ask = status_of or http_status
    current = active_release(root, deployment)
    if current is None:
        known = ", ".join(release_ids(root, deployment)) or "none"
        lines = [f"{deployment}: no release is current on this host (releases here: {known})"]
        return {"deployment": deployment, "healthy": False, "lines": lines, "failures": []}
    directory = release_directory(root, deployment, current)
    endpoint = read_json_object(directory / "endpoint.json")
    unit, url = str(endpoint.get("unit")), str(endpoint.get("url"))
    state = dict(
        line.split("=", 1)
        for line in run(["systemctl", "show", unit, f"--property={_PROPERTIES}"]).splitlines()
        if "=" in line
    )
    running = run(["docker", "inspect", "--format", _LABEL, f"metalserve-{deployment}"]).strip()
    answer = ask(f"{url}{endpoint.get('ready_route')}")
    gate = read_json_object(directory / "gate.json")
    verdict = "has not run" if "passed" not in gate else "passed" if gate["passed"] is True else "refused"
    rows = [
        ("unit", f"{unit} {' '.join(f'{name}={value}' for name, value in state.items()) or 'is not known to systemd'}"),
        ("container", running or "none"),
        ("current", current),
        ("good", link_target(root, deployment, "good") or "none"),
        ("previous", link_target(root, deployment, "previous") or "none"),
        ("ready", f"{url}{endpoint.get('ready_route')}: {answer}"),
        ("gate", f"{verdict} {gate.get('when', '')}".strip()),
    ]
    rows += [
        (f"gate {row['name']}", str(row.get("detail")))
        for row in gate.get("rows") or []
        if isinstance(row, dict) and not row.get("ok")
    ]
    for release_id in release_ids(root, deployment):
        refused = refusal_of(root, deployment, release_id)
        if refused is not None:
            rows.append((f"refused {release_id}", f"{refused.when} ({refused.stage}): {refused.reason}"))
    rows += [("gpu", line) for line in run(_GPUS).splitlines()]
    healthy = state.get("ActiveState") == "active" and answer == "HTTP 200" and gate.get("passed") is True
    journal = [] if healthy else read_journal(unit, run)
    failures = find_failures(journal)
    width = max(len(name) for name, _ in rows)
    lines = [f"{deployment}: {'serves' if healthy else 'does not serve as it should'}"]
    lines += [f"  {name:<{width}}  {text}" for name, text in rows]
    lines += [f"  {failure.sentence()}" for failure in failures]
    if journal:
        lines += [f"  the last lines of the journal of {unit}:", *(f"    {line}" for line in journal[-journal_lines:])]
    return {
        "deployment": deployment,
        "healthy": healthy,
        "lines": lines,
        "failures": [vars(failure) for failure in failures],
    }


def http_status(url: str) -> str:
    """What a GET of a URL gives within 5 s, in words."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return f"HTTP {response.status}"
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(getattr(error, "reason", error))
