"""An answer that broke off in the middle of the state went on from the journal: part of the state, and no gap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kvbus.core.outputs.stream import IncompleteSeqs


@contextmanager
def put_back() -> Iterator[None]:
    with mock.patch.object(IncompleteSeqs, "__contains__", return_value=False):
        yield
