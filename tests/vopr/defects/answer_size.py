"""Blocks that leave in parts: an answer behind the journal was sized by the engine's blocks, and ended too early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kvbus.core.blocks.index import Index


@contextmanager
def put_back() -> Iterator[None]:
    with mock.patch.object(Index, "announced", property(Index.__len__)):
        yield
