"""What a publisher's answers have shown of its replay buffer, in one epoch."""

from __future__ import annotations

from math import inf
from typing import Final

LONGEST: Final = 120.0
"""Seconds that TCP waits at most before it tries again (Linux)."""


class PublisherBuffer:
    """Knows whether the publisher keeps batches, and whether it has trimmed some that are still on their way.

    A publisher answers on one connection and publishes on another. What it has sent on that one comes, in order, for as
    long as it stands, but it may come late: it waits to be read in this process, or TCP holds it back. TCP tries again
    at intervals that double. So what was held up for some time may come as long again after the obstacle has gone.

    Args:
        timeout: how long an answer may take, in seconds.
    """

    __slots__ = (
        "_empty_at",
        "_silent_at",
        "_silent_since",
        "_stood_until",
        "_timeout",
        "_trimmed_at",
        "_trimmed_since",
        "keeps",
    )

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.keeps: bool | None = None
        """Whether the publisher keeps a buffer: it has answered with batches, or with none while it publishes.

        None: nobody knows yet. If a publisher with a buffer answers with nothing, it is in another epoch. If one
        without a buffer does, that proves nothing.
        """
        self._empty_at = -1
        """Where the live stream was when an answer was empty that should not have been; -1: there was none."""
        self._silent_at = -1
        """The next batch when the publisher was asked about its silence; -1: it never was."""
        self._silent_since = 0.0
        self._trimmed_at = -1
        """The next batch when an answer began beyond the last one delivered, or was a state; -1: none was."""
        self._trimmed_since = 0.0
        self._stood_until = -inf
        """What was on its way while this process stood still comes until then."""

    def answered_with_nothing(self, live_end: int) -> None:
        """An answer was empty that should not have been. Twice, with a batch between: there is no buffer."""
        if self._empty_at < 0:
            self._empty_at = live_end
        elif self._empty_at < live_end:
            self.keeps = False

    def disconnected(self) -> None:
        """What answers on another connection have shown of being empty does not count any more."""
        self._empty_at = -1

    def silent(self, following: int, since: float) -> None:
        """The live stream has brought nothing since then; ``following`` is the next batch."""
        if self._silent_at != following:
            self._silent_at, self._silent_since = following, since

    def unread(self) -> None:
        """Live batches wait to be read: no time has passed without any."""
        self._trimmed_at = -1

    def stood_still(self, seconds: float, now: float) -> None:
        """This process has not run for so long, up to ``now``, which leaves it out."""
        self._stood_until = max(self._stood_until, now + min(seconds, LONGEST) + self._timeout)

    def has_lost(self, following: int, now: float) -> bool:
        """Whether the batch ``following``, which an answer lacks that came now, will not come any more."""
        if self._trimmed_at != following:
            self._trimmed_at, self._trimmed_since = following, now
        silent = self._trimmed_since - self._silent_since if self._silent_at == following else 0.0
        timeout = max(self._timeout, min(silent, LONGEST)) + self._timeout
        return now >= max(self._trimmed_since + timeout, self._stood_until)
