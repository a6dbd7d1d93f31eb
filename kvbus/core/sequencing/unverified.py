"""Live batches that have no place in the life known so far.

Those from before what was delivered, which nothing tells, are very late copies or the first ones of a new life: the
*suspects*, kept until the publisher has said which. Those from further ahead than any gap are odd ones or, if they go
on, another numbering.
"""

from __future__ import annotations

from typing import Final

from kvbus.core.sequencing.reorder_buffer import ReorderBuffer

MAX_STALE: Final = 1024
"""Suspects that are kept; beyond it the lowest are let go."""

PAUSE: Final = 1.0
"""Seconds before suspects are a reason to ask again, once the publisher has shown that they are not its own."""

RUN: Final = 3
"""Consecutive batches that are no accident."""


class UnverifiedBatches:
    """What is kept of one life's doubtful batches.

    Args:
        max_bytes: most payload kept of suspects.
    """

    __slots__ = ("_ahead", "_ask_after", "stale")

    def __init__(self, max_bytes: int) -> None:
        self.stale = ReorderBuffer(MAX_STALE, max_bytes)
        self._ahead: list[tuple[int, bytes]] = []
        """The newest batches from far ahead, while they are consecutive."""
        self._ask_after = float("-inf")

    def keep_stale(self, seq: int, payload: bytes) -> None:
        """Keep a batch from before what was delivered."""
        suspects = self.stale
        if seq in suspects:
            return
        while not suspects.fits(payload):
            suspects.drop_before(suspects.first + 1)
        suspects.add(seq, payload)

    @property
    def consecutive(self) -> bool:
        """Whether the newest suspects follow one another, as a life's own do."""
        last = self.stale.last if self.stale else 0
        return all(last - back in self.stale for back in range(RUN))

    def ahead(self, seq: int, payload: bytes) -> list[tuple[int, bytes]] | None:
        """Keep a batch from far ahead; the run that it completes, if it does."""
        if self._ahead and self._ahead[-1][0] + 1 != seq:
            self._ahead.clear()
        self._ahead.append((seq, payload))
        return self._ahead if len(self._ahead) == RUN else None

    def may_ask(self, now: float) -> bool:
        """Whether suspects are a reason to ask the publisher."""
        return now >= self._ask_after

    def settled(self, now: float) -> None:
        """The publisher has shown that it is in the life known: the suspects were late copies."""
        if self.stale:
            self.stale.clear()
            self._ask_after = now + PAUSE

    def clear(self) -> None:
        """The connection is gone, and with it what came on it."""
        self.stale.clear()
        self._ahead.clear()
