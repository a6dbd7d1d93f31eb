"""A former defect after a pause of kvbus: if a replay answer began after the last delivered batch, kvbus wrongly
counted a restart of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kvbus.core.sequencing.answers import Requests, Restart
from kvbus.core.sequencing.request import OpenRequest
from kvbus.daemon.runtime import RunningClock


def _start_late(_requests: Requests, _asked: OpenRequest, _seq: int, _now: float) -> Restart:
    return Restart()


def _time(self: RunningClock) -> float:
    return self._read()


@contextmanager
def put_back() -> Iterator[None]:
    with (
        mock.patch.object(Requests, "_start_late", _start_late),
        mock.patch.object(RunningClock, "time", _time),
    ):
        yield
