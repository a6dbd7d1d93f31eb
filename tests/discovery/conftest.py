"""Fixtures by which a test runs once for each installed kind of discovery, with real files or servers for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvbus.config import parts
from kvbus.parts.discovery.streams import LogStreams
from tests.discovery.worlds import WORLDS, World

FINDING = [
    kind for kind in parts.installed(parts.DISCOVERY) if not issubclass(parts.load(parts.DISCOVERY, kind), LogStreams)
]
"""Kinds of discovery that find engines and do not bring their batches.

The kinds that read a log also bring the engines' batches, so the tests with this list leave them out: see
log/test_aggregator.py.
"""


@pytest.fixture(params=FINDING)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    assert request.param in WORLDS, f"{request.param} needs a world of its own in tests/discovery/worlds.py"
    async with WORLDS[request.param](tmp_path).running() as made:
        yield made
