"""The CUDA probe inside a container that got its GPUs as an engine gets them, before and after a daemon-reload."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from . import cuda_probe

NAME = "metalserve-gpu-probe"
# Longer than any probe, short enough to end by itself when the program that started it was killed.
LIFE_SECONDS = 900

# (argv, standard input) -> (status, output, error output)
Run = Callable[[Sequence[str], Optional[str]], "tuple[int, str, str]"]


@dataclass(frozen=True)
class Step:
    """One run of the probe.

    Attributes:
        when: `start`, or `daemon_reload` for the one in a container that was running before it.
        answer: what cuda_probe.run_probe returned, None where it did not run.
        error: why it did not run.
    """

    when: str
    answer: dict[str, Any] | None
    error: str | None

    def as_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {"when": self.when, "answer": self.answer, "error": self.error}


def probe_source() -> str:
    """The text of the program that runs in the container; read through its loader, it may lie in a zip file."""
    loader = cuda_probe.__loader__
    source: str | None = loader.get_source(cuda_probe.__name__)  # type: ignore[union-attr]
    if source is None:
        raise RuntimeError("the source of cuda_probe is not there")
    return source


def probe_container(image: str, devices: Sequence[str], run: Run) -> list[Step]:
    """Start a container of the image with CDI devices, probe, reload systemd, probe again, remove it.

    The devices are given as the engines' units give them. A container that got them behind the runtime's back (the
    legacy hook) loses them when systemd applies its device rules again: then the second probe fails.

    Args:
        image: a reference by digest; it is not pulled.
        devices: CDI names, such as nvidia.com/gpu=all.
        run: runs a command.

    Returns:
        The steps that were made; a failed one is the last.

    """
    run(["docker", "rm", "--force", NAME], None)
    try:
        status, output, complaint = run(
            [
                "docker", "run", "--detach", "--rm", "--init", f"--name={NAME}", "--pull=never", "--runtime=runc",
                "--network=none", *(f"--device={device}" for device in devices), "--entrypoint=python3", image,
                "-c", f"import time; time.sleep({LIFE_SECONDS})",
            ],
            None,
        )  # fmt: skip
        if status:
            return [Step("start", None, _cause(complaint or output))]
        first = _probe("start", run)
        if first.error or not (first.answer or {}).get("ok"):
            return [first]
        status, output, complaint = run(["systemctl", "daemon-reload"], None)
        if status:
            return [first, Step("daemon_reload", None, f"systemctl daemon-reload: {_cause(complaint or output)}")]
        return [first, _probe("daemon_reload", run)]
    finally:
        run(["docker", "rm", "--force", NAME], None)


def _probe(when: str, run: Run) -> Step:
    status, output, complaint = run(["docker", "exec", "--interactive", NAME, "python3", "-"], probe_source())
    try:
        answer = json.loads(output.strip().splitlines()[-1])
        return Step(when, {**answer}, None)
    except (ValueError, IndexError, TypeError):
        text = _cause(complaint) or _cause(output)
        return Step(when, None, f"the probe ended with status {status}: {text or 'no answer'}")


def _cause(text: str) -> str:
    """The line that says what went wrong: Docker writes a hint on its help after it."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return next((line for line in lines if "rror" in line), lines[-1] if lines else "")


def proof_key(image: str, devices: Sequence[str], specs: Sequence[str], root: str = "/") -> str:
    """What a passed probe stands for: the same boot, driver, CDI specification, image and devices.

    Args:
        image: the image that was probed.
        devices: CDI names.
        specs: paths of the CDI specifications.
        root: where /proc and /sys begin.

    """
    parts = [image, *devices]
    for path in ("/proc/sys/kernel/random/boot_id", "/sys/module/nvidia/version", *specs):
        try:
            parts.append(Path(root.rstrip("/") + path).read_text(encoding="utf-8", errors="replace"))
        except OSError:
            parts.append("")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read_proofs(path: str) -> dict[str, str]:
    """The keys of the probes that have passed, by image; nothing where the file is not there or not readable."""
    try:
        kept = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(image): str(key) for image, key in kept.items()} if isinstance(kept, dict) else {}


def write_proofs(path: str, proofs: dict[str, str]) -> None:
    """Keep them; a killed writer leaves the old file."""
    place = Path(path)
    place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    new = place.with_suffix(".new")
    new.write_text(json.dumps(proofs, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    new.replace(place)


def has_passed(steps: Sequence[Step], uuids: Sequence[str]) -> bool:
    """Both steps ran, CUDA and memory worked in both, and the GPUs were those of the host (where they are known)."""
    return [step.when for step in steps] == ["start", "daemon_reload"] and all(
        step.answer is not None
        and step.answer["ok"]
        and all(one["memory_works"] for one in step.answer["devices"])
        and (not uuids or sorted(one["uuid"] for one in step.answer["devices"]) == sorted(uuids))
        for step in steps
    )
