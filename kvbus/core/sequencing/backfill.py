"""How far back the history of one epoch reaches, and whether more of it may still be had.

Batches are given up when the publisher has none of them any more, and also when it does not answer. Silence proves
nothing about its replay buffer: a publisher that was stuck for some seconds still has everything. So it is asked again,
from the beginning, until it answers. If its buffer begins before what is known, the epoch is read from there again.
"""

from __future__ import annotations

from typing import Any, Final

MAX_BACKOFF: Final = 8

NOTHING: Final = 2**63
"""``first`` of an epoch of which nothing is known: no number is as high."""


class Backfill:
    """Knows what is missing at the beginning, and when to ask for it again.

    ``first`` is the number from which on nothing is missing in what was delivered.

    Args:
        pause: seconds before the next request. It doubles with each, up to :data:`MAX_BACKOFF` times as much.
    """

    __slots__ = ("_after", "_factor", "_pause", "_silent", "first", "pending")

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._factor = 1
        self._after = float("-inf")
        self._silent = False
        self.first = 0
        self.pending = False
        """Something was given up without an answer: the publisher may still have it."""

    def request_finished(self, *, answered: bool) -> None:
        """A request is over; ``answered`` if its answer had an end."""
        self._silent = not answered

    def begins(self, seq: int) -> None:
        """Nothing is known of what came before ``seq``."""
        self.first = seq
        self.pending = self.pending or (self._silent and seq > 0)

    def nothing_known(self) -> None:
        """Nothing is known of the epoch, and nobody has answered."""
        self.first = NOTHING
        self.pending = True

    def due(self, now: float) -> bool:
        """Whether to ask again now."""
        if not self.pending or now < self._after:
            return False
        self._after = now + self._pause * self._factor
        self._factor = min(2 * self._factor, MAX_BACKOFF)
        return True

    def answered(self, first: int | None) -> bool:
        """The publisher's buffer begins at ``first`` (None: it is empty); whether it holds more than is known."""
        self.pending = False
        return first is not None and first < self.first

    def dump(self) -> list[Any]:
        """Plain data for a restart."""
        return [self.first, self.pending]

    def load(self, data: list[Any]) -> None:
        """The reverse of :meth:`dump`."""
        self.first, self.pending = data
