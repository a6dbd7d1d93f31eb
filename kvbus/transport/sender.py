"""The fair sender: everything that a peer gets at its own pace is a generator, and the generators take turns.

A session is a peer and a generator of encoded messages. In each round the sender pulls up to :data:`QUANTUM` bytes from
every session whose peer can be written to. A peer that does not read takes no part until it reads again, so it delays
nobody, and no more than one quantum and one message waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from kvbus.transport.zmtp.peer import Peer
from kvbus.transport.zmtp.reasons import Reason

QUANTUM: Final = 64 * 1024
"""Bytes that a session gets before the next session has its turn."""

SLICE: Final = 0.002
"""Seconds of one iteration of the event loop that the sender takes. The live stream has to go on beside it."""

STALL_TIMEOUT: Final = 30.0
"""Seconds in which the kernel of a peer acknowledges nothing, until the sender gives the session up."""

LOOK: Final = 1.0
"""Seconds between two looks for such sessions."""


class Session:
    """What one peer gets at its own pace.

    Args:
        peer: the peer.
        messages: encoded messages; an empty one means that the next message is still being made.
        ended: called when the generator is exhausted, and the kernel has taken what the session wrote.
        stalled: called when the peer has acknowledged nothing for :data:`STALL_TIMEOUT`.
        limited: the session counts for the sender's limit.
    """

    def __init__(
        self,
        peer: Peer,
        messages: Iterator[bytes],
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
        """The session is in the sender's line, or waits to join it."""
        self.credit = 0
        """Bytes that the session may still send in this turn. A large message takes from later turns."""
        self.interrupted = False
        """The time of the sender was over before the credit of the session was: it goes on first."""
        self.acknowledged = 0
        self.progress_at = 0.0


class Sender:
    """Sends the messages of all sessions, in turns.

    Args:
        limit: limited sessions that take turns at once; further ones wait until one of these ends, or does not read.
        counted: called with 1 where a limited session begins to take turns, and with -1 where it ends to.
        clock: seconds that measure the progress of peers; None: those of the event loop.
        stall_timeout: seconds without progress after which a session is given up.
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
        """Begin with a session."""
        self._sessions[session] = None
        session.acknowledged, session.progress_at = session.peer.acknowledged_bytes, self._clock()
        if self._check is None:
            self._schedule_check()
        self.resume(session)

    def resume(self, session: Session) -> None:
        """Go on with a session whose peer can be written to."""
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
        """Send nothing more of a session."""
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
        """Write the rest of a session at once, whether its peer reads or not."""
        rest = b"".join(session.messages)
        if rest:
            session.peer.write(rest)
        self.stop(session)

    def _rest(self) -> None:
        for handle in (self._turn, self._check):
            if handle is not None:
                handle.cancel()
        self._turn = self._check = None

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let waiting sessions take turns, within the limit."""
        while self._waiting and self._taking_turns < self._limit:
            self._line.append(self._waiting.popleft())
            self._taking_turns += 1
            self._counted(1)

    def _leave(self, session: Session) -> None:
        """Take note that a session takes no more turns for now."""
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
        """Give a session its turn."""
        peer = session.peer
        if not peer.writable:
            self._leave(session)
            return
        try:
            exhausted = self._send(session, until)
        except BaseException:
            self._leave(session)
            self.stop(session)
            peer.close(Reason.INTERNAL)
            raise
        if session not in self._sessions:
            self._leave(session)  # a message of its own has stopped it
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
        """Send up to a quantum; return whether the session has no more messages."""
        if session.credit <= 0:
            session.credit += QUANTUM
        messages: list[bytes] = []
        exhausted = False
        while session.credit > 0 and not exhausted:
            message = next(session.messages, None)
            exhausted = message is None
            if message is not None:
                messages.append(message)
                session.credit -= len(message)
            if self._loop.time() >= until:
                break
        data = b"".join(messages)
        if data:
            session.peer.write(data)
        session.interrupted = bool(data) and session.credit > 0
        return exhausted

    # -- progress ------------------------------------------------------------------------------------------------------

    def _schedule_check(self) -> None:
        self._check = self._loop.call_later(min(LOOK, self._stall_timeout / 4), self._look_for_stalled)

    def _look_for_stalled(self) -> None:
        self._schedule_check()
        now = self._clock()
        for session in list(self._sessions):
            acknowledged = session.peer.acknowledged_bytes
            if session.queued or acknowledged != session.acknowledged:
                session.acknowledged, session.progress_at = acknowledged, now
            elif now - session.progress_at > self._stall_timeout and session in self._sessions:
                session.stalled()
