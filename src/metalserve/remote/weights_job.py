"""One model's fetch as a job of its own: its request, its state on the disk, and the unit that runs it.

.incoming/<model>@<revision>.request.json    what is wanted, written before the unit is started
.incoming/<model>@<revision>.state.json      what the worker says, once a second while it runs
metalserve-weights@<model>:<revision>.service  a transient unit; it needs no connection and no controller
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from .weights import incoming_directory

WORKER_PATH = Path("/usr/local/lib/metalserve/weights.pyz")
# Two runs that differ only in these ask for the same: peers are who is in the play, the rest is how fast it goes.
_NOT_THE_SAME_JOB = ("files", "sources", "format", "require_chat_template", "full_hash")
# The worker shares the host with engines. A worker that the kernel ends (no memory, kill) is started again and goes on.
_PROPERTIES = (
    "Description=metalserve: weights of a model",
    "Restart=on-abnormal",
    "RestartSec=5",
    "StartLimitIntervalSec=3600",
    "StartLimitBurst=20",
    "Nice=5",
    "IOSchedulingPriority=7",
    "NoNewPrivileges=yes",
)

Launch = Callable[[str, Sequence[str], Sequence[str]], None]


def request_path(models_dir: Path, key: str, revision: str) -> Path:
    """Where a job's request lies."""
    incoming = incoming_directory(models_dir, key, revision)
    return incoming.with_name(incoming.name + ".request.json")


def state_path(models_dir: Path, key: str, revision: str) -> Path:
    """Where a job's state lies."""
    incoming = incoming_directory(models_dir, key, revision)
    return incoming.with_name(incoming.name + ".state.json")


def unit_name(key: str, revision: str) -> str:
    """The unit of a job; both names are free of what systemd would have to escape."""
    return f"metalserve-weights@{key}:{revision}.service"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON mapping, empty when there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: Mapping[str, Any], mode: int = 0o644) -> None:
    """Write by rename: a reader sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        json.dump(content, stream)
    os.replace(temporary, path)


def job_digest(request: Mapping[str, Any]) -> str:
    """Equal for two requests that want the same from the same places."""
    wanted = {name: request.get(name) for name in _NOT_THE_SAME_JOB}
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()


def announce(request: Mapping[str, Any]) -> None:
    """Say that this revision will be fetched here, so that other hosts wait for it instead of asking the origin."""
    models_dir, key, revision = Path(request["models_dir"]), request["key"], request["revision"]
    if not unit_active(unit_name(key, revision)):
        write_json(state_path(models_dir, key, revision), {"state": "queued", "updated_at": time.time()})


def start_job(
    request: Mapping[str, Any],
    worker: Optional[bytes],
    *,
    worker_path: Path = WORKER_PATH,
    active: Optional[Callable[[str], bool]] = None,
    launch: Optional[Launch] = None,
    stop: Optional[Callable[[str], None]] = None,
) -> str:
    """Start the job, or join the one that runs; returns `started`, `joined` or `replaced`.

    A running job is replaced when other files or other sources are wanted: whoever changed a source wants it used.

    Args:
        request: what `weights_worker.run` reads.
        worker: the program, put in place when another one lies there; None leaves what is there.
        worker_path: where the program lies.
        active, launch, stop: systemd's part.

    Raises:
        OSError, CalledProcessError: the files cannot be written or the unit cannot be started.
    """
    active, launch, stop = active or unit_active, launch or launch_unit, stop or stop_unit
    models_dir, key, revision = Path(request["models_dir"]), request["key"], request["revision"]
    unit, where = unit_name(key, revision), request_path(models_dir, key, revision)
    word = "started"
    if active(unit):
        if job_digest(read_json(where)) == job_digest(request):
            return "joined"
        stop(unit)
        word = "replaced"
    install_worker(worker, worker_path)
    write_json(where, request)
    write_json(state_path(models_dir, key, revision), {"state": "starting", "updated_at": time.time()})
    launch(unit, _PROPERTIES, ["/usr/bin/python3", str(worker_path), "fetch", str(where)])
    return word


def install_worker(worker: Optional[bytes], path: Path) -> bool:
    """Put the worker's program in place; returns whether another one, or none, lay there."""
    if worker is None or (path.exists() and path.read_bytes() == worker):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(worker)
    temporary.chmod(0o755)
    os.replace(temporary, path)
    return True


def job_state(
    models_dir: Path, key: str, revision: str, active: Optional[Callable[[str], bool]] = None
) -> dict[str, Any]:
    """What the job says of itself; `died` when it says that it runs and no unit does."""
    state = read_json(state_path(models_dir, key, revision)) or {"state": "absent"}
    if state["state"] in ("starting", "running"):
        alive = (active or unit_active)(unit_name(key, revision))
        # Read again: it may have ended between the two looks.
        state = read_json(state_path(models_dir, key, revision)) or state
        if not alive and state["state"] in ("starting", "running"):
            return {**state, "state": "died"}
    return state


def unit_active(unit: str) -> bool:
    """Whether systemd runs the unit or will start it again by itself."""
    answer = subprocess.run(["systemctl", "is-active", unit], capture_output=True, text=True, check=False)
    return answer.stdout.strip() in ("active", "activating", "reloading", "deactivating")


def launch_unit(unit: str, properties: Sequence[str], argv: Sequence[str]) -> None:
    """Start a transient unit of the system's own manager.

    Raises:
        CalledProcessError: systemd refuses it.
    """
    options = [f"--property={text}" for text in properties]
    subprocess.run(
        ["systemd-run", f"--unit={unit}", "--collect", "--no-ask-password", *options, "--", *argv],
        capture_output=True,
        text=True,
        check=True,
    )


def stop_unit(unit: str) -> None:
    """Stop a unit and wait until it is gone."""
    subprocess.run(["systemctl", "stop", unit], capture_output=True, text=True, check=False)


def last_words(unit: str, lines: int = 20) -> str:
    """The end of a unit's journal."""
    argv = ["journalctl", f"--unit={unit}", f"--lines={lines}", "--no-pager", "--output=cat"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
