from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from .dynamo import PYTHON_ENV, DynamoIndexer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[DynamoIndexer]:
    """A fresh Dynamo indexer, or a skip that says what is missing."""
    if not os.environ.get(PYTHON_ENV):
        pytest.skip(
            f"{PYTHON_ENV} does not name a Python with ai-dynamo-runtime (.ci/run sets it; docs/INTEROP.md says how by hand)"
        )
    with DynamoIndexer(tmp_path / "dynamo.log") as running:
        yield running
