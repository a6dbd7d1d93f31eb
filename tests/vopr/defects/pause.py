"""A pause of the bus: an answer that begins beyond the last batch delivered was taken for a restart of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kvbus.core.sequencing.sequencer import Sequencer
from kvbus.daemon.clock import RunningClock


def _accept_beyond(self: Sequencer, _seq: int, now: float) -> bool:
    self._new_epoch(now)
    return False


def _time(self: RunningClock) -> float:
    return self._read()


@contextmanager
def put_back() -> Iterator[None]:
    with (
        mock.patch.object(Sequencer, "_accept_beyond", _accept_beyond),
        mock.patch.object(RunningClock, "time", _time),
    ):
        yield
