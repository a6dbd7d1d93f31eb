"""An output stream's XPUB: a stalled router loses its own batches and nobody else's.

``XPUB_NODROP`` refuses a batch as long as one subscriber is full, the lossy mode never says that it dropped. So each
batch is offered without loss first, and only on refusal sent the lossy way, which is counted: the healthy subscribers
get it either way, the stalled one sees a gap in a dense seq and asks for a replay.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

from kvbus.core.stats import OutputStats
from kvbus.core.types import Refused
from kvbus.errors import BindError
from kvbus.transport.monitor import ConnectionMonitor
from kvbus.transport.pump import Pump
from kvbus.transport.sockets import PLAIN, Context, PeerPolicy, attach, attach_again, make_socket

BURST: Final = 512
"""Batches handed over in one go before the loop's other work gets its turn."""

REOPEN: Final = 0.01
"""Seconds until an address that is not free yet is tried again."""

LOOK: Final = 0.1
"""Seconds after a send until subscriptions are looked for whose signal it may have eaten. They are only counted here;
looking after every send would hold up the thread that has to send it."""

Message = tuple[bytes, bytes, bytes, int]
"""Topic, seq frame, payload, number of events."""


class LiveOutput:
    """Publish numbered batches on one endpoint, bound, or dialled out to a router that binds its SUB.

    ``before_send`` is called before any batch leaves (the state it follows from is written first). ``policy`` says who
    may connect.

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
        waiting: list[LiveOutput] | None = None,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._waiting = waiting
        self._announced = False
        self._bind = bind
        self._send_hwm = send_hwm
        self._stats = stats
        self._queue: deque[Message] = deque()
        self._queue_limit = queue_limit
        self._before_send = before_send
        self._soon: asyncio.Handle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._subscribers = 0
        self._again: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._open(policy)
        stats.queue_limit += queue_limit

    def _open(self, policy: PeerPolicy) -> None:
        # IMMEDIATE: a router dialled out to that goes away is forgotten, its subscription and its queue with it, as
        # it would be if it had connected; else each time it came back it would count as one more
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
        """Cut every router off and listen anew with other keys; those that may, come back by themselves.

        Batches wait in the queue meanwhile. What was on its way to a router is a gap to it, for the replay to fill.
        """
        self._shut()
        try:
            self._open(policy)
        except BindError:  # libzmq gives an address back a moment after its socket was closed
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
        """Send one batch, or queue it behind those that wait; over the limit it is dropped and counted."""
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
            self._waiting.append(self)
        elif self._soon is None:
            self._soon = self._loop.call_soon(self.turn)

    def turn(self) -> None:
        """Send what waits, a burst of it."""
        self._announced = False
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._pump.closed:
            return  # being reopened: that sends what waits
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
            # the socket took the first frame for everyone: the rest of the message cannot be refused
            socket.send(seq, zmq.SNDMORE)
            socket.send(payload)
        stats.batches += 1
        stats.events += events
        stats.bytes += len(payload)

    def _drop(self, reason: str, events: int) -> None:
        self._stats.dropped_batches[reason] += 1
        self._stats.dropped_events[reason] += events

    def _offer(self, topic: bytes) -> bool:
        """Send the first frame to everyone, or to nobody: False if one of them is full.

        What routers took in the last millisecond is known only when libzmq looks; reading EVENTS makes it look.
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
        if frames[0][:1] == b"\x01":
            self._subscribers += 1
            self._stats.subscribers += 1
        elif frames[0][:1] == b"\x00" and self._subscribers:
            self._subscribers -= 1
            self._stats.subscribers -= 1

    def flush(self) -> None:
        """Hand over everything that waits."""
        if self._before_send is not None:
            self._before_send()
        while self._queue:
            self._send(*self._queue.popleft())

    def close(self, linger: float = 0.0) -> None:
        """Close; libzmq goes on sending for up to ``linger`` seconds."""
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
