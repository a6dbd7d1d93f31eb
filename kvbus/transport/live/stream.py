"""The live side of one stream: it publishes batches to every router, and sends the state to routers that need it.

The state is a snapshot of the stream's live blocks, as events.

A router that reads fast enough gets each burst of batches in one write. A slower router has a position in the ring of
recent batches, and gets the batches from there as fast as it reads. If the ring drops the batch at the router's
position, the router loses this batch, and kvbus counts the loss. If the stream sends states, the router then gets the
state again. If the stream sends no states, the router sees a gap.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from msgspec import structs

from kvbus.core.commands import SendState
from kvbus.core.outputs.stream import Transfer
from kvbus.core.stats import OutputStats, RouterView
from kvbus.core.wire.frames import ASKS_REPLAY
from kvbus.transport.live.endpoint import Endpoint, Shared
from kvbus.transport.live.ring import Entry, Ring
from kvbus.transport.live.router import Router, Routers, RouterState, host_of, say
from kvbus.transport.live.states import StateSlots
from kvbus.transport.sender import QUANTUM, Sender, Session
from kvbus.transport.zmtp.peer import Peer
from kvbus.transport.zmtp.wire import MORE, encoded_parts, head

MAX_LEFT_ROUTERS: Final = 100
"""Maximum number of disconnected routers that the status for operators shows."""

UNSENT: Final = 256 * 1024
"""Maximum unsent bytes that the kernel queues for a router that does not read.

