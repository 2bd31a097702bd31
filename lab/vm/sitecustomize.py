# ruff: noqa: PTH118, PTH123, PTH105 - pathlib alone takes an emulated processor a tenth of a second at each start
"""Keep the byte code of modules that come in archives, as Ansible's do: compiling them takes seconds here."""

from __future__ import annotations

import _imp
import marshal
import os
import zipimport
from types import CodeType

CACHE = "/var/cache/lab-python"
compile_source = zipimport._compile_source  # type: ignore[attr-defined]


def cached(path: str, source: bytes) -> CodeType:
    """The code of a source, compiled once."""
    place = os.path.join(CACHE, f"{_imp.source_hash(0, source).hex()}-{len(source)}")
    try:
        with open(place, "rb") as file:
            kept: CodeType = marshal.load(file)
            return kept
    except (OSError, EOFError, ValueError, TypeError):
        pass
    code: CodeType = compile_source(path, source)
    try:
        with open(f"{place}.{os.getpid()}", "xb") as file:
            marshal.dump(code, file)
        os.replace(f"{place}.{os.getpid()}", place)
    except OSError:  # not root: it compiles each time
        pass
    return code


zipimport._compile_source = cached  # type: ignore[attr-defined]
