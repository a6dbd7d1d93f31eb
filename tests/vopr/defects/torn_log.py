"""A write-ahead log that was damaged anywhere was accepted as one with a torn end: what came behind was forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from kvbus.daemon.state_file import StateFile

_frames = StateFile.frames


def _accepting(self: StateFile, read: Callable[[bytes, bytes], Any], _committed: int, **_: bool) -> Iterator[Any]:
    return _frames(self, read, 0, open_end=True)


@contextmanager
def put_back() -> Iterator[None]:
    with mock.patch.object(StateFile, "frames", _accepting):
        yield
