# ruff: noqa: PTH118, PTH123, PTH105 - pathlib alone takes an emulated processor a tenth of a second at each start
"""Keep the byte code of large sources that are in no file: compiling them takes an emulated processor seconds.

Ansible's modules come in archives, and the facts module brings the text of nvidia-ml-py.
"""

from __future__ import annotations

import _imp
import builtins
import marshal
import os
import zipimport
from collections.abc import Callable
from types import CodeType
from typing import Any

CACHE = "/var/cache/lab-python"
LARGE_BYTES = 50_000
compile_member = zipimport._compile_source  # type: ignore[attr-defined]
compile_source = builtins.compile


def kept(source: bytes, make: Callable[[], CodeType]) -> CodeType:
    """The code of a source, made once."""
    place = os.path.join(CACHE, f"{_imp.source_hash(0, source).hex()}-{len(source)}")
    try:
        with open(place, "rb") as file:
            found: CodeType = marshal.load(file)
            return found
    except (OSError, EOFError, ValueError, TypeError):
        pass
    code = make()
    try:
        with open(f"{place}.{os.getpid()}", "xb") as file:
            marshal.dump(code, file)
        os.replace(f"{place}.{os.getpid()}", place)
    except OSError:  # not root: it is compiled each time
        pass
    return code


def member(path: str, source: bytes) -> CodeType:
    """A member of an archive."""
    return kept(source, lambda: compile_member(path, source))


def large(source: Any, *arguments: Any, **options: Any) -> Any:
    """As `compile`, which has few large texts to compile."""
    if isinstance(source, bytes) and len(source) > LARGE_BYTES and not options:
        return kept(source, lambda: compile_source(source, *arguments))
    return compile_source(source, *arguments, **options)


zipimport._compile_source = member  # type: ignore[attr-defined]
builtins.compile = large
