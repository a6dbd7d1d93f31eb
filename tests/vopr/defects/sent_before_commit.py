"""A former defect in the order of writing and sending: kvbus sent batches before their records were on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kvbus.state.writer import StateWriter

LATE = 0.3
"""Seconds after which kvbus, with this defect, writes the records of the batches that it has sent."""

_flush = StateWriter.flush


def _flush_late(self: StateWriter) -> None:
    due: float = self.__dict__.setdefault("due", self._clock() + LATE)
    if self._clock() >= due:
        del self.__dict__["due"]
        _flush(self)


@contextmanager
def put_back() -> Iterator[None]:
    with mock.patch.object(StateWriter, "flush", _flush_late):
        yield
