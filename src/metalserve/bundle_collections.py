"""Ansible collections that are installed here, as the archives that `ansible-galaxy collection install` takes.

No Galaxy is asked: the collections come with the pinned `ansible` package, which leaves out their tests. So the list of
files inside each archive is written anew, of those that are there.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metalserve.errors import Refusal


def pack_collections(directory: Path, names: Sequence[str]) -> None:
    """Have exactly these collections in a directory, as NAMESPACE-NAME-VERSION.tar.gz; the same bytes every time.

    Raises:
        Refusal: one is not installed here.
    """
    directory.mkdir(parents=True, exist_ok=True)
    packed = {file.name: data for file, data in (_pack(name) for name in names)}
    for path in directory.iterdir():
        if path.name not in packed:
            path.unlink()
    for name, data in packed.items():
        if not (directory / name).exists() or (directory / name).read_bytes() != data:
            (directory / name).write_bytes(data)


def _pack(name: str) -> tuple[Path, bytes]:
    try:
        found = importlib.util.find_spec(f"ansible_collections.{name}")
    except ModuleNotFoundError:
        found = None
    places = list(found.submodule_search_locations or []) if found else []
    if not places or not Path(places[0], "MANIFEST.json").exists():
        raise Refusal(
            found=f"no collection {name} beside this Ansible",
            needed="the collections of collections/requirements.yml",
            change="pip install -r requirements/runtime.txt (make venv)",
        )
    root = Path(places[0])
    manifest: dict[str, Any] = json.loads((root / "MANIFEST.json").read_text(encoding="utf-8"))
    contents = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if _belongs(path, root)}
    rows: list[dict[str, Any]] = [_row(".", None)]
    rows += [_row(name, path.read_bytes() if path.is_file() else None) for name, path in contents.items()]
    files = json.dumps({"files": rows, "format": 1}, indent=1).encode()
    manifest["file_manifest_file"] |= {"chksum_sha256": hashlib.sha256(files).hexdigest(), "chksum_type": "sha256"}
    info = manifest["collection_info"]
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        _add(archive, "MANIFEST.json", json.dumps(manifest, indent=1).encode())
        _add(archive, "FILES.json", files)
        for name, path in contents.items():
            _add(archive, name, path.read_bytes() if path.is_file() else None)
    file = Path(f"{info['namespace']}-{info['name']}-{info['version']}.tar.gz")
    return file, gzip.compress(data.getvalue(), 6, mtime=0)


def _belongs(path: Path, root: Path) -> bool:
    own = path.parent == root and path.name in ("MANIFEST.json", "FILES.json")
    return not own and "__pycache__" not in path.parts and (path.is_file() or path.is_dir()) and not path.is_symlink()


def _row(name: str, data: bytes | None) -> dict[str, Any]:
    digest = None if data is None else hashlib.sha256(data).hexdigest()
    return {
        "name": name,
        "ftype": "dir" if data is None else "file",
        "chksum_type": None if data is None else "sha256",
        "chksum_sha256": digest,
        "format": 1,
    }


def _add(archive: tarfile.TarFile, name: str, data: bytes | None) -> None:
    member = tarfile.TarInfo(name)
    member.mode = 0o755 if data is None else 0o644
    if data is None:
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
    else:
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