By default the kernel queues 4 MiB. Then kvbus would notice a stalled router late, and the router would have to read 4
MiB of old batches before the new state.
"""

_NEED_RING: Final = (RouterState.RECEIVING, RouterState.BEHIND)


class LivePublisher:
    """The publisher of one stream of an output to its routers, and the handler of their connections.

    Args:
        stream: slot of the stream, for the status.
        topic: the stream's topic. A batch may change it.
        output: the output's name, for logs.
        open_endpoint: binds or dials the endpoint, with this object as the handler of its peers.
        sender: sends states to routers, and earlier batches from the ring to slow routers.
        stats: counters of the output.
        queue_batches: maximum number of batches in a burst. Further batches are dropped for every router.
        send_hwm: maximum number of batches that the ring keeps for slow routers.
        send_bytes: maximum number of bytes that the ring keeps for slow routers.
        request_state: requests the stream's state from the relay for some routers. Its argument is their peer ids. None
            if the stream sends no state.
        waiting: :meth:`publish` appends :meth:`flush` to this list. At the end of the burst, the list's owner calls
            every method in it.
        name_of: returns the display name of a public key's owner.
        left: the list to which the status of each disconnected router is added; None if the stream has its own list.
        shared: the resources shared with the other streams of the endpoint; None if this stream is the only one.

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
        sender: Sender,
        stats: OutputStats,
        queue_batches: int,
        send_hwm: int,
        send_bytes: int,
        waiting: list[Callable[[], None]],
        request_state: Callable[[tuple[int, ...]], None] | None = None,
        name_of: Callable[[bytes], str] = lambda _: "",
        left: deque[RouterView] | None = None,
        shared: Shared | None = None,
    ) -> None:
        self.stream = stream
        self._output = output
        self._name_of = name_of
        self._sender = sender
        self._stats = stats
        self._request_state = request_state
        self._sends_state = request_state is not None
        self._shared = shared
        self._loop = asyncio.get_running_loop()

        # The stream's topic, the batches of the current burst, and the ring of the earlier batches that some router has
        # not got yet.
        self._topic = topic
        self._topic_frame = head(len(topic), MORE) + topic
        self._burst: list[Entry] = []
        self._burst_events = self._burst_bytes = 0
        self._burst_at = 0.0
        self._queue_batches = queue_batches
        self._overflowed = False
        """Whether batches were dropped because the current burst was full. All routers then need the stream's state
        again.
        """
        self._waiting = waiting
        self.ring = Ring(send_hwm, send_bytes, None if shared is None else shared.share)
        self.ring.give_up = lambda: self._pass_by(self.ring.pop())

        self.routers = Routers(output, stats)
        self.left = deque(maxlen=MAX_LEFT_ROUTERS) if left is None else left
        self._places = StateSlots() if shared is None else shared.state_slots
        self._closed = False
        self._endpoint = open_endpoint(self)
        self._places.streams[stream] = self
        stats.queue_limit += queue_batches

    # -- batches -----------------------------------------------------------------------------------------------------

    def publish(self, topic: bytes, seq: bytes, payload: bytes, events: int) -> None:
        """Add a batch to the current burst, which :meth:`flush` sends. If the burst is full, drop and count the batch.

        Args:
            topic: the batch's topic. If it differs from the previous batch's topic, the stream's topic changes.
            seq: the encoded seq frame.
            payload: the encoded batch.
            events: number of events in the batch.
        """
        if topic != self._topic:
            self._change_topic(topic)
        burst = self._burst
        # Never drop an empty batch. While kvbus sends a state to one router, all other routers get an empty batch for
        # each seq of this state. Without the empty batch they would see a gap.
        if events and len(burst) >= self._queue_batches:
            self._stats.dropped_batches["queue_full"] += 1
            self._stats.dropped_events["queue_full"] += events
            self._overflowed = self._sends_state
            return
        if not burst:
            self._burst_at = self._loop.time()
            self._waiting.append(self.flush)
        message = b"".join((self._topic_frame, head(len(seq), MORE), seq, head(len(payload)), payload))
        burst.append(Entry(message, events, self._burst_at))
        self._burst_events += events
        self._burst_bytes += len(payload)
        self._stats.queue_depth += 1

    def flush(self) -> None:
        """Send the batches of the current burst to the routers that have all earlier batches.

        Keep these batches in the ring of recent batches for slower routers.
        """
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
        for router in self.routers.are(RouterState.STALLED):
            self._count_lost(router, count, events)
        if self.routers.any(RouterState.LIVE):
            self._send(burst)
        self._keep(burst)
        if self._overflowed:
            self._overflowed = False
            for router in self.routers.are(RouterState.LIVE, *_NEED_RING):
                if not router.asks_replay:
                    self.restart(router)

    def _send(self, burst: list[Entry]) -> None:
        """Write the burst to all routers in the state LIVE.

        If the socket of a router is full, it gets later batches from the ring of recent batches.
        """
        data = burst[0].message if len(burst) == 1 else b"".join([entry.message for entry in burst])
        before = self.ring.end
        for router in self.routers.are(RouterState.LIVE):
            peer = router.peer
            # The router's socket may be full already, because it also gets another stream's batches.
            if not peer.writable or (peer.unsent.over and peer.held_back):
                self._catch_up(router, before)
                continue
            peer.write(data)
            if not peer.writable:
                self._catch_up(router, before + len(burst))

    def _keep(self, burst: list[Entry]) -> None:
        """Keep the batches of the burst in the ring of recent batches, if a slower router will need them."""
        ring = self.ring
        if not self._ring_is_needed():
            ring.skip(len(burst))
            return
        for entry in burst:
            ring.append(entry)
        while (dropped := ring.overflow()) is not None:
            self._pass_by(dropped)
        if self._shared is not None:
            self._shared.share.make_room()

    def _ring_is_needed(self) -> bool:
        """Return whether at least one router will get batches from the ring of recent batches."""
        routers = self.routers
        return routers.any(*_NEED_RING) or any(
            router.position is not None for router in routers.are(RouterState.WAITING)
        )

    # -- losses --------------------------------------------------------------------------------------------------------

    def _pass_by(self, dropped: Entry) -> None:
        """Record that the ring of recent batches has dropped a batch.

        Each router that had not got this batch has lost it.
        """
        first = self.ring.first
        for router in self.routers.are(RouterState.WAITING, *_NEED_RING):
            if router.position is None or router.position >= first:
                continue
            router.position = first
            # a waiting router has lost nothing: its state will include this batch
            if router.state is not RouterState.WAITING:
                self._lose(router, dropped)

    def _lose(self, router: Router, entry: Entry) -> None:
        """Count a batch that a router has lost. If the stream sends states, send the router the state again."""
        is_first = not router.dropped_batches
        self._count_lost(router, 1, entry.events)
        if self._sends_state and not router.asks_replay:
            say(logging.WARNING, "output %s: router %s is too slow; it gets the state again", self._output, router)
            router.lost_at = entry.at
            self.restart(router)
        elif is_first:
            text = "output %s: router %s is too slow and loses batches; it has to request a replay"
            say(logging.WARNING, text, self._output, router)

    def _count_lost(self, router: Router, batches: int, events: int) -> None:
        router.dropped_batches += batches
        router.dropped_events += events
        router.dropped_at = self._loop.time()
        self._stats.dropped_batches["slow_router"] += batches
        self._stats.dropped_events["slow_router"] += events

    def restart(self, router: Router) -> None:
        """Drop all batches queued for a router, and let it wait for a new state of the stream.

        This is done if the router has lost batches, or if another router is to receive a state in its place, because
        only a limited number of states is sent at the same time.
        """
        if router.position is not None and router.position < self.ring.end:
            rest = self.ring.end - router.position
            self._count_lost(router, rest, self.ring.events_from(router.position))
        if router.lost_at is None:
            router.lost_at = self._loop.time()
        router.reason = "lost"
        router.wants_again = False
        if router.peer.writable:
            self._want_state(router)
        else:
            self._move(router, RouterState.STALLED)

    # -- routers -----------------------------------------------------------------------------------------------------

    def _move(self, router: Router, state: RouterState, position: int | None = None) -> None:
        """Change the state of a router, and stop the sender's session for the router.

        Args:
            router: the router.
            state: the new state.
            position: ring position of the next batch for the router. None if it needs no batch from the ring, because
                it has all earlier batches or will get them in a state.
        """
        if router.session is not None:
            self._sender.stop(router.session)
            router.session = None
        router.position = position
        had_place = router.state is RouterState.RECEIVING
        self.routers.move(router, state)
        if had_place:
            self._places.look_soon()
        if state in {RouterState.IDLE, RouterState.LIVE}:
            router.lost_at = None

    def _catch_up(self, router: Router, position: int, transfer: Transfer | None = None) -> None:
        """Start a session that sends a router the batches of the stream's ring of recent batches from a position on.

        If ``transfer`` is given, the session also sends this state, in place of the ring's newest batches, which have
        the same seqs.
        """
        self._move(router, RouterState.BEHIND if transfer is None else RouterState.RECEIVING, position)
        router.session = Session(
            router.peer,
            self._missing(router, transfer, self.ring.end),
            ended=lambda: self._is_level(router),
            stalled=lambda: self._makes_no_progress(router),
        )
        self._sender.start(router.session)

    def _missing(self, router: Router, transfer: Transfer | None, end: int) -> Iterator[Sequence[bytes]]:
        """Yield the encoded messages that a router lacks: the given state, if any, and the batches of the ring.

        Each message has several parts, which routers share. Yield no part while the relay is building the next message.
        ``end`` is the end of the ring when the state was made. The last batches before it are the empty ones that other
        routers get in place of the state.
        """
        if transfer is not None:
            yield from self._from_ring(router, end - (transfer.end_seq - transfer.first_seq))
            for found in transfer.batches():
                if found is None:
                    yield ()
                    continue
                seq, payload = found
                frame = seq.to_bytes(8, "big") + transfer.publisher_id
                yield encoded_parts((transfer.topic, frame, payload))
            if router.position is not None:
                router.position = max(router.position, end)
            self._has_state(router)
        yield from self._from_ring(router)

    def _from_ring(self, router: Router, end: int | None = None) -> Iterator[list[bytes]]:
        """Yield the encoded messages of the ring from the router's position on, up to the position ``end``."""
        while router.position is not None and router.position < (self.ring.end if end is None else end):
            messages, router.position = self.ring.read(router.position, QUANTUM, end)
            yield messages

    def _has_state(self, router: Router) -> None:
        """Record that a router was sent all of its state. Its session now sends the ring's recent batches."""
        router.lost_at = None
        self.routers.move(router, RouterState.BEHIND)
        self._places.has_state(router)
        self._places.look_soon()

    def _is_level(self, router: Router) -> None:
        """Change the state of a router to LIVE, because it was sent every batch of the ring of recent batches."""
        self._move(router, RouterState.LIVE)
        if router.wants_again:
            self._want_state_again(router)
        if not self._ring_is_needed():
            self.ring.trim(self.ring.end)

    def _makes_no_progress(self, router: Router) -> None:
        """Stop sending the state to a router that does not read it, so that another router can receive its state."""
        if router.state is RouterState.RECEIVING:
            self.restart(router)

    def opened(self, peer: Peer) -> None:
        """Add a peer that has connected, as a router in the state IDLE."""
        self.routers.add(Router(peer, self.stream, self._name_of(peer.key)))
        if self._shared is None:
            self._stats.routers += 1

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Record a subscription. If it is the router's first to cover the stream's topic, begin to serve the router.

        A subscription to ``kvbus:asks-replay`` means that the router requests replays itself, so it gets no state.
        """
        router = self.routers.of(peer)
        if topic == ASKS_REPLAY:
            router.asks_replay = True
            if router.state in {RouterState.WAITING, RouterState.STALLED}:
                router.lost_at = None
                self._catch_up(router, self.ring.end if router.position is None else router.position)
            return
        router.subscriptions += 1
        if self._shared is None:
            self._stats.subscribers += 1
        if router.state is RouterState.IDLE and self._topic.startswith(topic):
            self._begin(router)

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Remove a subscription. If the router has no other subscription to the stream's topic, stop serving it."""
        router = self.routers.of(peer)
        if topic == ASKS_REPLAY:
            router.asks_replay = False
            return
        router.subscriptions -= 1
        if self._shared is None:
            self._stats.subscribers -= 1
        if router.state is not RouterState.IDLE and not router.matches(self._topic):
            self._move(router, RouterState.IDLE)

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        """Ignore a message from a router. kvbus expects none, but an application can send one on an XSUB."""

    def drained(self, peer: Peer) -> None:
        """Continue to send to a router that is writable again."""
        router = self.routers.of(peer)
        if router.state is RouterState.STALLED:
            self._want_state(router)
        elif router.session is not None:
            self._sender.resume(router.session)

    def closed(self, peer: Peer, reason: str) -> None:
        """Remove a router whose connection has ended."""
        router = self.routers.of(peer)
        if self._shared is None:
            self.left.append(structs.replace(self._view(router), left=reason, left_at=time.time()))
        self._places.left(router)
        self._move(router, RouterState.GONE)
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
        if not self._sends_state or router.asks_replay:
            self._move(router, RouterState.LIVE)
            return
        router.reason = "subscribed"
        router.wants_again = False
        # Keep the position of the next batch in the ring, because a router may announce later that it requests replays
        # itself. Then it gets the batches from this position on instead of the state.
        self._want_state(router, self.ring.end if self._shared is None else None)

    def _want_state(self, router: Router, position: int | None = None) -> None:
        self._move(router, RouterState.WAITING, position)
        self._places.want(router)

    def _change_topic(self, topic: bytes) -> None:
        """Change the stream's topic, because a batch has another topic.

        Begin to serve the routers whose subscriptions match the new topic, and stop serving all other routers.
        """
        self.flush()
        self._topic = topic
        self._topic_frame = head(len(topic), MORE) + topic
        for router in self.routers:
            matches = router.matches(topic)
            if matches and router.state is RouterState.IDLE:
                self._begin(router)
            elif not matches and router.state is not RouterState.IDLE:
                self._move(router, RouterState.IDLE)

    # -- sending the state -----------------------------------------------------------------------------

    def request(self, routers: list[Router]) -> None:
        """Request one state of the stream from the relay, for all of these routers."""
        if self._request_state is not None:
            self._request_state(tuple(router.peer.id for router in routers))

    def send_state(self, command: SendState) -> None:
        """Start to send the state to those routers of the command that wait for it.

        The batches that are published from now on follow the state.
        """
        self.flush()
        begun = []
        for peer_id in command.routers:
            router = self.routers.get(peer_id)
            if router is None or router.state is not RouterState.WAITING:
                continue
            # a router that gets the state again still needs the batches before it
            position = router.position if router.reason == "asked" else None
            self._catch_up(router, self.ring.end if position is None else position, command.transfer)
            self._stats.states_sent[router.reason] += 1
            router.states_sent += 1
            router.state_sent_at = self._loop.time()
            begun.append(router)
        self._places.begin(begun)

    def routers_of(self, requester: Peer) -> tuple[tuple[int, ...], bool]:
        """Return the routers from which a replay request may come, if kvbus sends them states.

        They are subscribed, and have the requester's address and CURVE key. Also return whether no other subscribed
        router has this address and key.

        Args:
            requester: the connection of the replay request.
        """
        host = host_of(requester)
        found = [
            router
            for router in self.routers
            if router.state is not RouterState.IDLE and router.peer.key == requester.key and router.host == host
        ]
        if not host or not self._sends_state:
            return (), True
        return tuple(router.peer.id for router in found if not router.asks_replay), len(found) <= 1

    def repeat_state(self, routers: tuple[int, ...]) -> None:
        """Send the state to routers that may have the batches of the live stream without the state before them.

        A router gets the state without a gap, after all batches that are queued for it. A router that already waits for
        a state has no such batches.
        """
        self.flush()
        for router in map(self.routers.get, routers):
            if router is not None and router.state is RouterState.LIVE:
                self._want_state_again(router)
            elif router is not None and router.state in _NEED_RING:
                router.wants_again = True

    def _want_state_again(self, router: Router) -> None:
        router.reason = "asked"
        router.wants_again = False
        self._want_state(router, self.ring.end)

    def retire(self) -> None:
        """Before the stream ends for ever, send its last, empty state to every router that lacks batches."""
        self.flush()
        waiting = self.routers.are(RouterState.WAITING)
        lacking = self.routers.are(RouterState.STALLED, *_NEED_RING)
        for router in lacking:
            self._move(router, RouterState.WAITING)
        if waiting or lacking:
            self.request([*waiting, *lacking])
        for router in self.routers.are(RouterState.RECEIVING):
            if router.session is not None:
                self._sender.finish(router.session)

    # -- the status of the routers -------------------------------------------------------------------------------------

    @property
    def peers(self) -> list[Peer]:
        """The connections of all routers of the stream."""
        return [router.peer for router in self.routers]

    @property
    def busy(self) -> int:
        """Number of routers that still have to get batches, except stalled routers.

        Such a router has unsent bytes, or a session of the sender, which sends it the state or recent batches.
        """
        return sum(
            router.state is not RouterState.STALLED and (router.peer.waiting_bytes > 0 or router.session is not None)
            for router in self.routers
        )

    @property
    def queue_max(self) -> int:
        """The largest number of batches that wait for a single router."""
        return max(map(self._queued, self.routers.are(*_NEED_RING)), default=0)

    @property
    def behind_seconds(self) -> float:
        """Age of the oldest batch that some router lacks, in seconds."""
        return max(map(self._behind_seconds, self.routers), default=0.0)

    @property
    def connected(self) -> list[RouterView]:
        """The status of each connected router."""
        return [*map(self._view, self.routers)]

    def view_of(self, peer: Peer) -> RouterView | None:
        """Return the status of the router of this connection; None if the connection has no router on this stream."""
        router = self.routers.get(peer.id)
        return None if router is None else self._view(router)

    def _queued(self, router: Router) -> int:
        return self.ring.end - router.position if router.state in _NEED_RING and router.position is not None else 0

    def _behind_seconds(self, router: Router) -> float:
        since = router.lost_at
        if since is None and router.state in _NEED_RING and router.position is not None:
            since = self.ring.published(router.position)
        return 0.0 if since is None else self._loop.time() - since

    def _view(self, router: Router) -> RouterView:
        return router.view(self._queued(router), self._behind_seconds(router), self._loop.time())

    # -- closing -----------------------------------------------------------------------------------------------------

    def close(self, linger: float = 0.0) -> None:
        """Send the current burst and close all connections. Queued bytes are sent for up to ``linger`` seconds."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        stats = self._stats
        stats.queue_limit -= self._queue_batches
        for router in self.routers:
            if router.session is not None:
                self._sender.stop(router.session)
                router.session = None
        self._places.streams.pop(self.stream, None)
        if self._shared is not None:
            self.ring.trim(self.ring.end)
        else:
            self._places.close()
            stats.subscribers -= sum(router.subscriptions for router in self.routers)
            stats.routers -= len(list(self.routers))
        self._endpoint.close(linger)
