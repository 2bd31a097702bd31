"""A bundle: one directory with everything that hosts without a network need, and the proof that it is what was signed.

manifest.json        what is in it, with size and SHA-256 of every file
manifest.json.sig    its signature, by ssh-keygen -Y sign
images/              one OCI image layout with all engine images
weights/             <model>/<revision>/...
packages/            <system>/: a signed repository of apt
wheels/              Python packages of the controller, and those of derived images
collections/         Ansible collections, as ansible-galaxy installs them

ssh-keygen signs because every controller has it, and because its keys are what operators have already, in agents and on
hardware. The signature covers the manifest, the manifest every byte of the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from metalserve.errors import Refusal
from metalserve.remote.files import read_json_object, write_text
from metalserve.remote.weights_hash import hash_files
from metalserve.remote.weights_manifest import FileEntry, WeightsError, manifest_sha256, parse_manifest

MANIFEST = "manifest.json"
SIGNATURE = "manifest.json.sig"
NAMESPACE = "metalserve-bundle"
SCHEMA = 1
_SHOWN = 10


def write_manifest(directory: Path, content: Mapping[str, Any], signing_key: Path | None) -> dict[str, Any]:
    """Hash every file of a bundle, write its manifest, and sign it.

    Args:
        directory: the bundle.
        content: {images: {reference: digest}, models: {key: {revision, manifest_sha256}}, systems: [name]}.
        signing_key: for `ssh-keygen -Y sign`: a private key, or a public one whose private part an agent has. None
            leaves the manifest unsigned.

    Returns:
        The manifest.

    Raises:
        Refusal: the key does not sign, or a link lies in the bundle.
    """
    found = _files(directory)
    hashes = hash_files(directory / path for path in found)
    files = [
        {"path": path, "size_bytes": (directory / path).stat().st_size, "sha256": hashes[directory / path]}
        for path in found
    ]
    manifest = {"schema": SCHEMA, **content, "files": files}
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    target = directory / MANIFEST
    if not (target.exists() and target.read_text(encoding="utf-8") == text and (directory / SIGNATURE).exists()):
        (directory / SIGNATURE).unlink(missing_ok=True)
        write_text(target, text)
    if signing_key is not None and not (directory / SIGNATURE).exists():
        command = ["ssh-keygen", "-Y", "sign", "-f", str(signing_key), "-n", NAMESPACE, str(target)]
        signed = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if signed.returncode:
            raise Refusal(
                found=f"ssh-keygen does not sign with {signing_key} ({' '.join(signed.stderr.split())})",
                needed="a private key that can be read, without a passphrase or held by an ssh agent",
                change="bundle_signing_key",
            )
    return manifest


def check_bundle(
    directory: Path, signers: Sequence[str], *, unsigned_allowed: bool = False, known: Path | None = None
) -> dict[str, Any]:
    """Prove that a bundle is what was signed: every file, none too many, none missing.

    Args:
        directory: the bundle.
        signers: public keys, each in one line as in a file *.pub; one of them must have signed.
        unsigned_allowed: with no signers, take an unsigned bundle.
        known: a file that remembers size and times of what was hashed; None hashes everything.

    Returns:
        The manifest.

    Raises:
        Refusal: naming the files that are not right, or what is wrong with the signature.
    """
    try:
        data = (directory / MANIFEST).read_bytes()
        manifest = json.loads(data)
        entries = parse_manifest(manifest["files"])
        if manifest["schema"] != SCHEMA:
            raise ValueError(f"schema {manifest['schema']}")
    except (OSError, ValueError, KeyError, TypeError, WeightsError) as error:
        raise Refusal(
            found=f"no bundle in {directory} ({error})",
            needed=f"a directory that playbooks/ops/bundle.yml of this version has written, with its {MANIFEST}",
            change="serving_bundle, or mount what it is on",
        ) from error
    if signers or not unsigned_allowed:
        _check_signature(directory, data, signers)
    _check_files(directory, entries, known, hashlib.sha256(data).hexdigest())
    return dict(manifest)


def require(
    manifest: Mapping[str, Any], images: Iterable[str], models: Iterable[str], lock: Mapping[str, Any], directory: Path
) -> None:
    """Refuse a bundle that lacks what an inventory's lock names; what the lock does not name is preflight's matter.

    Args:
        manifest: of the bundle.
        images: references that deployments need.
        models: keys of models that they need.
        lock: `serving_lock` of the inventory.
        directory: the bundle, for the refusal.

    Raises:
        Refusal: with each image and model that is not there, or is there at another revision.
    """
    lacking = []
    for reference in images:
        digest = ((lock.get("images") or {}).get(reference) or {}).get("digest")
        if digest and digest not in manifest["images"].values():
            lacking.append(f"{reference} at {digest}")
    for key in models:
        locked = (lock.get("models") or {}).get(key)
        there = manifest["models"].get(key) or {}
        if locked and there != bundled_model(locked):
            lacking.append(f"{key} at revision {locked.get('revision')}")
    if lacking:
        raise Refusal(
            found=f"the bundle {directory} without {', '.join(lacking)}",
            needed="exactly what the lock of the inventory names",
            change="make the bundle anew with this inventory (playbooks/ops/bundle.yml), or use the inventory and "
            "lock.yml that it was made with",
        )


def bundled_model(locked: Mapping[str, Any]) -> dict[str, str]:
    """How a manifest names a model of the lock."""
    return {"revision": str(locked["revision"]), "manifest_sha256": manifest_sha256(locked["files"])}


def _files(directory: Path) -> list[str]:
    """Every file of a bundle but manifest and signature, sorted.

    Raises:
        Refusal: a link, whose target a manifest cannot vouch for.
    """
    found = []
    for folder, folders, names in os.walk(directory):
        for name in [*folders, *names]:
            path = Path(folder, name)
            relative = path.relative_to(directory).as_posix()
            if path.is_symlink():
                raise Refusal(
                    found=f"the link {relative} in the bundle {directory}",
                    needed="files only: the manifest cannot vouch for what a link names",
                    change="remove it, or copy the bundle with the files themselves (cp -L)",
                )
            if path.is_file() and relative not in (MANIFEST, SIGNATURE):
                found.append(relative)
    return sorted(found)


def _check_signature(directory: Path, data: bytes, signers: Sequence[str]) -> None:
    reason = "no signer is named" if not signers else "" if (directory / SIGNATURE).exists() else "it is not signed"
    if not reason:
        with tempfile.TemporaryDirectory(prefix="metalserve-signers-") as folder:
            allowed = Path(folder, "signers")
            lines = "".join(f'{NAMESPACE} namespaces="{NAMESPACE}" {signer.strip()}\n' for signer in signers)
            allowed.write_text(lines, encoding="utf-8")
            command = ["ssh-keygen", "-Y", "verify", "-f", str(allowed), "-I", NAMESPACE, "-n", NAMESPACE]
            verified = subprocess.run(
                [*command, "-s", str(directory / SIGNATURE)], input=data, capture_output=True, check=False
            )
        if verified.returncode == 0:
            return
        reason = " ".join((verified.stderr + verified.stdout).decode(errors="replace").split())
    raise Refusal(
        found=f"the bundle {directory} with a {MANIFEST} that nobody vouches for ({reason})",
        needed="a signature by one of serving_bundle_signers",
        change="serving_bundle_signers (the public key of bundle_signing_key, one line as in its file *.pub), or make "
        "and sign the bundle anew; serving_bundle_unsigned_allowed takes one without",
    )


def _check_files(directory: Path, entries: Sequence[FileEntry], known: Path | None, manifest_digest: str) -> None:
    wanted = {entry.path: entry for entry in entries}
    found = _files(directory)
    problems = {"missing": sorted(set(wanted) - set(found)), "not in the manifest": sorted(set(found) - set(wanted))}
    remembered = read_json_object(known) if known else {}
    believed = remembered.get("files") or {} if remembered.get("manifest") == manifest_digest else {}
    marks = {path: _mark(directory / path) for path in found if path in wanted}
    sized = [path for path, mark in marks.items() if mark[0] == wanted[path].size_bytes]
    doubtful = [path for path in sized if believed.get(path) != marks[path]]
    hashes = hash_files(directory / path for path in doubtful)
    wrong = {path for path in doubtful if hashes[directory / path] != wanted[path].sha256} | set(marks) - set(sized)
    problems = {"changed": sorted(wrong), **problems}
    if known:
        known.parent.mkdir(parents=True, exist_ok=True)
        right = {path: mark for path, mark in marks.items() if path not in wrong}
        write_text(known, json.dumps({"manifest": manifest_digest, "files": right}))
    told = [f"{word}: {_names(paths)}" for word, paths in problems.items() if paths]
    if told:
        raise Refusal(
            found=f"the bundle {directory} is not what was signed: {'; '.join(told)}",
            needed="every file as its manifest says, and no other",
            change="copy it anew from where it was made, remove what does not belong to it, and look at the medium; "
            "nothing was changed on a host",
        )


def _mark(path: Path) -> list[int]:
    """What changes with the content of a file: size, both times, inode. Nobody sets the time of a change (ctime)."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _names(paths: Sequence[str]) -> str:
    more = len(paths) - _SHOWN
    return ", ".join(paths[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
