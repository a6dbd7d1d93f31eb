"""A former defect after a replay answer that broke off inside a state: the next answer continued from the journal.

So the router got only part of the state, without a gap in the seqs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kvbus.core.outputs.stream import IncompleteSeqs


@contextmanager
def put_back() -> Iterator[None]:
    with mock.patch.object(IncompleteSeqs, "__contains__", return_value=False):
        yield
