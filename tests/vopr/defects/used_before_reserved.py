"""A former defect in seq reservations: kvbus reserved further seqs only after it had used all reserved ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kvbus.state.reservations import SeqReservations

_use = SeqReservations.use


def _use_late(self: SeqReservations, output: int, slot: int, seq: int) -> None:
    late = self.__dict__.setdefault("late", {})
    before = late.get((output, slot))
    late[output, slot] = seq
    if before is not None and self._store is not None and seq % self._store.reserve_ahead == 0:
        _use(self, output, slot, before)


@contextmanager
def put_back() -> Iterator[None]:
    with mock.patch.object(SeqReservations, "use", _use_late):
        yield
