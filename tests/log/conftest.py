from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.log import broker
from tests.transport.conftest import raised  # noqa: F401


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[broker.Broker]:
    """A running Kafka, or a skip that says what is missing."""
    if not os.environ.get(broker.HOME_ENV):
        pytest.skip(broker.MISSING)
    running = broker.Broker(tmp_path_factory.mktemp("kafka"))
    try:
        running.start()
        yield running
    finally:
        running.kill()
