"""What the pure sequence machine gives its shell: batches to decode, requests to send, plain updates."""

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
    """A sequence frame that is none."""

    topic: bytes
    reason: Reason


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask for a replay from ``start``; a request under way is cut off, its answers must not arrive."""

    start: int


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Ask for a snapshot; a request under way is cut off, its answers must not arrive."""


@dataclass(frozen=True, slots=True)
class Replace:
    """The whole state as of batch ``seq``, as batches not decoded yet; what was known before is void."""

    seq: int
    chunks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StopAsking:
    """Give the request under way up: nothing it still brings is wanted."""


Output = Deliver | Replace | Malformed | Gap | Lost | Restarted | Synced | Ask | AskSnapshot | StopAsking
