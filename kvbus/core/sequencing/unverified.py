"""Live batches that do not fit into the epoch known so far.

A batch is *stale* if its number was delivered before and its fingerprint is not kept any more. It is a very late copy,
or the first batch of a new epoch. It is kept here until the publisher has shown which. A batch from further ahead than
any gap is odd; if others follow it, the publisher is in a new epoch.
"""

from __future__ import annotations

from typing import Final

from kvbus.core.sequencing.reorder_buffer import ReorderBuffer
from kvbus.core.source_stats import SourceStats

MAX_STALE: Final = 1024
"""Stale batches that are kept; beyond it the lowest ones are dropped."""

PAUSE: Final = 1.0
"""Seconds before stale batches are a reason to ask again, once the publisher has shown that they were late copies."""

RUN: Final = 3
"""So many consecutive batches are no accident."""


class UnverifiedBatches:
    """Keeps the unverified batches of one epoch.

    Args:
        max_bytes: most payload kept of stale batches.
        stats: where stale batches that are copies, or are dropped, are counted as duplicates.
    """

    __slots__ = ("_ahead", "_ask_after", "_stats", "stale")

    def __init__(self, max_bytes: int, stats: SourceStats) -> None:
        self.stale: ReorderBuffer[bytes] = ReorderBuffer(MAX_STALE, max_bytes)
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
        """Whether the newest stale batches have consecutive numbers, as those of a new epoch do."""
        last = self.stale.last if self.stale else 0
        return all(last - back in self.stale for back in range(RUN))

    def ahead(self, seq: int, payload: bytes) -> list[tuple[int, bytes]] | None:
        """Keep a batch from far ahead. Returns the run of :data:`RUN` that it completes, None if it does not."""
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
        """Count the stale batches as copies and drop them: nobody will show what they were."""
        self._stats.duplicates += len(self.stale)
        self.stale.clear()

    def disconnected(self) -> None:
        """Drop everything: the connection it came on is gone."""
        self.forget()
        self._ahead.clear()

    def take_stale(self) -> list[tuple[int, bytes]]:
        """Hand over the stale batches: they were the first of a new epoch."""
        taken = [(seq, self.stale.get(seq)) for seq in self.stale]
        self.stale.clear()
        return taken
