"""Look at a host without ever waiting on it: files under a root, commands and probes with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# Beyond its limit a probe gets this long to say which of its commands was slow, before it is killed.
_GRACE_SECONDS = 1.5
_MAX_LINKS_FOLLOWED = 40
# sbin for a user who is not root; the last one is where driver containers and some images put the tools.
_EXTRA_PATH = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/local/nvidia/bin")
_TREE_PATH = (*_EXTRA_PATH, "/usr/local/bin", "/usr/bin", "/bin")


class ProbeError(Exception):
    """Something that could not be read; the text is meant for a person."""


class CommandMissingError(ProbeError):
    """The command is not installed on this host."""


@dataclass(frozen=True)
class Output:
    """What a finished command left behind."""

    code: int
    stdout: str
    stderr: str


Run = Callable[[Sequence[str], float], Output]


def run_command(argv: Sequence[str], limit_seconds: float) -> Output:
    """Run a command with the C locale and no input; its process is left behind if it cannot be killed.

    Raises:
        CommandMissingError: there is no such command.
        ProbeError: it could not be started, or did not finish within the limit.

    """
    environment = dict(os.environ, LC_ALL="C", LANGUAGE="C")
    environment["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *_EXTRA_PATH])
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError:
        raise CommandMissingError(f"{argv[0]}: not installed") from None
    except OSError as error:
        raise ProbeError(f"{argv[0]}: {error.strerror}") from None
    try:
        stdout, stderr = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        # A process that waits inside a hung driver does not die of a kill: never wait for it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=0.2)
        raise ProbeError(f"{' '.join(argv)}: no answer in {limit_seconds:.3g} s") from None
    return Output(process.returncode, stdout, stderr)


def run_in_tree(root: str, argv: Sequence[str], limit_seconds: float) -> Output:
    """Run a command that lies in a tree of files, as `run_command` does.

    Nothing of this machine answers for a host that is only a tree: a command that the tree lacks is not installed.

    Raises:
        CommandMissingError: there is no such command in the tree.
        ProbeError: it could not be started, or did not finish within the limit.

    """
    below = root.rstrip("/")
    if argv[0].startswith("/"):
        command: str | None = below + argv[0]
    else:
        command = shutil.which(argv[0], path=os.pathsep.join(below + place for place in _TREE_PATH))
    if command is None or not os.access(command, os.X_OK):
        raise CommandMissingError(f"{argv[0]}: not installed")
    return run_command([command, *argv[1:]], limit_seconds)


@dataclass(frozen=True)
class Tree:
    """The files of a host below a root. What is missing or unreadable is None, never an exception."""

    root: str = "/"

    def path(self, path: str) -> str:
        """The real path of an absolute path of the host."""
        return path if self.root == "/" else self.root.rstrip("/") + path

    def read_bytes(self, path: str) -> bytes | None:
        """The content of a file."""
        try:
            with open(self.path(path), "rb") as file:  # noqa: PTH123 - sysfs and proc by the thousand
                return file.read()
        except OSError:
            return None

    def read(self, path: str) -> str | None:
        """The text of a file, without the blanks around it."""
        content = self.read_bytes(path)
        return None if content is None else content.decode("utf-8", "replace").strip()

    def names(self, path: str) -> list[str]:
        """The sorted names in a directory; none if it is not there."""
        try:
            return sorted(os.listdir(self.path(path)))  # noqa: PTH208 - names are all that is needed
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """Whether the path is there (a link that leads nowhere is not)."""
        return os.path.exists(self.path(self.resolve(path)))  # noqa: PTH110

    def link(self, path: str) -> str | None:
        """Where a symbolic link points, as it is written in the link."""
        try:
            return os.readlink(self.path(path))  # noqa: PTH115
        except OSError:
            return None

    def resolve(self, path: str) -> str:
        """The path behind all symbolic links, where an absolute link stays inside the root."""
        resolved = "/"
        parts = [part for part in path.split("/") if part]
        followed = 0
        while parts:
            part = parts.pop(0)
            if part == "..":
                resolved = os.path.dirname(resolved)  # noqa: PTH120
                continue
            candidate = os.path.join(resolved, part)  # noqa: PTH118
            target = self.link(candidate)
            followed += target is not None
            if target is None or followed > _MAX_LINKS_FOLLOWED:
                resolved = candidate
                continue
            if target.startswith("/"):
                resolved = "/"
            parts = [step for step in target.split("/") if step not in ("", ".")] + parts
        return resolved


@dataclass(frozen=True)
class Host:
    """A host to be looked at.

    Attributes:
        files: the file system.
        devices: where sysfs PCI, the loaded modules and /proc/driver are read; differs from `files`
            only where GPUs are simulated.
        run: how commands are run.
        limit_seconds: how long the commands of one probe may take together.
        started: the clock (time.monotonic) against which the limit counts.

    """

    files: Tree
    devices: Tree
    run: Run
    limit_seconds: float
    started: float = field(default_factory=time.monotonic)

    def command(self, *argv: str) -> Output:
        """Run a command in what is left of the limit.

        Raises:
            ProbeError: it is missing, cannot be started or gave no answer in time.

        """
        left = self.started + self.limit_seconds - time.monotonic()
        if left <= 0:
            raise ProbeError(f"{' '.join(argv)}: not run, the limit of {self.limit_seconds:.0f} s had passed")
        return self.run(argv, left)


@dataclass(frozen=True)
class Reading:
    """What a probe found, and what it could not find although the rest of it worked."""

    value: Any
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Probe:
    """One question to the host. The answer must be plain JSON data, alone or in a Reading."""

    name: str
    ask: Callable[[], Any]
    limit_seconds: float


def _answer(probe: Probe) -> dict[str, Any]:
    try:
        answer = probe.ask()
    except ProbeError as error:
        return {"value": None, "errors": [str(error)]}
    except Exception as error:  # one broken probe must not cost the other facts
        return {"value": None, "errors": [f"{type(error).__name__}: {error}"]}
    if isinstance(answer, Reading):
        return {"value": answer.value, "errors": list(answer.errors)}
    return {"value": answer, "errors": []}


def _start(probe: Probe) -> tuple[int, int]:
    """Fork a child that answers into a pipe; returns its pid and the pipe's end to read."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        os.setsid()
        # A child stuck in the driver outlives this program. Were it to keep the standard streams, the ssh
        # connection that started the program would stay open for as long as it is stuck.
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            if int(name) > 2 and int(name) != writer:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        payload = json.dumps(_answer(probe)).encode()
        while payload:
            payload = payload[os.write(writer, payload) :]
    finally:
        os._exit(0)


