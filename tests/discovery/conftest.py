"""Every kind of discovery that is installed, in turn, each with who knows the engines there."""

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
"""Who brings what the engines publish, too, has nobody to ask for places: tests/log/test_aggregator.py."""


@pytest.fixture(params=FINDING)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    assert request.param in WORLDS, f"{request.param} needs a world of its own in tests/discovery/worlds.py"
    async with WORLDS[request.param](tmp_path).running() as made:
        yield made
