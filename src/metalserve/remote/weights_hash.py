"""SHA-256 of files, as many at once as the machine has processors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_CHUNK_BYTES = 4 << 20


def hash_file(path: Path) -> str:
    """SHA-256 in lower-case hex.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        while True:
            count = stream.readinto(buffer)
            if not count:
                return digest.hexdigest()
            digest.update(view[:count])


def hash_files(paths: Iterable[Path]) -> dict[Path, str]:
    """SHA-256 of each file; OpenSSL lets go of Python's lock, so threads are enough. The largest file is begun first.

    Raises:
        OSError: a file cannot be read.
    """
    ordered = sorted(paths, key=lambda path: path.stat().st_size, reverse=True)
    processors = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max_workers=max(1, min(len(ordered), processors))) as pool:
        return dict(zip(ordered, pool.map(hash_file, ordered)))