def _end(pid: int) -> int:
    """Kill what is left of a child and its commands; returns the signal it died of, or 0."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    # It may never die when it waits inside the driver, so it is looked at for a moment, not waited for.
    for attempt in range(10):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        time.sleep(0.0002 * 2**attempt)
    return 0


def run_probes(probes: Sequence[Probe]) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Ask all probes at the same time, each in a process of its own.

    A probe that hangs, raises or crashes (a broken NVML library takes its process with it) costs only its
    own answer.

    Returns:
        The answers by probe name (None where there is none), and a list of {probe, error}.

    """
    started = time.monotonic()
    waiting: dict[int, tuple[Probe, int]] = {}
    received: dict[str, bytes] = {probe.name: b"" for probe in probes}
    finished: set[str] = set()
    died: dict[str, int] = {}
    with selectors.DefaultSelector() as selector:
        for probe in probes:
            pid, reader = _start(probe)
            waiting[reader] = (probe, pid)
            selector.register(reader, selectors.EVENT_READ)
        while waiting:
            ends = {reader: started + probe.limit_seconds + _GRACE_SECONDS for reader, (probe, _pid) in waiting.items()}
            for key, _events in selector.select(max(0.0, min(ends.values()) - time.monotonic())):
                chunk = os.read(key.fd, 1 << 16)
                received[waiting[key.fd][0].name] += chunk
                if not chunk:
                    finished.add(waiting[key.fd][0].name)
            for reader, (probe, pid) in list(waiting.items()):
                if probe.name in finished or time.monotonic() > ends[reader]:
                    selector.unregister(reader)
                    os.close(reader)
                    del waiting[reader]
                    died[probe.name] = _end(pid)
    values: dict[str, Any] = {}
    errors: list[dict[str, str]] = []
    for probe in probes:
        values[probe.name] = None
        try:
            answer = json.loads(received[probe.name])
        except ValueError:
            text = f"no answer in {probe.limit_seconds:.3g} s"
            if probe.name in finished:
                text = f"the probe's process ended without an answer (signal {died[probe.name]})"
            errors.append({"probe": probe.name, "error": text})
            continue
        values[probe.name] = answer["value"]
        errors.extend({"probe": probe.name, "error": text} for text in answer["errors"])
    return values, errors
