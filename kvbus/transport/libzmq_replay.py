"""The replay server on libzmq's ROUTER: for outputs with CURVE keys, which kvbus's own ZMTP does not know.

A ROUTER at its high-water mark drops silently, and a lost END hangs a Dynamo listener for ever. With MANDATORY the
ROUTER refuses the message instead. The server then sends it again later and goes on with other requesters. It drops
the answer of a requester that is gone, or that has read nothing for ``stall_timeout``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Final

import msgspec
import zmq

from kvbus.core.stats import OutputStats
from kvbus.core.types import Refused
from kvbus.errors import BindError
from kvbus.transport.answer_reader import AnswerReader
from kvbus.transport.monitor import ConnectionMonitor
from kvbus.transport.pump import Handler, Pump
from kvbus.transport.replay_budget import Budget
from kvbus.transport.sockets import PLAIN, Context, PeerPolicy, attach, make_socket

BURST: Final = 64
"""Messages one requester gets before the next one gets its turn."""

SLICE: Final = 0.001
"""Seconds one turn may take. A state snapshot of a million blocks takes long, and the live stream must go on."""

RETRY: Final = 0.005
"""Seconds before another attempt, when the queues of all requesters are full."""

REOPEN: Final = 0.01
"""Seconds between two attempts to bind an address that is not free yet."""

MAX_WAITING: Final = 10_000
"""Requests that may wait for their turn. The server refuses and counts further ones."""


class Session(msgspec.Struct):
    """One answer being sent. ``message`` is the refused message, which the server sends again."""

    answer: AnswerReader
    progress: float
    message: list[bytes] | None = None


class LibzmqReplayServer:
    """Receive replay requests on one endpoint, and send the relay's answers.

    Args:
        context: the process's ZeroMQ context.
        endpoint: the endpoint to bind.
        on_request: called with each request's frames, identity first. Pass the answer to :meth:`send`.
        stats: counters of the output.
        budget: limit of answers at once, shared by the servers of an output; further requests wait.
        stall_timeout: seconds without progress before the server drops an answer.
        before_send: called before any of an answer leaves, because the log record it follows from is written first.
        policy: who may ask, and the largest frame to accept.
        clock: measures progress: seconds, monotonic; None for the loop's clock.

    Raises:
        BindError: the endpoint cannot be bound.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        on_request: Handler,
        stats: OutputStats,
        budget: Budget | None = None,
        stall_timeout: float = 30.0,
        before_send: Callable[[], None] | None = None,
        policy: PeerPolicy = PLAIN,
        clock: Callable[[], float] | None = None,
    ) -> None:
        # The socket and its callbacks.
        self._context = context
        self._endpoint = endpoint
        self._on_request = on_request
        self._stats = stats
        self._again: asyncio.TimerHandle | None = None
        self._open(policy)
        self._stall_timeout = stall_timeout
        self._before_send = before_send

        # Answers: those under way, those that wait for the budget, those behind an earlier one of their requester.
        self._budget = budget or Budget(64, stats)
        self._waiting_limit = MAX_WAITING
        stats.replay_waiting_limit += MAX_WAITING
        self._counted = 0
        self._active: deque[Session] = deque()
        self._waiting: deque[Session] = deque()
        self._behind: dict[bytes, deque[Session]] = {}
        """Further requests, in order, by the identity of a requester whose answer is under way or waits."""
        self._queued = 0

        # The next turn.
        self._handle: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time

    def _open(self, policy: PeerPolicy) -> None:
        socket = make_socket(self._context, zmq.ROUTER)
        monitor = ConnectionMonitor(socket, lambda _: None, refused=self._refused)
        try:
            policy.put_on(socket, bind=True)
            attach(socket, self._endpoint, bind=True)
        except BaseException:
            monitor.close()
            socket.close()
            raise
        self._socket, self._monitor = socket, monitor
        self._pump = Pump(socket, self._on_request)

    def _refused(self, reason: Refused) -> None:
        self._stats.refused[reason] += 1

    def reopen(self, policy: PeerPolicy) -> None:
        """Disconnect every requester, drop their answers, and bind again with other keys."""
        self._drop_all("gone")
        self._shut()
        try:
            self._open(policy)
        except BindError:  # libzmq releases an address a moment after its socket was closed
            self._again = self._loop.call_later(REOPEN, self.reopen, policy)

    @property
    def busy(self) -> int:
        """Unfinished answers, waiting requests included."""
        return len(self._active) + self._queued

    def end(self) -> int:
        """Send END for every answer that is not sent whole, and count them; how many they were."""
        count = self.busy
        if count and not self._pump.closed:
            for session in chain(self._active, self._waiting, *self._behind.values()):
                with contextlib.suppress(zmq.ZMQError):  # full or gone: there is nobody to tell
                    self._socket.send_multipart(session.answer.refusal(), zmq.NOBLOCK)
        self._drop_all("cut_off")
        return count

    def _drop_all(self, outcome: str) -> None:
        """Drop all answers and waiting requests, and count them."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._stats.replay_requests[outcome] += self.busy
        self._budget.leave(self._free)
        self._budget.release(self._counted)
        self._counted = 0
        self._wait(-self._queued)
        for queue in (self._active, self._waiting, self._behind):
            queue.clear()

    def _shut(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if not self._pump.closed:
            self._monitor.close()
            self._pump.close()

    def send(self, answer: AnswerReader) -> None:
        """Begin an answer, or let it wait for its turn: that of others, or of an earlier request of the same peer."""
        if self._queued >= self._waiting_limit:
            self._stats.replay_requests["refused"] += 1
            with contextlib.suppress(zmq.ZMQError):  # the requester is full or gone
                self._socket.send_multipart(answer.refusal(), zmq.NOBLOCK)
            self._pump.kick()
            return
        session = Session(answer, self._clock())
        behind = self._behind.get(answer.identity)
        if behind is not None:
            behind.append(session)
            self._wait(1)
            return
        self._behind[answer.identity] = deque()
        self._waiting.append(session)
        self._wait(1)
        self._admit()
        if self._handle is None:
            self._handle = self._loop.call_soon(self._turn)

    def _wait(self, count: int) -> None:
        self._queued += count
        self._stats.replay_waiting += count

    def _admit(self) -> None:
        """Release the budget of finished answers, and begin as many as it has room for."""
        self._budget.release(self._counted - len(self._active))
        self._counted = len(self._active)
        while self._waiting and self._budget.take(self._free):
            self._counted += 1
            session = self._waiting.popleft()
            session.progress = self._clock()
            self._active.append(session)
            self._wait(-1)

    def _free(self) -> None:
        """Begin waiting answers, after another server of this output has finished one."""
        if self._handle is None:
            self._handle = self._loop.call_soon(self._turn)

    def _over(self, session: Session, outcome: str) -> None:
        """Count the outcome of an answer; the requester's next request waits behind those of others."""
        outcomes = self._stats.replay_requests
        outcomes[outcome] += 1
        identity = session.answer.identity
        behind = self._behind[identity]
        if behind and outcome == session.answer.outcome:
            self._waiting.append(behind.popleft())
            return
        del self._behind[identity]
        outcomes[outcome] += len(behind)  # a requester that is gone or stalled gets none of these either
        self._wait(-len(behind))

    def _turn(self) -> None:
        self._handle = None
        moved = False
        until = self._loop.time() + SLICE
        try:
            for _ in range(len(self._active)):
                session = self._active.popleft()
                try:
                    sent = self._advance(session, until)
                except BaseException:
                    self._over(session, "refused")  # the other answers go on
                    raise
                if sent is None:
                    moved = True
                    continue
                moved |= sent > 0
                self._active.append(session)
                if self._loop.time() >= until:
                    break
        finally:
            self._admit()
            if self._active:
                if self._handle is not None:
                    self._handle.cancel()
                self._handle = self._loop.call_soon(self._turn) if moved else self._loop.call_later(RETRY, self._turn)
            self._pump.kick()
            os.sched_yield()  # libzmq's I/O thread may share the core: it sends and receives now

    def _advance(self, session: Session, until: float) -> int | None:
        """Send a burst; return the number of messages sent, None if the answer is over."""
        for sent in range(BURST):
            message = session.message or session.answer.next_message()
            if not message:  # the relay is still making it
                if self._loop.time() >= until:
                    break
                continue
            if self._before_send is not None:
                self._before_send()  # making an answer may change the state
            try:
                self._socket.send_multipart(message, zmq.NOBLOCK)
            except zmq.Again:
                session.message = message
                now = self._clock()
                if sent:
                    session.progress = now
                elif now - session.progress > self._stall_timeout:
                    self._over(session, "stalled")
                    return None
                return sent
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._over(session, "gone")
                return None
            session.message = None
            self._stats.replay_batches += 1
            if session.answer.done:
                self._over(session, session.answer.outcome)
                return None
            if self._loop.time() >= until:
                break
        session.progress = self._clock()
        return sent + 1

    def close(self, linger: float = 0.0) -> None:
        """Close the socket and drop unfinished answers. libzmq goes on sending for up to ``linger`` seconds."""
        self._drop_all("cut_off")
        if not self._pump.closed:
            self._socket.setsockopt(zmq.LINGER, int(linger * 1000))
        self._shut()
        self._stats.replay_waiting_limit -= self._waiting_limit
        self._waiting_limit = 0
