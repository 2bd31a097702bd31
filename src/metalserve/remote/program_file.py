"""A program for a host in one file that its Python runs: made of the code that a module of this project carries."""

from __future__ import annotations

import hashlib
import io
import pkgutil
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

from .files import write_bytes

_FIRST_LINE = b"#!/usr/bin/env python3\n"
_MODE = 0o755
# One date for all members: the same code gives the same bytes.
_WHEN = (2020, 1, 1, 0, 0, 0)


def packed_program(package: ModuleType, entry: str) -> bytes:
    """The code of a package as a zipped program whose first line names Python.

    Args:
        package: the package as Ansible carries it, with what the module imports and nothing else.
        entry: the module whose `main()` is run; what it returns is the exit status.

    """
    sources = {
        "__main__.py": f"import sys\n\nfrom metalserve_remote.{entry} import main\n\nsys.exit(main())\n",
        "metalserve_remote/__init__.py": "",
    }
    for found in pkgutil.iter_modules(package.__path__):
        spec = found.module_finder.find_spec(found.name, None)
        sources[f"metalserve_remote/{found.name}.py"] = spec.loader.get_source(found.name)  # type: ignore[union-attr]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(sources):
            member = zipfile.ZipInfo(name, _WHEN)
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, sources[name])
    return _FIRST_LINE + packed.getvalue()


def install_program(path: Path, content: bytes, *, check_mode: bool) -> bool:
    """Put a program at `path`, mode 0755; whether it was not there as it should be.

    Raises:
        OSError: the folder is missing, full, or cannot be written.
    """
    try:
        right = path.read_bytes() == content and path.stat().st_mode & 0o777 == _MODE
    except OSError:
        right = False
    if not right and not check_mode:
        write_bytes(path, content, _MODE)
    return not right


def place_program(module: Any, package: ModuleType, entry: str) -> None:
    """End a module of Ansible whose parameter `path` says where the program goes; see `packed_program`."""
    path = Path(module.params["path"])
    content = packed_program(package, entry)
    try:
        changed = install_program(path, content, check_mode=module.check_mode)
    except OSError as error:
        module.fail_json(msg=f"{path} cannot be written: {error.strerror}. Needed: its folder, writable.")
    module.exit_json(changed=changed, sha256=hashlib.sha256(content).hexdigest())
