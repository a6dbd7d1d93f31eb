"""What a sequencer decides: the next batch, a new life, a loss, a question."""

from __future__ import annotations

import msgspec


class Deliver(msgspec.Struct):
    """The next batch, in order. ``seq`` 0 opens a life, ``fingerprint`` is the payload's fingerprint."""

    seq: int
    payload: bytes
    fingerprint: int


class NewEpoch(msgspec.Struct):
    """The publisher is in a new life: nothing of the old one is true any more."""


class Lost(msgspec.Struct):
    """``count`` batches will never come; the ones after them follow."""

    count: int


class Synced(msgspec.Struct):
    """What was missed while the connection was away, or ever before, is in: what follows is live."""


class Ask(msgspec.Struct):
    """Ask the publisher's replay from ``start``; the answer comes back under ``request``."""

    request: int
    start: int


class AskSnapshot(msgspec.Struct):
    """Ask the publisher for a snapshot of its state; the answer comes back under ``request``."""

    request: int


class Stop(msgspec.Struct):
    """No more of this answer is wanted."""

    request: int


Action = Deliver | NewEpoch | Lost | Synced | Ask | AskSnapshot | Stop
