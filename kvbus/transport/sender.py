"""The sender of an output, which sends long answers to many routers in rounds, as fast as each router reads.

A session is a peer (a connected router) and a generator of encoded messages for it. In each round the sender takes up
to :data:`QUANTUM` bytes from every session whose peer is writable. It skips a peer that does not read, until the peer
reads again. So this peer delays no other session, and at most one quantum and one message wait in memory for it. If too
many bytes wait for all peers together (:class:`~kvbus.transport.unsent.Unsent`), it sends one message at a time, and
skips the peers for which a byte waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from kvbus.transport.zmtp.peer import Peer
from kvbus.transport.zmtp.reasons import Reason

QUANTUM: Final = 64 * 1024
"""Number of bytes that the sender sends to one peer before it sends to the next peer."""

SLICE: Final = 0.002
"""Maximum seconds that the sender runs in one iteration of the event loop. A longer run would delay the live stream."""

STALL_TIMEOUT: Final = 30.0
"""Seconds without an acknowledgement by a peer's kernel after which the sender reports the peer's session as
stalled.
"""

CHECK_SECONDS: Final = 1.0
"""Seconds between two checks for sessions whose peer has acknowledged nothing for too long."""


class Session:
    """A sequence of messages for one peer, which the sender sends as fast as the peer reads.

    Args:
        peer: the peer.
        messages: yields the encoded messages, each in several parts, and no part while the next message is being built.
        ended: called after the last message, when the peer is writable.
        stalled: called when the peer's kernel has acknowledged nothing for the sender's ``stall_timeout``.
        limited: True for a session that may have to wait. The sender serves at most ``limit`` such sessions at a time.
    """

    def __init__(
        self,
        peer: Peer,
        messages: Iterator[Sequence[bytes]],
        *,
        ended: Callable[[], None],
        stalled: Callable[[], None],
        limited: bool = False,
    ) -> None:
        self.peer = peer
        self.messages = messages
        self.ended = ended
        self.stalled = stalled
        self.limited = limited
        self.queued = False
        """Whether the session takes part in the sender's rounds, or waits to take part because of the sender's
        ``limit``.
        """
        self.credit = 0
        """Number of bytes that the session may still send in the sender's current round.

        After a message larger than the credit it is negative, so the session sends less in later rounds.
        """
        self.interrupted = False
        """Whether the sender's time (:data:`SLICE`) was over before the session had used up its credit. In the next
        iteration of the event loop, the sender then serves this session first.
        """
        self.acknowledged = 0
        self.progress_at = 0.0


class Sender:
    """A sender that sends the messages of all its sessions in rounds, so that no session delays another one.

    Args:
        limit: maximum number of limited sessions (see :class:`Session`) that take part in the rounds. A further
            limited session waits until one of them ends, or until a peer of one of them stops reading.
        counted: called with 1 when a limited session begins to take part in the rounds, and with -1 when it stops.
        clock: returns the time in seconds, to measure the progress of peers; None for the event loop's clock.
        stall_timeout: seconds without progress after which a session is stalled.
    """

    def __init__(
        self,
        limit: int = 1,
        counted: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] | None = None,
        stall_timeout: float = STALL_TIMEOUT,
    ) -> None:
        self._limit = limit
        self._counted = counted
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._stall_timeout = stall_timeout
        self._sessions: dict[Session, None] = {}
        self._line: deque[Session] = deque()
        self._waiting: deque[Session] = deque()
        self._taking_turns = 0
        self._turn: asyncio.Handle | None = None
        self._check: asyncio.TimerHandle | None = None

    def start(self, session: Session) -> None:
        """Start to send the messages of a session."""
        self._sessions[session] = None
        session.acknowledged, session.progress_at = session.peer.acknowledged_bytes, self._clock()
        if self._check is None:
            self._schedule_check()
        self.resume(session)

    def resume(self, session: Session) -> None:
        """Continue to send a session's messages, if its peer is writable."""
        if session.queued or session not in self._sessions or not session.peer.writable:
            return
        session.queued = True
        if session.limited:
            self._waiting.append(session)
            self._admit()
        else:
            self._line.append(session)
        self._schedule()

    def stop(self, session: Session) -> None:
        """Stop a session without sending its remaining messages."""
        if self._sessions.pop(session, self) is self:
            return
        if session in self._line:
            self._line.remove(session)
            self._leave(session)
        elif session in self._waiting:
            self._waiting.remove(session)
            session.queued = False
        if not self._sessions:
            self._rest()
        self._schedule()

    def finish(self, session: Session) -> None:
        """Queue all remaining messages of a session for its peer, even if the peer does not read. Stop the session."""
        session.peer.write_parts([part for message in session.messages for part in message])
        self.stop(session)

    def _rest(self) -> None:
        for handle in (self._turn, self._check):
            if handle is not None:
                handle.cancel()
        self._turn = self._check = None

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let waiting limited sessions (see :class:`Session`) take part in the rounds, at most ``limit`` of them."""
        while self._waiting and self._taking_turns < self._limit:
            self._line.append(self._waiting.popleft())
            self._taking_turns += 1
            self._counted(1)

    def _leave(self, session: Session) -> None:
        """Remove a session from the sender's rounds.

        If the session counted towards the sender's ``limit``, let a waiting session take part instead.
        """
        session.queued = False
        if session.limited:
            self._taking_turns -= 1
            self._counted(-1)
            self._admit()

    def _schedule(self) -> None:
        if self._line and self._turn is None:
            self._turn = self._loop.call_soon(self._take_turns)

    def _take_turns(self) -> None:
        self._turn = None
        until = self._loop.time() + SLICE
        try:
            for _ in range(len(self._line)):
                if not self._line:
                    break
                self._serve(self._line.popleft(), until)
                if self._loop.time() >= until:
                    break
        finally:
            self._schedule()

    def _serve(self, session: Session, until: float) -> None:
        """Send up to :data:`QUANTUM` bytes of a session, and decide whether it takes part in the next round."""
        peer = session.peer
        if not peer.writable:
            self._leave(session)
            return
        if peer.unsent.over and peer.held_back:
            self._leave(session)
            peer.unsent.hold(partial(self.resume, session))
            return
        try:
            exhausted = self._send(session, until)
        except BaseException:
            self._leave(session)
            self.stop(session)
            peer.close(Reason.INTERNAL)
            raise
        if session not in self._sessions:
            self._leave(session)  # while _send ran, the session's generator of messages called stop() for this session
        elif exhausted and peer.writable:
            self._leave(session)
            self.stop(session)
            session.ended()
        elif not peer.writable:
            self._leave(session)
        elif session.interrupted:
            self._line.appendleft(session)
        else:
            self._line.append(session)

    def _send(self, session: Session, until: float) -> bool:
        """Send up to :data:`QUANTUM` bytes of a session's messages; return whether the session has no more messages."""
        if session.credit <= 0:
            session.credit += QUANTUM
        parts: list[bytes] = []
        exhausted = False
        while session.credit > 0 and not exhausted:
            message = next(session.messages, None)
            exhausted = message is None
            if message is not None:
                parts += message
                for part in message:
                    session.credit -= len(part)
            if self._loop.time() >= until or session.peer.unsent.over:
                break
        session.peer.write_parts(parts)
        session.interrupted = bool(parts) and session.credit > 0
        return exhausted

    # -- progress ------------------------------------------------------------------------------------------------------

    def _schedule_check(self) -> None:
        self._check = self._loop.call_later(min(CHECK_SECONDS, self._stall_timeout / 4), self._look_for_stalled)

    def _look_for_stalled(self) -> None:
        self._schedule_check()
        now = self._clock()
        for session in list(self._sessions):
            acknowledged = session.peer.acknowledged_bytes
            if session.queued or acknowledged != session.acknowledged:
                session.acknowledged, session.progress_at = acknowledged, now
            elif now - session.progress_at > self._stall_timeout and session in self._sessions:
                session.stalled()
