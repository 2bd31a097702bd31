"""The CUDA probe inside a container that got its GPUs as an engine gets them, before and after a daemon-reload."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
