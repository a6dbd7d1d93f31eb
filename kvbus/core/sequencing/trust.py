"""Decide whether a replay endpoint belongs to the publisher whose batches come on the live stream.

kvbus reads the live stream and the replays over separate connections. With a wrong port, or with one Service in front
of two engines, the two connections lead to different publishers. No message names its publisher, so only the content of
the batches can show it: an answer has other content than the live stream under the same seqs.

An engine that restarted behind a proxy looks the same, but only once: its live stream then continues with the numbers
of its answers. If the live stream continues with its own numbers on the same connection, and the next answer differs
as well, the answers come from another publisher. kvbus then uses no answer. It continues to ask, and trusts the
endpoint again after the answers and the live stream have agreed.
"""

from __future__ import annotations

from math import inf
from typing import Final

from kvbus.core.sequencing.phases import Phase
from kvbus.core.sequencing.request import OpenRequest

AGREEMENTS: Final = 2
"""Number of answers in a row that must agree with the live stream before kvbus trusts the replay endpoint again.

The number doubles with each loss of trust on one connection, up to :data:`MAX_AGREEMENTS`. Behind a Service, answers of
the right engine and of another one alternate at random.
"""

MAX_AGREEMENTS: Final = 64

MAX_PAUSE: Final = 32
"""Maximum time between two requests that compare the answers with the live stream, in multiples of their interval."""


class ReplayTrust:
    """Whether kvbus trusts the replay endpoint of a publisher. Times are in seconds."""

    __slots__ = ("_agreed", "_doubted_at", "_needed", "_pause", "ask_at", "confirmed", "lost")

    def __init__(self) -> None:
        self.disconnected()

    def disconnected(self) -> None:
        """Trust the endpoint again, because the next connections may lead to other publishers."""
        self.lost = False
        """Whether the answers come from another publisher than the live stream, so that kvbus uses none of them."""
        self.confirmed = False
        """Whether an answer has agreed with the live stream since the last contradiction."""
        self.ask_at = inf
        """The time of the next request whose answer kvbus compares with the live stream.

        It is infinity until the live stream has brought a batch to compare, and after an answer has agreed.
        """
        self._doubted_at: int | None = None
        """The highest seq of the live stream when an answer contradicted it; None if no answer has done so, or if a
        later answer has agreed."""
        self._agreed = 0
        self._needed = AGREEMENTS
        self._pause = 1

    def contradicted(self, live: int, *, asked: int) -> bool:
        """Record that an answer has contradicted the live stream. Return whether the endpoint loses kvbus's trust.

        Args:
            live: the highest seq that the live stream has shown.
            asked: the highest seq that it had shown when kvbus requested the answer.
        """
        self.epoch_began()
        if self._doubted_at is None and self._needed == AGREEMENTS:
            self._doubted_at = live
        elif self._doubted_at is None or asked > self._doubted_at:
            self.lost = True
            self._doubted_at = None
            self._agreed = 0
            self._needed = min(2 * self._needed, MAX_AGREEMENTS)
        return self.lost

    def contradicted_by(self, asked: OpenRequest, *, restarts: bool) -> bool:
        """Return whether an answer contradicts the live stream. Each answer counts only once.

        ``restarts`` says that the answer shows another epoch than the known one.
        """
        if not asked.shows_publisher or not (restarts or asked.differs):
            return False
        if asked.phase is Phase.COMPARE:
            self._agreed = 0
            return False
        asked.shows_publisher = False
        return True

    def restored_by(self, asked: OpenRequest) -> bool:
        """Record that an answer has ended. Return whether kvbus trusts the endpoint again because of this answer."""
        if not asked.agrees or asked.differs or not asked.shows_publisher:
            return False
        self._doubted_at = None
        self._pause = 1
        self.ask_at = inf
        self.confirmed = not self.lost
        if self.confirmed:
            return False
        self._agreed += 1
        self.lost = self._agreed < self._needed // 2
        return not self.lost

    def epoch_began(self) -> None:
        """Record that a new epoch begins, whose first answer comes over another connection than the live stream."""
        self.confirmed = False
        self.ask_at = inf
        self._pause = 1

    def live_restarted(self) -> None:
        """Record that the live stream has begun a new epoch, so that earlier answers need not agree with it."""
        self._doubted_at = None

    def due(self, now: float, interval: float) -> bool:
        """Return whether to ask now whether the endpoint belongs to the publisher of the live stream.

        Call it if the live stream has brought a batch to compare. The first request comes an ``interval`` later. If
        so, plan the next request: each pause is twice as long as the one before, until an answer agrees.
        """
        if self.ask_at == inf:
            self.ask_at = now + interval
        if now < self.ask_at:
            return False
        self.ask_at = now + interval * self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)
        return True
