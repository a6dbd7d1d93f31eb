"""Reblocked stream: an answer from the state was sized by the engine's blocks, not the announced ones, and ended too
early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kvbus.core.blocks.index import Index


@contextmanager
def put_back() -> Iterator[None]:
    with mock.patch.object(Index, "announced", property(Index.__len__)):
        yield
