"""One live endpoint for many streams, each with its own topic.

The hub owns the connections of the endpoint. It passes each router to the streams whose topics match the router's
subscriptions. A stream sees only these routers, as if it owned the endpoint. Slow routers cost a limited amount of
memory for all streams together, because the streams share two limits: the bytes of the recent batches that they keep,
and the number of states that are sent at the same time.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from msgspec import structs

from kvbus.common.errors import BindError
from kvbus.core.stats import OutputStats, RouterView
from kvbus.core.wire.frames import ASKS_REPLAY
from kvbus.transport.live.endpoint import Endpoint, Shared, reopening
from kvbus.transport.live.ring import Share
from kvbus.transport.live.router import RouterState, shown_topics
from kvbus.transport.live.states import StateSlots
from kvbus.transport.live.stream import MAX_LEFT_ROUTERS, LivePublisher
from kvbus.transport.zmtp.peer import Peer, PeerHandler

log = logging.getLogger("kvbus.outputs")

_WORST_FIRST: Final = (
    RouterState.STALLED,
    RouterState.RECEIVING,
    RouterState.WAITING,
    RouterState.BEHIND,
    RouterState.LIVE,
    RouterState.IDLE,
)


@dataclass(slots=True)
class _Member:
    """A router that is connected to a hub, with the streams that it reads.

    Attributes:
        peer: the router's connection.
        name: name of the owner of the router's CURVE key; may be empty.
        streams: the streams that the router reads, by slot.
        subscriptions: number of the router's subscriptions.
        turn: index of the stream that is served first when the router is writable again.
    """

    peer: Peer
    name: str = ""
    streams: dict[int, LivePublisher] = field(default_factory=dict)
    subscriptions: int = 0
    turn: int = 0


class Hub:
    """The owner of one live endpoint that many streams share, and the handler of its connections.

    Args:
        output: the output's name, for logs.
        open_endpoint: binds or dials the endpoint, with this object as the handler. Called when the first stream opens.
        stats: counters of the output.
        send_bytes: maximum number of bytes of the batches that all streams together keep for slow routers.
        name_of: returns the display name of a public key's owner.
    """

    def __init__(
        self,
        output: str,
        open_endpoint: Callable[[PeerHandler], Endpoint],
        *,
        stats: OutputStats,
        send_bytes: int,
        name_of: Callable[[bytes], str] = lambda _: "",
    ) -> None:
        self._output = output
        self._open_endpoint = open_endpoint
        self._stats = stats
        self._name_of = name_of
        self._endpoint: Endpoint | None = None
        self._streams: dict[int, LivePublisher] = {}
        self._topics: dict[bytes, int] = {}
        self._members: dict[int, _Member] = {}
        self._ended: set[int] = set()
        """Ids of peers whose endpoint was closed, but whose connections have not ended yet."""
        self._left: deque[RouterView] = deque(maxlen=MAX_LEFT_ROUTERS)
        self.shared = Shared(Share(send_bytes), StateSlots())
        """The byte limit for recent batches and the scheduler of states, which the streams of this hub share."""

    # -- streams -----------------------------------------------------------------------------------------------------

    def open(self, slot: int, topic: bytes, stream: LivePublisher) -> Endpoint:
        """Add a stream. The connected routers that have subscribed to its topic get its state.

        Args:
            slot: slot of the stream.
            topic: topic of the stream.
            stream: the stream's publisher.

        Returns:
            A handle, which removes the stream from the shared endpoint when it is closed.

        Raises:
            BindError: the endpoint cannot be bound, or another stream has this topic.
        """
        if topic in self._topics:
            reason = f"stream {self._topics[topic]} already has this topic"
            raise BindError(topic.decode("utf-8", "backslashreplace"), reason)
        if self._endpoint is None:
            self._endpoint = self._open_endpoint(self)
        self._topics[topic] = slot
        self._streams[slot] = stream
        for member in list(self._members.values()):
            for prefix in list(member.peer.topics):
                self._offer(member, prefix, slot, topic)
        return _Seat(lambda linger: self._close(slot, topic, linger))

    def _close(self, slot: int, topic: bytes, linger: float) -> None:
        del self._streams[slot], self._topics[topic]
        for member in self._members.values():
            member.streams.pop(slot, None)
        if not self._streams:
            self._end(linger)
            self.shared.state_slots.close()

    def reopen(self, open_endpoint: Callable[[PeerHandler], Endpoint]) -> None:
        """Disconnect every router, and open the endpoint again with the new function ``open_endpoint``."""
        self._end(0.0)
        self._open_endpoint = open_endpoint
        if self._streams:
            self._endpoint = reopening(open_endpoint)(self)

    def _end(self, linger: float) -> None:
        for member in self._members.values():
            self._forget(member, "closed")
            self._ended.add(member.peer.id)
            for stream in member.streams.values():
                stream.closed(member.peer, "closed")
        self._members.clear()
        if self._endpoint is not None:
            self._endpoint.close(linger)
            self._endpoint = None

    # -- routers -----------------------------------------------------------------------------------------------------

    @property
    def peers(self) -> list[Peer]:
        """The connections of all routers at the endpoint."""
        return [member.peer for member in self._members.values()]

    def opened(self, peer: Peer) -> None:
        """Add a router that has connected."""
        self._members[peer.id] = _Member(peer, self._name_of(peer.key))
        self._stats.routers += 1

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Pass a router to the streams whose topics its new subscription matches."""
        if topic == ASKS_REPLAY:
            # This is no topic. The router announces with it that it requests replays. Ignore it, because this endpoint
            # has no replays: the router gets the state like every other router.
            return
        member = self._members[peer.id]
        member.subscriptions += 1
        self._stats.subscribers += 1
        before = len(member.streams)
        for name, slot in self._topics.items():
            self._offer(member, topic, slot, name)
        self._say("output %s: router %s subscribed to %d streams", peer, len(member.streams) - before)

    def _offer(self, member: _Member, prefix: bytes, slot: int, topic: bytes) -> None:
        if not topic.startswith(prefix):
            return
        stream = self._streams[slot]
        if slot not in member.streams:
            member.streams[slot] = stream
            stream.opened(member.peer)
        stream.subscribed(member.peer, prefix)

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Pass the end of a router's subscription to the streams that the router reads."""
        if topic == ASKS_REPLAY:
            return
        member = self._members[peer.id]
        member.subscriptions -= 1
        self._stats.subscribers -= 1
        for stream in member.streams.values():
            stream.cancelled(peer, topic)

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        """Ignore a message from a router. kvbus expects none, but an application can send one on an XSUB."""

    def drained(self, peer: Peer) -> None:
        """Continue to send to a router that is writable again.

        First check whether it can get a state that it waits for. Then serve the streams that it reads, each time
        beginning with another stream.
        """
        self.shared.state_slots.look_soon()
        member = self._members[peer.id]
        streams = list(member.streams.values())
        member.turn = (member.turn + 1) % max(1, len(streams))
        for stream in (*streams[member.turn :], *streams[: member.turn]):
            stream.drained(peer)

    def closed(self, peer: Peer, reason: str) -> None:
        """Remove a router whose connection has ended, and report the end to the streams that the router reads."""
        self._stats.router_disconnects[reason] += 1
        self._say("output %s: router %s left: %s", peer, reason)
        if peer.id in self._ended:
            self._ended.remove(peer.id)
            return
        member = self._members.pop(peer.id)
        self._forget(member, reason)
        for stream in member.streams.values():
            stream.closed(peer, reason)

    def _forget(self, member: _Member, reason: str) -> None:
        self._left.append(structs.replace(self._view(member), left=reason, left_at=time.time()))
        self._stats.routers -= 1
        self._stats.subscribers -= member.subscriptions

    def _say(self, text: str, peer: Peer, *more: object) -> None:
        log.info(text, self._output, peer.address, *more, extra={"output": self._output, "peer": peer.address})

    # -- the status of the routers -----------------------------------------------------------------------------------

    @property
    def routers(self) -> list[RouterView]:
        """Status of each connected router, combined from all its streams, and of the last routers that disconnected."""
        return [*map(self._view, self._members.values()), *self._left]

    def _view(self, member: _Member) -> RouterView:
        peer = member.peer
        views = [view for stream in member.streams.values() if (view := stream.view_of(peer)) is not None]
        topics, subscriptions = shown_topics(peer)
        return RouterView(
            stream=0,
            peer=peer.address,
            since=peer.opened_at,
            topics=topics,
            subscriptions=subscriptions,
            state=min((view.state for view in views), key=_rank, default=RouterState.IDLE.value),
            states_sent=sum(view.states_sent for view in views),
            state_sent_at=max((view.state_sent_at for view in views if view.state_sent_at is not None), default=None),
            queued_batches=sum(view.queued_batches for view in views),
            queued_bytes=peer.unread_bytes,
            behind_seconds=max((view.behind_seconds for view in views), default=0.0),
            dropped_batches=sum(view.dropped_batches for view in views),
            dropped_events=sum(view.dropped_events for view in views),
            name=member.name,
            dropped_at=max((view.dropped_at for view in views if view.dropped_at is not None), default=None),
        )


def _rank(state: str) -> int:
    return _WORST_FIRST.index(RouterState(state))


@dataclass(frozen=True, slots=True)
class _Seat:
    """A stream's handle on the endpoint that it shares with other streams."""

    leave: Callable[[float], None]

    def close(self, linger: float = 0.0) -> None:
        """Remove the stream from the endpoint. The connections of the routers stay open for the other streams."""
        self.leave(linger)
