"""What a person reads while weights come: one line a host, and one at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

_LONGEST_ETA_SECONDS = 48 * 3600


def progress_line(host: str, model: str, state: Mapping[str, Any]) -> str:
    """How far a fetch is: share, bytes, rate, time left, and what it waits for."""
    total, done = int(state.get("total_bytes") or 0), int(state.get("done_bytes") or 0)
    if not total:
        return f"{host}: {model}: {state.get('note') or state.get('state', 'starting')}"
    parts = [f"{100 * done // total:3d} %", f"{_size(done)} of {_size(total)}"]
    if state.get("bytes_per_second"):
        parts.append(f"{_size(int(state['bytes_per_second']))}/s")
    # Of a trickle, or while it waits, nobody can say when it ends.
    if state.get("eta_seconds") is not None and int(state["eta_seconds"]) < _LONGEST_ETA_SECONDS:
        parts.append(f"{_time(int(state['eta_seconds']))} left")
    if done >= total:
        parts.append("proving and publishing")
    if state.get("note"):
        parts.append(str(state["note"]))
    return f"{host}: {model}: " + ", ".join(parts)


def summary_line(host: str, model: str, state: Mapping[str, Any]) -> str:
    """What came, in which time, from where."""
    seconds = max(0.0, float(state.get("updated_at") or 0) - float(state.get("started_at") or 0))
    received = int(state.get("received_bytes") or 0)
    sources = [
        f"{_size(size)} from {urlsplit(source).netloc or source}"
        for source, size in sorted((state.get("by_source") or {}).items(), key=lambda item: -item[1])
        if size > 0
    ]
    rate = f", {_size(round(received / seconds))}/s" if seconds >= 1 and received else ""
    return f"{host}: {model}: published in {_time(round(seconds))}{rate}" + (
        f" ({', '.join(sources)})" if sources else ""
    )


def _size(size_bytes: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} B"


def _time(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
