"""A server with the small model, an empty models directory, and pauses that take no time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weights_server import REVISION, WeightsServer, manifest

from metalserve.remote import weights, weights_download
from metalserve.remote.weights import Outcome
from metalserve.remote.weights_download import Transfer

TRANSFER = ("read_timeout_seconds", "attempts", "patience_seconds", "tokens", "limit", "progress", "log")


@pytest.fixture
def source() -> Iterator[WeightsServer]:
    with WeightsServer() as server:
        yield server


@pytest.fixture
def other() -> Iterator[WeightsServer]:
    with WeightsServer() as server:
        yield server


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def final(models: Path) -> Path:
    return models / "tiny" / REVISION


@pytest.fixture
def incoming(models: Path) -> Path:
    return models / ".incoming" / f"tiny@{REVISION}"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were asked for, in seconds; none of them is made."""
    asked: list[float] = []
    clock = SimpleNamespace(sleep=asked.append, monotonic=time.monotonic, time=time.time)
    monkeypatch.setattr(weights, "time", clock)
    monkeypatch.setattr(weights_download, "time", clock)
    # Hosts are spread around the pause that is meant.
    monkeypatch.setattr(weights_download, "random", SimpleNamespace(uniform=lambda low, high: (low + high) / 2))
    return asked


@pytest.fixture
def ensure(models: Path, source: WeightsServer, pauses: list[float]) -> Callable[..., Outcome]:
    """`ensure_model` for the small model from the server; anything can be given otherwise."""

    def run(**changes: Any) -> Outcome:
        how: dict[str, Any] = {"read_timeout_seconds": 5, "attempts": 3}
        how.update((name, changes.pop(name)) for name in TRANSFER if name in changes)
        arguments = {"files": manifest(), "sources": [source.url], "reserve_bytes": 0, "transfer": Transfer(**how)}
        return weights.ensure_model(models, "tiny", REVISION, **{**arguments, **changes})

    return run
