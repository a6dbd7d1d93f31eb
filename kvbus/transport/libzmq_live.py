"""The live side of outputs with CURVE keys, an XPUB of libzmq: a stalled router loses batches, other routers do not.

With ``XPUB_NODROP`` the socket refuses a batch while one subscriber's queue is full. Without it, the socket drops and
never says so. So kvbus sends each batch with ``XPUB_NODROP`` first. If the socket refuses, kvbus counts a drop and
sends the batch without it: healthy subscribers get every batch, the stalled one sees a gap and asks for a replay.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

from kvbus.core.stats import OutputStats
from kvbus.core.types import Refused
from kvbus.core.wire.frames import ASKS_REPLAY
from kvbus.errors import BindError
from kvbus.transport.monitor import ConnectionMonitor
from kvbus.transport.pump import Pump
from kvbus.transport.sockets import PLAIN, Context, PeerPolicy, attach, attach_again, make_socket

BURST: Final = 512
"""Batches sent in one go before the loop's other work gets its turn."""

REOPEN: Final = 0.01
"""Seconds between two attempts to bind an address that is not free yet."""

LOOK: Final = 0.1
"""Seconds from a send to a look for new subscriptions: the send may have consumed their signal. kvbus only counts
subscriptions, so this can wait; a look after every send would slow down libzmq's I/O thread."""

Message = tuple[bytes, bytes, bytes, int]
"""Topic, seq frame, payload, number of events."""


