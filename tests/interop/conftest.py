from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .dynamo import PYTHON_ENV, DynamoIndexer
from .go_peers import HOME_ENV

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[DynamoIndexer]:
    """A fresh Dynamo indexer, or a skip that says what is missing."""
    if not os.environ.get(PYTHON_ENV):
        pytest.skip(
            f"{PYTHON_ENV} does not name a Python with ai-dynamo-runtime (.ci/run sets it; docs/INTEROP.md says how by hand)"
        )
    with DynamoIndexer(tmp_path / "dynamo.log") as running:
        yield running


@pytest.fixture
def gozmq() -> Path:
    """Where the peers on go-zeromq are, or a skip that says what is missing."""
    home = os.environ.get(HOME_ENV)
    if not home:
        pytest.skip(
            f"{HOME_ENV} names no peers on go-zeromq: .ci/gozmq.sh DIR builds them (Go, its module proxy); .ci/run does both"
        )
    return Path(home)
