"""One archive with what somebody needs who is to help with a host, redacted and bounded. Changes nothing else."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Union

from .files import read_json_object, read_text
from .host_probe import ProbeError, Run, run_command
from .redact import redact
from .releases import active_release, deployment_names, refusal_of, release_directory, release_ids

CONTENTS = "CONTENTS.txt"
_COMMAND_SECONDS = 60.0
_RELEASE_FILES = (
    "release.json",
    "engine.yaml",
    "release.env",
    "endpoint.json",
    "gate.json",
    "capacity.json",
    "refused.json",
)
# Files by their path, or by a pattern below the root. Key files, certificates and the gateway's look-up files, which
# hold hashes of keys, are on no list.
_FILES = (
    "etc/systemd/system/vllm@.service",
    "etc/systemd/system/sglang@.service",
    "etc/systemd/system/metalserve-*.service",
    "etc/systemd/system/docker.service.d/*.conf",
    "etc/systemd/system/haproxy.service.d/*.conf",
    "etc/docker/daemon.json",
    "etc/metalserve/driver.json",
    "etc/metalserve/firewall.nft",
    "etc/haproxy/haproxy.cfg",
    "etc/os-release",
    "proc/driver/nvidia/version",
    "var/run/cdi/nvidia.yaml",
    "var/lib/metalserve/rollout/drained.json",
)
_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "nvidia-smi.txt": ("nvidia-smi", "-q"),
    "nvidia-smi-topology.txt": ("nvidia-smi", "topo", "-m"),
    "xid.txt": ("journalctl", "-k", "-b", "--no-pager", "-q", "-o", "short-iso", "--grep", "Xid|NVRM|SXid"),
    "docker-info.txt": ("docker", "info"),
    "docker-version.txt": ("docker", "version"),
    "docker-containers.txt": ("docker", "ps", "--all", "--no-trunc"),
    "docker-images.txt": ("docker", "image", "ls", "--digests"),
    "container-toolkit.txt": ("nvidia-ctk", "--version"),
    "packages.txt": ("dpkg-query", "--show", "*nvidia*", "docker*", "containerd*", "haproxy", "linux-image-*"),
    "units.txt": ("systemctl", "list-units", "--all", "--no-pager", "vllm@*", "sglang@*", "metalserve-*", "haproxy*"),
    "kernel.txt": ("uname", "-a"),
    "memory.txt": ("free", "-m"),
    "disks.txt": ("df", "-h"),
}
_OTHER_UNITS = ("metalserve-watchdog.service", "docker.service", "haproxy.service")


@dataclass(frozen=True)
class Limits:
    """How much is taken.

    Args:
        journal_lines: of each unit, the last ones.
        journal_hours: none older than that.
        item_bytes: of each item; of a journal the end is kept, of everything else the beginning.
        total_bytes: of all items together, before they are compressed.
    """

    journal_lines: int = 2000
    journal_hours: int = 48
    item_bytes: int = 2_000_000
    total_bytes: int = 30_000_000


def make_bundle(
    target: Path,
    documents: Mapping[str, Any],
    limits: Limits,
    *,
    root: Path = Path("/"),
    run: Run = run_command,
) -> list[str]:
    """Write the archive, mode 0600; returns the lines of its list of contents.

    Args:
        target: the archive.
        documents: what the controller adds, by file name; they are redacted as everything else.
        limits: how much is taken.
        root: where the host's file system begins.
        run: how commands are run.

    Raises:
        OSError: the archive cannot be written.
    """
    secrets = known_secrets(root)
    left, lines = limits.total_bytes, []
    target.touch(mode=0o600)
    with tarfile.open(target, "w:gz") as archive:
        for name, read in _items(root, documents, limits, run):
            answer = read()
            if isinstance(answer, Missing):
                lines.append(f"{name}: not taken: {answer.why}")
                continue
            text, redacted = redact(answer, secrets)
            content = text.encode("utf-8", "replace")
            size = len(content)
            content = content[-limits.item_bytes :] if name.startswith("journal/") else content[: limits.item_bytes]
            if len(content) > left:
                lines.append(f"{name}: not taken: the archive would be larger than {limits.total_bytes} bytes")
                continue
            left -= len(content)
            _add(archive, name, content)
            notes = [f"{len(content)} bytes"]
            notes += [f"cut from {size}"] if len(content) < size else []
            notes += [f"{redacted} places redacted"] if redacted else []
            lines.append(f"{name}: {', '.join(notes)}")
        _add(archive, CONTENTS, "".join(f"{line}\n" for line in lines).encode())
    return lines


@dataclass(frozen=True)
class Missing:
    """Why an item is not there."""

    why: str


Reader = Callable[[], Union[str, Missing]]


def _items(root: Path, documents: Mapping[str, Any], limits: Limits, run: Run) -> Iterator[tuple[str, Reader]]:
    """The items by name, what helps most first: when the archive is full, the rest is left out."""
    for name, document in documents.items():
        yield name, _document(document)
    releases = root / "etc/metalserve"
    for deployment in deployment_names(releases):
        current = active_release(releases, deployment)
        chosen = [each for each in release_ids(releases, deployment) if refusal_of(releases, deployment, each)]
        for release_id in dict.fromkeys([*([current] if current else []), *chosen]):
            for file in _RELEASE_FILES:
                path = release_directory(releases, deployment, release_id) / file
                if path.is_file():
                    yield f"releases/{deployment}/{release_id}/{file}", _file(path)
    for name, argv in _COMMANDS.items():
        yield f"commands/{name}", _command(argv, run)
    for pattern in _FILES:
        for path in sorted(root.glob(pattern)):
            yield f"files/{path.relative_to(root)}", _file(path)
    bounds = (f"--lines={limits.journal_lines}", f"--since=-{limits.journal_hours}h")
    journal = ("journalctl", "--no-pager", "-q", "-o", "short-iso", *bounds)
    units = [f"{engine}@{name}.service" for name in deployment_names(releases) for engine in ("vllm", "sglang")]
    for unit in (*units, *_OTHER_UNITS):
        yield f"journal/{unit}.txt", _command((*journal, f"--unit={unit}"), run)


def _document(document: Any) -> Reader:
    return lambda: json.dumps(document, indent=1, sort_keys=True) + "\n"


def _file(path: Path) -> Reader:
    def read() -> Union[str, Missing]:
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return Missing(error.strerror or str(error))

    return read


def _command(argv: tuple[str, ...], run: Run) -> Reader:
    def read() -> Union[str, Missing]:
        try:
            answer = run(argv, _COMMAND_SECONDS)
        except ProbeError as error:
            return Missing(str(error))
        text = answer.stdout + answer.stderr
        return text if text.strip() else Missing("it says nothing")

    return read


def known_secrets(root: Path) -> Collection[str]:
    """The values of the key files that the deployments and the gateway of this host name."""
    releases, found = root / "etc/metalserve", set()
    for deployment in deployment_names(releases):
        for release_id in release_ids(releases, deployment):
            path = read_json_object(release_directory(releases, deployment, release_id) / "endpoint.json").get(
                "api_key_file"
            )
            if path:
                found.add((read_text(root / str(path).lstrip("/")) or "").strip())
    # A line `engine KEY`.
    found.add((read_text(root / "etc/haproxy/metalserve/engine_key.map") or "").partition(" ")[2].strip())
    return found - {""}


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o600
    archive.addfile(entry, io.BytesIO(content))
