"""A former defect in replay answers whose blocks kvbus divides into smaller blocks.

kvbus computed the size of a state from the number of the engine's blocks. The state had more blocks, because kvbus had
divided them, so the answer ended too early.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kvbus.core.blocks.index import Index


@contextmanager
def put_back() -> Iterator[None]:
    with mock.patch.object(Index, "announced", property(Index.__len__)):
        yield
