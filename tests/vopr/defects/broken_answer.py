"""After an answer broke off inside a state, the journal continued it: the router got part of the state without a
gap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kvbus.core.outputs.stream import IncompleteSeqs


@contextmanager
def put_back() -> Iterator[None]:
    with mock.patch.object(IncompleteSeqs, "__contains__", return_value=False):
        yield
