"""One stream's live side: it publishes batches to every router, and sends the state to those that need it.

A router that keeps up gets each burst in one write. A router that does not is behind: it has a position in the ring of
recent batches, and goes on from there as fast as it reads. When the ring passes its position, batches for it are
dropped and counted. On a stream that sends the state it then gets the state again, else it finds a gap.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from kvbus.core.commands import SendState
from kvbus.core.stats import OutputStats, RouterView
from kvbus.core.wire.frames import ASKS_REPLAY
from kvbus.transport.live.behind import Behind
from kvbus.transport.live.endpoint import Endpoint, Shared
from kvbus.transport.live.losses import Losses
from kvbus.transport.live.ring import Entry, Ring
from kvbus.transport.live.router import Router, RouterState, say
from kvbus.transport.live.transfers import Transfers
from kvbus.transport.live.undecided import Undecided
from kvbus.transport.live.views import Views
from kvbus.transport.zmtp.frames import MORE, head
from kvbus.transport.zmtp.peer import Peer


class LivePublisher:
    """One stream of an output; a :class:`~kvbus.transport.zmtp.peer.PeerHandler`.

    Args:
        stream: the stream's slot, for views.
        topic: the stream's topic. It may change with a batch.
        output: the output's name, for logs.
        open_endpoint: binds or dials, with this object as the handler.
        stats: counters of the output.
        queue_limit: batches that wait for the end of a burst; more are dropped for everybody.
        max_batches: batches kept for routers that are behind.
        max_bytes: bytes kept for them.
        request_state: asks for the stream's state for routers; None on streams that send none.
        waiting: :meth:`publish` appends :meth:`flush` to this list, and the list's owner calls it. None: the stream
            schedules it itself.
        name_of: the name of a key's owner, for people.
        left: keeps the views of routers that have left; None: a list of the stream's own.
        shared: what this stream has together with the others of its endpoint; None where it is the only one.

    Raises:
        BindError: the endpoint cannot be bound.
    """

    def __init__(
        self,
        stream: int,
        topic: bytes,
        output: str,
        open_endpoint: Callable[[LivePublisher], Endpoint],
        *,
        stats: OutputStats,
        queue_limit: int,
        max_batches: int,
        max_bytes: int,
        request_state: Callable[[tuple[int, ...]], None] | None = None,
        waiting: list[Callable[[], None]] | None = None,
        name_of: Callable[[bytes], str] = lambda _: "",
        left: deque[RouterView] | None = None,
        shared: Shared | None = None,
    ) -> None:
        self._output = output
        self._name_of = name_of
        self._stats = stats
        self._sends_state = request_state is not None
        self._request_state = request_state
        self._shared = shared
        self._loop = asyncio.get_running_loop()

        # Batches of this burst, and those before it that somebody still needs.
        self._topic = topic
        self._topic_frame = head(len(topic), MORE) + topic
        self._burst: list[Entry] = []
        self._burst_events = self._burst_bytes = 0
        self._burst_at = 0.0
        self._queue_limit = queue_limit
        self._overflowed = False
        """Batches behind this burst were dropped."""
        self.ring = Ring(max_batches, max_bytes, None if shared is None else shared.share)
        self._waiting = waiting
        self._soon: asyncio.Handle | None = None

        # Routers by the id of their peer: all of them, those that have everything, those that do not read.
        self._routers: dict[int, Router] = {}
        self._current: dict[int, Router] = {}
        self._stalled: dict[int, Router] = {}
        self._undecided = Undecided()
        self._transfers = Transfers(self.request, self.restart) if shared is None else shared.transfers
        self._behind = Behind(self.ring, self._current, self._transfers.forget)
        self._losses = Losses(
            output, stats, self.ring, self._behind.routers, self.restart if self._sends_state else None
        )
        self.views = Views(stream, self._routers, self._behind.routers, self.ring, left)
        """What people ask of the routers."""
        self._closed = False
        self._endpoint = open_endpoint(self)
        stats.queue_limit += queue_limit

    # -- batches -----------------------------------------------------------------------------------------------------

    def publish(self, topic: bytes, seq: bytes, payload: bytes, events: int) -> None:
        """Queue one batch for the end of this burst; drop and count it if the queue is full."""
        if topic != self._topic:
            self._change_topic(topic)
        burst = self._burst
        # an empty batch is never dropped: those that stand for a router's state would cost all others theirs
        if events and len(burst) >= self._queue_limit:
            self._losses.queue_full(events)
            self._overflowed = self._sends_state
            return
        if not burst:
            self._begin_burst()
        message = b"".join((self._topic_frame, head(len(seq), MORE), seq, head(len(payload)), payload))
        burst.append(Entry(message, events, self._burst_at))
        self._burst_events += events
        self._burst_bytes += len(payload)
        self._stats.queue_depth += 1

    def _begin_burst(self) -> None:
        self._burst_at = self._loop.time()
        if self._waiting is not None:
            self._waiting.append(self.flush)
        elif self._soon is None:
            self._soon = self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send the batches of this burst."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        burst = self._burst
        if not burst:
            return
        self._burst = []
        count, events, stats = len(burst), self._burst_events, self._stats
        stats.queue_depth -= count
        stats.batches += count
        stats.events += events
        stats.bytes += self._burst_bytes
        self._burst_events = self._burst_bytes = 0
        for router in self._stalled.values():
            self._losses.slow_router(router, count, events)
        if self._current:
            self._send(burst)
        if self._behind.routers or self._undecided:
            self._keep(burst)
        else:
            self.ring.skip(count)
        if self._overflowed:
            self._overflowed = False
            for router in [*self._current.values(), *self._behind.routers.values()]:
                if not router.asks:
                    self.restart(router)

    def _send(self, burst: list[Entry]) -> None:
        """Write to the routers that have everything so far."""
        data = burst[0].message if len(burst) == 1 else b"".join([entry.message for entry in burst])
        before = self.ring.end
        lagging = []
        for router in self._current.values():
            peer = router.peer
            if not peer.writable:  # another stream has filled it
                lagging.append((router, before))
                continue
            peer.write(data)
            if not peer.writable:
                lagging.append((router, before + len(burst)))
        for router, position in lagging:
            self._behind.add(router, position)

    def _keep(self, burst: list[Entry]) -> None:
        """Keep the burst for routers that may get it later."""
        self._undecided.keep(burst)
        ring = self.ring
        if not self._behind.routers:
            ring.skip(len(burst))
            return
        for entry in burst:
            ring.append(entry)
        self._losses.make_room()
        if self._shared is not None:
            self._shared.share.make_room()
        for router in self._behind.routers.values():
            self._behind.go_on(router)

    # -- routers -----------------------------------------------------------------------------------------------------

    def opened(self, peer: Peer) -> None:
        """Take in a new peer."""
        self._routers[peer.id] = Router(peer, self.views.stream, self._name_of(peer.key))
        if self._shared is None:
            self._stats.routers += 1

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Begin with a router whose first subscription matches the stream's topic."""
        router = self._routers[peer.id]
        if topic == ASKS_REPLAY:
            router.asks = True
            if router.state in {RouterState.WAITING, RouterState.STALLED}:
                self.flush()
                missed = self._undecided.end(peer.id)
                self._go_live(router)
                if missed:
                    peer.write(b"".join([entry.message for entry in missed]))
            return
        router.subscriptions += 1
        if self._shared is None:
            self._stats.subscribers += 1
        if router.state is RouterState.IDLE and self._topic.startswith(topic):
            self._begin(router)

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Stop with a router that has no matching subscription any more."""
        router = self._routers[peer.id]
        if topic == ASKS_REPLAY:
            router.asks = False
            return
        router.subscriptions -= 1
        if self._shared is None:
            self._stats.subscribers -= 1
        if router.state is not RouterState.IDLE and not router.matches(self._topic):
            self._set_aside(router, RouterState.IDLE)

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        """Ignore what the application behind an XSUB says."""

    def drained(self, peer: Peer) -> None:
        """Go on with a router that has read."""
        router = self._routers[peer.id]
        if router.state is RouterState.STALLED:
            self._want_state(router)
        elif router.peer.id in self._behind.routers:
            self._behind.go_on(router)

    def closed(self, peer: Peer, reason: str) -> None:
        """Forget a router."""
        router = self._routers.pop(peer.id)
        if self._shared is None:
            self.views.leave(router, reason)
        self._set_aside(router, RouterState.IDLE)
        if self._shared is not None:
            return
        stats = self._stats
        stats.router_disconnects[reason] += 1
        if not self._closed:
            stats.routers -= 1
            stats.subscribers -= router.subscriptions
        say(logging.INFO, "output %s: router %s left: %s", self._output, router, reason)

    def _begin(self, router: Router) -> None:
        self.flush()
        if self._shared is None:
            say(logging.INFO, "output %s: router %s subscribed", self._output, router)
        if self._sends_state and not router.asks:
            router.reason = "subscribed"
            router.has_asked = False
            self._want_state(router)
            if self._shared is None:
                self._undecided.begin(router.peer.id)
        else:
            self._go_live(router)

    def _go_live(self, router: Router) -> None:
        """A router gets what is published from now on."""
        self.flush()
        self._set_aside(router, RouterState.LIVE)
        self._behind.add(router, self.ring.end)
        self._behind.go_on(router)

    def _want_state(self, router: Router) -> None:
        self._set_aside(router, RouterState.WAITING)
        self._transfers.want(router)

    def restart(self, router: Router) -> None:
        """A router has lost batches, or its place in the state: it gets none of those that wait for it."""
        rest = self.ring.end - router.position if router.peer.id in self._behind.routers else 0
        if rest:
            self._losses.slow_router(router, rest, self.ring.events_from(router.position))
        if router.lost_at is None:
            router.lost_at = self._loop.time()
        router.reason = "lost"
        router.has_asked = False
        if router.peer.writable:
            self._want_state(router)
        else:
            self._set_aside(router, RouterState.STALLED)
            self._stalled[router.peer.id] = router

    def _set_aside(self, router: Router, state: RouterState) -> None:
        """Take a router out of everything."""
        name = router.peer.id
        for routers in (self._current, self._behind.routers, self._stalled):
            routers.pop(name, None)
        self._undecided.end(name)
        self._transfers.forget(router)
        router.reader = None
        router.state = state
        if state in {RouterState.IDLE, RouterState.LIVE}:
            router.lost_at = None

    def _change_topic(self, topic: bytes) -> None:
        """The stream's topic follows its source's: other subscriptions match from now on."""
        self.flush()
        self._topic = topic
        self._topic_frame = head(len(topic), MORE) + topic
        for router in self._routers.values():
            matches = router.matches(topic)
            if matches and router.state is RouterState.IDLE:
                self._begin(router)
            elif not matches and router.state is not RouterState.IDLE:
                self._set_aside(router, RouterState.IDLE)

    # -- the state -------------------------------------------------------------------------------------

    def request(self, routers: list[Router]) -> None:
        """Ask for the state, for these routers."""
        if self._request_state is not None:
            self._request_state(tuple(router.peer.id for router in routers))

    def send_state(self, command: SendState) -> None:
        """Send the state to routers that wait for it, and behind it what is published from now on."""
        self.flush()
        begun = []
        for name in command.routers:
            router = self._routers.get(name)
            if router is None or router.state is not RouterState.WAITING:
                continue
            router.state = RouterState.RECEIVING
            self._undecided.end(name)
            router.reader = command.transfer.reader()
            self._behind.add(router, self.ring.end)
            self._stats.states_sent[router.reason] += 1
            router.states_sent += 1
            router.state_sent_at = self._loop.time()
            begun.append(router)
            self._behind.go_on(router)
        self._transfers.begin(begun)

    def retire(self) -> None:
        """Send the state, which is empty, to every router that lacks something: the stream is about to end for good."""
        self.flush()
        lacking = [router for router in self._routers.values() if router.state is not RouterState.IDLE]
        lacking = [router for router in lacking if router.peer.id not in self._current]
        for router in lacking:
            self._set_aside(router, RouterState.WAITING)
        if lacking:
            self.request(lacking)
        for router in lacking:
            while router.reader is not None and not router.reader.done:
                self._behind.send_piece(router, router.reader)

    @property
    def peers(self) -> list[Peer]:
        """The routers' connections."""
        return [router.peer for router in self._routers.values()]

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, linger: float = 0.0) -> None:
        """Send what is queued and end all connections; what waits has ``linger`` seconds to leave."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        stats = self._stats
        stats.queue_limit -= self._queue_limit
        self._behind.close()
        if self._shared is not None:
            for router in self._routers.values():
                self._set_aside(router, RouterState.IDLE)
            self._routers.clear()
            self.ring.trim(self.ring.end)
            self._endpoint.close(linger)
            return
        self._transfers.close()
        self._endpoint.close(linger)
        stats.subscribers -= sum(router.subscriptions for router in self._routers.values())
        stats.routers -= len(self._routers)
