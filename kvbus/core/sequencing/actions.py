"""What a sequencer decides: the next batch, a new epoch, a loss, a request."""

from __future__ import annotations

import msgspec


class Deliver(msgspec.Struct):
    """The next batch, in order. ``seq`` 0 opens an epoch, ``fingerprint`` is the payload's."""

    seq: int
    payload: bytes
    fingerprint: int


class NewEpoch(msgspec.Struct):
    """The publisher is in a new epoch: nothing of the old one is true any more."""


class Lost(msgspec.Struct):
    """``count`` batches will never come; the ones after them follow."""

    count: int


class Synced(msgspec.Struct):
    """Everything missed while the connection was away, or before it, was delivered: what follows is live."""


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
