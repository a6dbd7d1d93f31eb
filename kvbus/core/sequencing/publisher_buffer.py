"""What a publisher's answers have shown of its replay buffer, in one epoch."""

from __future__ import annotations


class PublisherBuffer:
    """Knows whether the publisher keeps batches, and whether it has trimmed some that still wait to be read."""

    __slots__ = ("_empty_at", "_trimmed_at", "_trimmed_since", "keeps")

    def __init__(self) -> None:
        self.keeps: bool | None = None
        """Whether the publisher keeps a buffer: it has answered with batches, or with none while it publishes.

        None: nobody knows yet. If a publisher with a buffer answers with nothing, it is in another epoch. If one
        without a buffer does, that proves nothing.
        """
        self._empty_at = -1
        """Where the live stream was when an answer was empty that should not have been; -1: there was none."""
        self._trimmed_at = -1
        """The next batch when an answer began beyond the last one delivered, or was a state; -1: none was."""
        self._trimmed_since = 0.0

    def answered_with_nothing(self, live_end: int) -> None:
        """An answer was empty that should not have been. Twice, with a batch between: there is no buffer."""
        if self._empty_at < 0:
            self._empty_at = live_end
        elif self._empty_at < live_end:
            self.keeps = False

    def disconnected(self) -> None:
        """What answers on another connection have shown of being empty does not count any more."""
        self._empty_at = -1

    def trimmed_for(self, following: int, now: float) -> float:
        """For how many seconds the answers lack the batch ``following``, which is still the next one."""
        if self._trimmed_at != following:
            self._trimmed_at, self._trimmed_since = following, now
        return now - self._trimmed_since
