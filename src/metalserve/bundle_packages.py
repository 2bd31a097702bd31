"""Packages of a Debian or Ubuntu system with all that they need, as a signed repository; nothing is installed here.

apt itself resolves and proves them, in a directory of its own where nothing is installed: so the repository serves the
barest host. The key that signs it is made for it and thrown away; its public part is under the bundle's signature and
reaches hosts over ssh.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any

from metalserve.bundle_gpu import gpu_packages
from metalserve.errors import Refusal
from metalserve.remote.weights_hash import hash_file

KEY = "key.asc"
_NEEDED = ("apt-get", "dpkg-deb", "gpg")


def make_repository(directory: Path, system: Mapping[str, Any], work: Path) -> None:
    """Bring the packages of one system into a repository.

    Args:
        directory: where the repository goes; packages that are there are not fetched again.
        system: {name, sources: [line of sources.list], packages: [name], architecture, nvidia: see `bundle_gpu`}.
        work: a directory for apt's own state, kept between runs.

    Raises:
        Refusal: this machine has no apt or gpg, apt cannot have the packages, or `nvidia` asks for what cannot be.
    """
    missing = [command for command in _NEEDED if not shutil.which(command)]
    if missing:
        raise Refusal(
            found=f"no {', '.join(missing)} on this machine",
            needed="a Debian or Ubuntu machine with apt and gnupg, to resolve packages for one",
            change="install them here, make the bundle on such a machine, or leave bundle_systems empty and give hosts "
            "their packages by another way",
        )
    directory.mkdir(parents=True, exist_ok=True)
    _download(directory, system, work)
    packages = sorted(directory.glob("*.deb"))
    text = "".join(_stanza(package) for package in packages)
    before = directory / "Packages"
    if before.exists() and before.read_text(encoding="utf-8") == text and (directory / "InRelease").exists():
        return
    before.write_text(text, encoding="utf-8")
    (directory / "Packages.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    _sign(directory, str(system["name"]), str(system.get("architecture") or "amd64"))


def _download(directory: Path, system: Mapping[str, Any], work: Path) -> None:
    gpu, preferences = gpu_packages(system)
    system = {**system, "packages": [*map(str, system["packages"]), *gpu]}
    state = work / "packages" / str(system["name"])
    for name in ("lists/partial", "cache/archives/partial", "parts"):
        (state / name).mkdir(parents=True, exist_ok=True)
    # Of file: apt would take the packages where they lie, and none would come into its cache.
    lines = [re.sub(r"(^|\s)file:", r"\1copy:", str(line)) for line in system["sources"]]
    (state / "sources.list").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (state / "status").write_text("", encoding="utf-8")
    (state / "preferences").write_text(preferences, encoding="utf-8")
    archives = state / "cache" / "archives"
    options = {
        "Dir::Etc::SourceList": state / "sources.list",
        "Dir::Etc::SourceParts": state / "parts",
        "Dir::Etc::PreferencesParts": state / "parts",
        "Dir::Etc::Preferences": state / "preferences",
        "Dir::State::Lists": state / "lists",
        "Dir::State::Status": state / "status",
        "Dir::Cache": state / "cache",
        "APT::Architecture": system.get("architecture") or "amd64",
        "APT::Architectures": system.get("architecture") or "amd64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "APT::Update::Error-Mode": "any",
        "Debug::NoLocking": "1",
    }
    given = [f"--option={name}={value}" for name, value in options.items()]
    _run(["apt-get", "--quiet", "--quiet", *given, "update"], system)
    install = ["install", *system["packages"]]
    _run(["apt-get", "--quiet", "--quiet", "--yes", "--download-only", *given, *install], system)
    # The cache also has what earlier runs wanted: of the repository is what apt would install now.
    planned = _run(["apt-get", *given, "--simulate", *install], system).splitlines()
    wanted = {_file_stem(*line.split()[1:3]) for line in planned if line.startswith("Inst ")}
    chosen = {path for path in archives.glob("*.deb") if path.name.rpartition("_")[0] in wanted}
    lost = wanted - {path.name.rpartition("_")[0] for path in chosen}
    if lost:
        raise Refusal(
            found=f"{', '.join(sorted(lost))} for {system['name']} did not come into the cache of apt ({archives})",
            needed="every package that apt would install",
            change=f"`sources` of {system['name']} in bundle_systems, to addresses that apt fetches from",
        )
    for path in chosen:
        target = directory / path.name
        if not target.exists() or target.stat().st_size != path.stat().st_size:
            target.unlink(missing_ok=True)
            link_or_copy(path, target)
    for path in directory.glob("*.deb"):
        if archives / path.name not in chosen:
            path.unlink()


def _file_stem(name: str, version: str) -> str:
    """What apt calls a package's file, without architecture; the version as `Inst` prints it: `(1:2.3-4`."""
    return f"{name}_{version.lstrip('(').replace(':', '%3a')}"


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for a file where the disk is the same, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _stanza(package: Path) -> str:
    fields = subprocess.run(["dpkg-deb", "--field", str(package)], capture_output=True, text=True, check=True).stdout
    size = package.stat().st_size
    return f"{fields.rstrip()}\nFilename: {package.name}\nSize: {size}\nSHA256: {hash_file(package)}\n\n"


def _sign(directory: Path, name: str, architecture: str) -> None:
    lines = ["Origin: metalserve", f"Label: {name}", f"Architectures: {architecture}"]
    lines += [f"Date: {formatdate(usegmt=True)}", "SHA256:"]
    for file in ("Packages", "Packages.gz"):
        data = (directory / file).read_bytes()
        lines.append(f" {hashlib.sha256(data).hexdigest()} {len(data)} {file}")
    with tempfile.TemporaryDirectory(prefix="metalserve-gpg-") as home:
        gpg = ["gpg", "--homedir", home, "--batch", "--quiet", "--yes"]
        try:
            key = ["--passphrase", "", "--quick-generate-key", "metalserve bundle <bundle@metalserve.invalid>"]
            _gpg([*gpg, *key, "rsa3072", "sign", "never"])
            Path(home, "Release").write_text("\n".join(lines) + "\n", encoding="utf-8")
            _gpg([*gpg, "--clear-sign", "--output", str(directory / "InRelease"), str(Path(home, "Release"))])
            _gpg([*gpg, "--armor", "--output", str(directory / KEY), "--export"])
        finally:
            subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], capture_output=True, check=False)


def _gpg(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refusal(
            found=f"gpg makes no key for the repository of packages ({' '.join(done.stderr.split())})",
            needed="gnupg with its agent on this machine",
            change="install gnupg here (gpg-agent is a package of its own on Debian)",
        )


def _run(command: Sequence[str], system: Mapping[str, Any]) -> str:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise Refusal(
            found=f"apt does not have all of {', '.join(system['packages'])} for {system['name']} "
            f"({' '.join((done.stderr or done.stdout).split())[-600:]})",
            needed="package sources that this machine reaches, with keys that it has, and these packages",
            change=f"`sources` or `packages` of {system['name']} in bundle_systems",
        )
    return done.stdout
