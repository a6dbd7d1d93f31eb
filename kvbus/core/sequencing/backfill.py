"""How far back the history of one epoch reaches, and whether more of it may still be had.

Batches are given up when the publisher has none of them any more, and also when it does not answer. Silence proves
nothing about its replay buffer: a publisher that was stuck for some seconds still has everything. So it is asked again,
from the beginning, until it answers. If its buffer begins before what is known, the epoch is read from there again.
"""

from __future__ import annotations

from math import inf
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

    __slots__ = ("_after", "_emptied", "_factor", "_pause", "_silent", "first", "pending")

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._factor = 1
        self._after = float("-inf")
        self._silent = False
        self._emptied = False
        """The publisher's cache was emptied since: what is missing of the history is not missing of the cache."""
        self.first = 0
        self.pending = False
        """Something was given up without an answer: the publisher may still have it."""

    @property
    def partial(self) -> bool:
        """Whether what was delivered may be less than the publisher's cache holds."""
        return self.first > 0 and not self._emptied

    def answer_begins(self) -> None:
        """The publisher answers: what its answer begins with is the oldest that it has."""
        self._silent = False

    def request_finished(self, *, answered: bool) -> None:
        """A request is over; ``answered`` if its answer had an end."""
        self._silent = not answered

    @property
    def unanswered(self) -> bool:
        """Whether the last request came to no end."""
        return self._silent

    def begins(self, seq: int) -> None:
        """Nothing is known of what came before ``seq``."""
        self.first = seq
        self._emptied = False
        self.pending = self.pending or (self._silent and seq > 0)

    def nothing_known(self, *, pending: bool = True) -> None:
        """Nothing is known of the epoch. ``pending``: nobody has answered, so that it may still be had."""
        self.first = NOTHING
        self.pending = pending

    def nothing_sent(self) -> None:
        """The publisher has sent nothing in this epoch so far."""
        self.first = 0

    def emptied(self) -> None:
        """The publisher's cache is empty now. What it may have in its replay buffer is asked for all the same."""
        self._emptied = True

    @property
    def next_due(self) -> float:
        """When it is due; infinity for never."""
        return self._after if self.pending else inf

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
        return [self.first, self.pending, self._emptied]

    def load(self, data: list[Any]) -> None:
        """The reverse of :meth:`dump`."""
        self.first, self.pending, self._emptied = data
