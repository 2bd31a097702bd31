from __future__ import annotations

from collections.abc import Iterator

import pytest
from gate_server import GateServer


@pytest.fixture
def server() -> Iterator[GateServer]:
    with GateServer() as running:
        yield running