class LiveOutput:
    """Publish numbered batches on one endpoint.

    Args:
        context: the process's ZeroMQ context.
        endpoint: where to publish.
        bind: True binds it; False connects to a router that binds its SUB.
        send_hwm: batches that libzmq queues for each subscriber.
        queue_limit: batches that wait here; `publish` drops and counts those beyond it.
        stats: counters of the output.
        before_send: called before any batch leaves, because the log record it follows from is written first.
        policy: who may connect.
        waiting: `publish` appends `turn` to this list, and the list's owner calls it. None: the stream schedules it
            itself.

    Raises:
        BindError: the endpoint cannot be bound.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        bind: bool,
        send_hwm: int,
        queue_limit: int,
        stats: OutputStats,
        before_send: Callable[[], None] | None = None,
        policy: PeerPolicy = PLAIN,
        waiting: list[Callable[[], None]] | None = None,
    ) -> None:
        # The socket's settings, for `reopen`.
        self._context = context
        self._endpoint = endpoint
        self._bind = bind
        self._send_hwm = send_hwm
        self._before_send = before_send

        # Counters of the output, and this stream's share of them.
        self._stats = stats
        self._subscribers = 0

        # Batches that wait for their turn.
        self._queue: deque[Message] = deque()
        self._queue_limit = queue_limit
        self._waiting = waiting
        self._announced = False

        # Scheduled calls: the next turn, the next look for subscriptions, the next attempt to open.
        self._loop = asyncio.get_running_loop()
        self._soon: asyncio.Handle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._again: asyncio.TimerHandle | None = None
        self._open(policy)
        stats.queue_limit += queue_limit

    def _open(self, policy: PeerPolicy) -> None:
        # IMMEDIATE, where we connect: libzmq then forgets the subscription and the queue of a router that goes away,
        # as it does where we bind. Else each reconnection would count as one more subscriber.
        bind = self._bind
        socket = make_socket(self._context, zmq.XPUB, SNDHWM=self._send_hwm, IMMEDIATE=int(not bind))
        monitor = ConnectionMonitor(
            socket, lambda _: None, refused=self._refused, abandoned=None if bind else self._revive
        )
        try:
            policy.put_on(socket, bind=bind)
            attach(socket, self._endpoint, bind=bind)
        except BaseException:
            monitor.close()
            socket.close()
            raise
        self._socket, self._monitor = socket, monitor
        self._pump = Pump(socket, self._subscription)

    def _refused(self, reason: Refused) -> None:
        self._stats.refused[reason] += 1

    def _revive(self, _stood: bool) -> None:
        attach_again(self._socket, self._endpoint)
        self._pump.kick()

    def reopen(self, policy: PeerPolicy) -> None:
        """Disconnect every router and open the socket again with other keys. Allowed routers reconnect by themselves.

        Batches wait in the queue meanwhile. A router sees batches lost on the way as a gap, and asks for a replay.
        """
        self._shut()
        try:
            self._open(policy)
        except BindError:  # libzmq releases an address a moment after its socket was closed
            self._again = self._loop.call_later(REOPEN, self.reopen, policy)
        else:
            self._soon = self._soon or self._loop.call_soon(self.turn)

    def _shut(self) -> None:
        for timer in (self._again, self._look):
            if timer is not None:
                timer.cancel()
        self._again = self._look = None
        if not self._pump.closed:
            self._stats.subscribers -= self._subscribers
            self._subscribers = 0
            self._monitor.close()
            self._pump.close()

    def publish(self, topic: bytes, seq: bytes, payload: bytes, events: int) -> None:
        """Queue one batch for sending; drop and count it if the queue is full."""
        queue = self._queue
        if len(queue) >= self._queue_limit:
            self._drop("queue_full", events)
            return
        queue.append((topic, seq, payload, events))
        self._stats.queue_depth += 1
        if self._announced:
            return
        self._announced = True
        if self._waiting is not None:
            self._waiting.append(self.turn)
        elif self._soon is None:
            self._soon = self._loop.call_soon(self.turn)

    def turn(self) -> None:
        """Send up to `BURST` queued batches."""
        self._announced = False
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._pump.closed:
            return  # `reopen` is under way and sends the queue later
        if self._before_send is not None:
            self._before_send()
        queue = self._queue
        for _ in range(min(len(queue), BURST)):
            topic, seq, payload, events = queue.popleft()
            self._send(topic, seq, payload, events)
        if queue:
            self._announced = True
            self._soon = self._loop.call_soon(self.turn)
        if self._look is None:
            self._look = self._loop.call_later(LOOK, self._look_for_subscriptions)

    def _look_for_subscriptions(self) -> None:
        self._look = None
        self._pump.sent()

    def _send(self, topic: bytes, seq: bytes, payload: bytes, events: int) -> None:
        socket, stats = self._socket, self._stats
        stats.queue_depth -= 1
        if not self._offer(topic):
            self._drop("slow_router", events)
            socket.setsockopt(zmq.XPUB_NODROP, 0)
            socket.send(topic, zmq.SNDMORE)
            socket.send(seq, zmq.SNDMORE)
            socket.send(payload)
            socket.setsockopt(zmq.XPUB_NODROP, 1)
        else:
            # the socket has accepted the first frame for everyone, so it cannot refuse the rest of the message
            socket.send(seq, zmq.SNDMORE)
            socket.send(payload)
        stats.batches += 1
        stats.events += events
        stats.bytes += len(payload)

    def _drop(self, reason: str, events: int) -> None:
        self._stats.dropped_batches[reason] += 1
        self._stats.dropped_events[reason] += events

    def _offer(self, topic: bytes) -> bool:
        """Send the first frame to everyone; if one subscriber's queue is full, send it to nobody and return False.

        libzmq learns what routers have just read only when it processes its commands; reading EVENTS makes it do so.
        """
        for again in (False, True):
            if again:
                self._socket.getsockopt(zmq.EVENTS)
            try:
                self._socket.send(topic, zmq.SNDMORE | zmq.NOBLOCK)
            except zmq.Again:
                continue
            return True
        return False

    def _subscription(self, frames: list[bytes]) -> None:
        if frames[0][1:] == ASKS_REPLAY:
            return
        if frames[0][:1] == b"\x01":
            self._subscribers += 1
            self._stats.subscribers += 1
        elif frames[0][:1] == b"\x00" and self._subscribers:
            self._subscribers -= 1
            self._stats.subscribers -= 1

    def flush(self) -> None:
        """Send every queued batch."""
        if self._before_send is not None:
            self._before_send()
        while self._queue:
            self._send(*self._queue.popleft())

    def close(self, linger: float = 0.0) -> None:
        """Close the socket. libzmq goes on sending for up to ``linger`` seconds."""
        if self._soon is not None:
            self._soon.cancel()
        if not self._pump.closed:
            self.flush()
            self._socket.setsockopt(zmq.LINGER, int(linger * 1000))
        while self._queue:  # it was being reopened: there is no socket to send them
            self._stats.queue_depth -= 1
            self._drop("closed", self._queue.popleft()[3])
        self._shut()
        self._stats.queue_limit -= self._queue_limit
        self._queue_limit = 0
