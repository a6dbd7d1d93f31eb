from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from . import zmtp_peers
from .dynamo import PYTHON_ENV, DynamoIndexer
from .go_peers import HOME_ENV
from .zmtp_peers import Library

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[DynamoIndexer]:
    """A new Dynamo indexer. Skip the test if Dynamo is not installed; the reason says what is missing."""
    if not os.environ.get(PYTHON_ENV):
        pytest.skip(
            f"{PYTHON_ENV} does not name a Python with ai-dynamo-runtime (.ci/run sets it; docs/INTEROP.md says how by hand)"
        )
    with DynamoIndexer(tmp_path / "dynamo.log") as running:
        yield running


@pytest.fixture
def gozmq() -> Path:
    """The directory of the programs on go-zeromq.

    Skip the test if they were not built; the reason says how to build them.
    """
    home = os.environ.get(HOME_ENV)
    if not home:
        pytest.skip(
            f"{HOME_ENV} names no peers on go-zeromq: .ci/gozmq.sh DIR builds them (Go, its module proxy); .ci/run does both"
        )
    return Path(home)


@pytest.fixture(params=["jeromq", "zeromq-rs"])
def library(request: pytest.FixtureRequest, tmp_path: Path) -> Library:
    """One of the other ZeroMQ libraries.

    Skip the test if its program was not built; the reason says how to build it.
    """
    found = zmtp_peers.library(request.param, tmp_path)
    if found is None:
        pytest.skip(
            f"{zmtp_peers.HOME_ENV} names no peer on {request.param}: .ci/zmtp-peers.sh DIR builds it (Java and Maven, or "
            f"cargo); .ci/run does both"
        )
    return found
