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
class StopAsking:
    """Give the request under way up: nothing it still brings is wanted."""


Output = Deliver | Malformed | Gap | Lost | Restarted | Synced | Ask | StopAsking
