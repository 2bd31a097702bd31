"""A server with the small model, an empty models directory, and pauses that take no time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weights_server import REVISION, WeightsServer, manifest

from metalserve.remote import weights
from metalserve.remote.weights import Outcome


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
    monkeypatch.setattr(weights, "time", SimpleNamespace(sleep=asked.append, monotonic=time.monotonic))
    return asked


@pytest.fixture
def ensure(models: Path, source: WeightsServer, pauses: list[float]) -> Callable[..., Outcome]:
    """`ensure_model` for the small model from the server; anything can be given otherwise."""

    def run(**changes: Any) -> Outcome:
        arguments = {"files": manifest(), "sources": [source.url], "reserve_bytes": 0, "read_timeout_seconds": 5}
        return weights.ensure_model(models, "tiny", REVISION, **{**arguments, **changes})

    return run
