"""Live batches that have no place in the epoch known so far.

A batch from before what was delivered, whose content nobody knows any more, is *stale*: a very late copy, or the first
of a new epoch. It is kept until the publisher has said which. A batch from further ahead than any gap is odd, or, if it
goes on, another numbering.
"""

from __future__ import annotations

from typing import Final

from kvbus.core.sequencing.reorder_buffer import ReorderBuffer
from kvbus.core.stats import SourceStats

MAX_STALE: Final = 1024
"""Stale batches that are kept; beyond it the lowest are let go."""

PAUSE: Final = 1.0
"""Seconds before stale batches are a reason to ask again, once the publisher has shown that they are not its own."""

RUN: Final = 3
"""Consecutive batches that are no accident."""


class UnverifiedBatches:
    """What is kept of one epoch's doubtful batches.

    Args:
        max_bytes: most payload kept of stale batches.
        stats: where those that turn out to be copies, or are let go, are counted as duplicates.
    """

    __slots__ = ("_ahead", "_ask_after", "_stats", "stale")

    def __init__(self, max_bytes: int, stats: SourceStats) -> None:
        self.stale = ReorderBuffer(MAX_STALE, max_bytes)
        self._stats = stats
        self._ahead: list[tuple[int, bytes]] = []
        """The newest batches from far ahead, while they are consecutive."""
        self._ask_after = float("-inf")

    def keep_stale(self, seq: int, payload: bytes) -> None:
        """Keep a batch from before what was delivered."""
        stale = self.stale
        if seq in stale:
            self._stats.duplicates += 1
            return
        while not stale.fits(payload):
            self._stats.duplicates += stale.drop_before(stale.first + 1)
        stale.add(seq, payload)

    @property
    def consecutive(self) -> bool:
        """Whether the newest stale batches follow one another, as those of a new epoch do."""
        last = self.stale.last if self.stale else 0
        return all(last - back in self.stale for back in range(RUN))

    def ahead(self, seq: int, payload: bytes) -> list[tuple[int, bytes]] | None:
        """Keep a batch from far ahead; the run that it completes, if it does."""
        if self._ahead and self._ahead[-1][0] + 1 != seq:
            self._ahead.clear()
        self._ahead.append((seq, payload))
        return self._ahead if len(self._ahead) == RUN else None

    def may_ask(self, now: float) -> bool:
        """Whether stale batches are a reason to ask the publisher."""
        return now >= self._ask_after

    def epoch_confirmed(self, now: float) -> None:
        """The publisher has shown that it is in the epoch known: the stale batches were late copies."""
        if self.stale:
            self.forget()
            self._ask_after = now + PAUSE

    def forget(self) -> None:
        """Nobody will say whose the stale batches were: they count as copies."""
        self._stats.duplicates += len(self.stale)
        self.stale.clear()

    def disconnected(self) -> None:
        """The connection is gone, and with it what came on it."""
        self.forget()
        self._ahead.clear()

    def take_stale(self) -> list[tuple[int, bytes]]:
        """The stale batches were the first of a new epoch; they are kept here no longer."""
        taken = [(seq, self.stale.get(seq)) for seq in self.stale]
        self.stale.clear()
        return taken
