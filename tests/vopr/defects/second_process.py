"""Two processes had one state directory, and each wrote over what the other one kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kvbus.daemon import lock, seq_reservation


@contextmanager
def put_back() -> Iterator[None]:
    with (
        mock.patch.object(lock, "lock", return_value=None),
        mock.patch.object(seq_reservation, "lock", return_value=None),
    ):
        yield
