"""The outputs of the pure sequence machine: batches to decode, requests to send, updates for the caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbus.client.updates import Gap, Lost, Restarted, Synced

if TYPE_CHECKING:
    from kvbus.core.types import Reason


@dataclass(frozen=True, slots=True)
class Deliver:
    """The next batch in order, not decoded yet."""

    seq: int
    topic: bytes
    payload: bytes
    replayed: bool


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message with a malformed sequence frame."""

    topic: bytes
    reason: Reason


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask for a replay from ``start``. Abort an earlier request; its answer must not reach the machine any more."""

    start: int


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Ask for a snapshot. Abort an earlier request; its answer must not reach the machine any more."""


@dataclass(frozen=True, slots=True)
class Replace:
    """The whole state as of batch ``seq``, as undecoded batches. It replaces everything known before."""

    seq: int
    chunks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StopAsking:
    """Abort the current request and drop the rest of its answer."""


Output = Deliver | Replace | Malformed | Gap | Lost | Restarted | Synced | Ask | AskSnapshot | StopAsking
