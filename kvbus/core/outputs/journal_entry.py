"""One entry of a journal: a module of its own, because structs are not compiled."""

from __future__ import annotations

import msgspec


class Entry(msgspec.Struct, gc=False):
    """``count`` batches from ``seq`` on with the same payload; more than one only if the batch is empty."""

    seq: int
    payload: bytes
    count: int = 1
    empty: bool = False
