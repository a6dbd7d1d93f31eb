"""A connected requester: its answers in order, its share of the turn, and whether its kernel takes anything."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final

from kvbus.transport.answer_reader import AnswerReader
from kvbus.transport.zmtp.peer import Peer
from kvbus.transport.zmtp.tcp import Window
from kvbus.transport.zmtp.wire import encode_message

QUANTUM: Final = 64 * 1024
"""Bytes one requester gets before the next one gets its turn."""

FIRST_SHARE: Final = 3 * 1024
"""Bytes a newcomer gets at a time, until it has shown that it reads."""

READS: Final = 4 * QUANTUM
"""Bytes whose acknowledgement shows that a requester reads: a kernel whose owner does not takes half as much."""

OPENED: Final = FIRST_SHARE
"""Bytes by which the window of a requester that reads moves on, before it shows that it does."""

STAY: Final = 3
"""Turns behind which a newcomer gives up its place to others, if it has not shown that it reads. Each of them is a
share, but not while the one before is not acknowledged."""

MAX_BEHIND: Final = 16
"""Requests of one peer that wait behind its first one. Beyond that kvbus does not read from it until some are over."""


class Place(Enum):
    """Where a requester is."""

    IDLE = "idle"
    """Nothing was asked."""
    WAITING = "waiting"
    """It could be sent to, and waits for its turn."""
    SENDING = "sending"
    """It takes part in the turns."""
    PARKED = "parked"
    """It has not read what it was sent; it holds no place until it has."""
    FINISHING = "finishing"
    """The whole answer was handed over, and the kernel has not taken all of it yet."""


class Requester:
    """One peer of a replay server.

    Args:
        peer: its connection.
        now: seconds, for its progress.

    Attributes:
        identity: the first frame of its requests and answers, as of a ROUTER.
        answer: under way or next; None while nothing was asked.
        behind: answers that come after it, each with True if it is refused.
        credit: bytes left of its share; a large message takes from later shares.
        progress: when its kernel has last acknowledged something, or had nothing to acknowledge.
        reads: it has acknowledged more than a kernel takes whose owner does not read.
        stay: turns that it has had since it took its place.
    """

    def __init__(self, peer: Peer, now: float) -> None:
        self.peer = peer
        self.identity = peer.id.to_bytes(8, "big")
        self.place = Place.IDLE
        self.answer: AnswerReader | None = None
        self.refused = False
        self.behind: deque[tuple[AnswerReader, bool]] = deque()
        self.credit = 0
        self.progress = now
        self.reads = False
        self.stay = 0
        self._acknowledged = 0
        self._window: Window | None = None
        """As of its first acknowledgement. Before that a window may grow by itself."""

    def begin_share(self) -> None:
        """Give it the credit of its next share. A newcomer owes nothing: a share without a message shows nothing."""
        self.stay += 1
        self.credit = self.credit + QUANTUM if self.look() else FIRST_SHARE

    def look(self) -> bool:
        """Return whether it has shown that it reads. Then it gets whole shares, and more may wait for it."""
        if not self.reads and self._has_read():
            self.reads = True
            self.peer.limit(waiting=QUANTUM, unsent=QUANTUM // 2)
        return self.reads

    def _has_read(self) -> bool:
        """Return whether it has acknowledged much, or its window moves on with that, as it does after a few shares."""
        window, first = self.peer.window, self._window
        if window is None:
            return self.peer.acknowledged_bytes >= READS
        if first is None:
            if window.acknowledged >= FIRST_SHARE:
                self._window = window
            return window.acknowledged >= READS
        opened = window.end - first.end
        moves = opened >= OPENED and 2 * opened > window.acknowledged - first.acknowledged
        return moves or window.acknowledged >= READS

    @property
    def unfinished(self) -> int:
        """Answers that are not over."""
        return (self.answer is not None) + len(self.behind)

    def ask(self, answer: AnswerReader, *, refused: bool) -> None:
        """Add an answer. A requester that asks on and on is not read any more."""
        if self.answer is None:
            self.answer, self.refused = answer, refused
        else:
            self.behind.append((answer, refused))
        if len(self.behind) == MAX_BEHIND:
            self.peer.pause()

    def next_answer(self) -> bool:
        """Go on to the next answer; return False if there is none."""
        self.answer = None
        self.credit = 0
        if not self.behind:
            return False
        self.answer, self.refused = self.behind.popleft()
        if len(self.behind) == MAX_BEHIND - 1:
            self.peer.resume()
        return True

    def clear(self) -> None:
        """Forget all of its answers. What was handed over leaves all the same."""
        self.place = Place.IDLE
        self.answer = None
        self.behind.clear()
        self.peer.resume()

    def next_message(self) -> bytes | None:
        """Encode the next message of its answer; empty while the relay still makes it, None where there is none."""
        answer = self.answer
        if answer is None or answer.done:
            return None
        frames = answer.refusal() if self.refused else answer.next_message()
        return encode_message(frames[1:]) if frames else b""

    def stalled(self, now: float, timeout: float) -> bool:
        """Return whether its kernel has acknowledged nothing for so long, though something was due from it."""
        acknowledged = self.peer.acknowledged_bytes
        due = self.place in {Place.PARKED, Place.FINISHING}
        if not due or acknowledged > self._acknowledged:
            self._acknowledged = acknowledged
            self.progress = now
        return now - self.progress > timeout
