"""The replay server of one output stream: it answers each requester at its own pace.

Each answer is a session of the fair sender (:mod:`kvbus.transport.sender`). A requester that does not read takes no
part in the turns and delays nobody. A requester whose kernel acknowledges nothing for 30 s is disconnected and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Final, NamedTuple

from kvbus.core.commands import Answer
from kvbus.core.outputs.snapshot import Unfinished
from kvbus.core.stats import OutputStats
from kvbus.transport.live.endpoint import Endpoint, reopening
from kvbus.transport.sender import QUANTUM, STALL_TIMEOUT, Sender, Session
from kvbus.transport.sockets import PLAIN, PeerPolicy
from kvbus.transport.zmtp.endpoint import SYSTEM, Listener, Settings, System
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.peer import Peer, PeerHandler
from kvbus.transport.zmtp.protocol import DEFAULT, Limits
from kvbus.transport.zmtp.reasons import Reason
from kvbus.transport.zmtp.wire import encode_message
from kvbus.transport.zmtp_keys import Keys

MAX_PEERS: Final = 2_048
"""Connections of one endpoint."""

MAX_WAITING: Final = 10_000
"""Requests of one endpoint that may wait, for their turn or for a requester that reads. kvbus refuses and counts
further ones."""

MAX_QUEUED: Final = 16
"""Requests of one peer that wait for the answer to its first one. Beyond that kvbus does not read from the peer until
some are answered."""

STALLED: Final = "stalled"

Handler = Callable[[list[bytes]], None]


def sender_of_output(
    stats: OutputStats, limit: int, clock: Callable[[], float] | None = None, stall_timeout: float = STALL_TIMEOUT
) -> Sender:
    """Make the sender of one output.

    Args:
        stats: counters of the output.
        limit: answers that take turns at once.
        clock: seconds that measure the progress of peers; None: those of the event loop.
        stall_timeout: seconds without progress after which a session is given up.
    """
    stats.replay_sessions_limit = limit

    def counted(change: int) -> None:
        stats.replay_sessions += change
        stats.replay_waiting -= change

    return Sender(limit, counted, clock, stall_timeout)


class _Asked(NamedTuple):
    """A request: its answer, the messages of the answer, and whether there was no room for it."""

    answer: Answer
    messages: Iterator[list[bytes]]
    refused: bool


class _Requester:
    """One peer, its requests that are not answered yet, and the answer under way."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.asked: deque[_Asked] = deque()
        self.session: Session | None = None
        self.in_message = False
        """The answer is in the middle of a message."""


class ReplayServer:
    """Receive replay requests on one endpoint, and send the relay's answers.

    Args:
        endpoint: the endpoint to bind.
        on_request: called with each request's frames, an identity of the connection first. Pass the answer to
            :meth:`send`.
        sender: sends the answers, in turns with those of other servers of the output.
        stats: counters of the output.
        policy: who may connect, and the largest frame to accept.
        system: the operating system.

    Raises:
        BindError: the endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        on_request: Handler,
        sender: Sender,
        stats: OutputStats,
        policy: PeerPolicy = PLAIN,
        system: System = SYSTEM,
    ) -> None:
        self._address = endpoint
        self._on_request = on_request
        self._sender = sender
        self._stats = stats
        self._system = system
        self._requesters: dict[int, _Requester] = {}
        self._waiting_limit = MAX_WAITING
        self._keys = Keys(policy.curve, bind=True)
        self._endpoint: Endpoint = self._opener(policy)(self)
        stats.replay_waiting_limit += MAX_WAITING

    def _opener(self, policy: PeerPolicy) -> Callable[[PeerHandler], Endpoint]:
        return lambda handler: self._listen(policy, handler)

    def _listen(self, policy: PeerPolicy, handler: PeerHandler) -> Listener:
        limit = policy.max_frame_bytes if policy.max_frame_bytes > 0 else DEFAULT.frame_bytes
        settings = Settings(
            limits=Limits(frame_bytes=limit, message_bytes=limit),
            max_peers=MAX_PEERS,
            # a peer is written to while nothing waits for it here, so an answer is over when all of it has left
            high_water=0,
            low_water=0,
            unsent_bytes=QUANTUM // 2,
            system=self._system,
        )
        self._keys = Keys(policy.curve, bind=True)
        return Listener(
            self._address,
            Role.ROUTER,
            handler,
            settings=settings,
            refused=self._refused,
            mechanism=self._keys.mechanism,
        )

    def _refused(self, reason: str, _address: str, _detail: str) -> None:
        self._stats.refused[reason] += 1

    def allow(self, clients: Collection[bytes]) -> None:
        """Replace the allow-list; requesters that are not on it any more are disconnected."""
        self._keys.allow(clients, [requester.peer for requester in self._requesters.values()])

    def reopen(self, policy: PeerPolicy) -> None:
        """Disconnect every requester, drop their answers, and bind again."""
        self._drop_all("gone")
        self._endpoint.close()
        self._endpoint = reopening(self._opener(policy))(self)

    # -- peers ---------------------------------------------------------------------------------------------------------

    def opened(self, peer: Peer) -> None:
        """Take in a connection."""
        self._requesters[peer.id] = _Requester(peer)

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Ignore a subscription: nobody subscribes to a ROUTER."""

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Ignore the end of a subscription."""

    def peer_of(self, identity: bytes) -> Peer:
        """Return the connection of a requester, whose request is being handed on."""
        return self._requesters[int.from_bytes(identity, "big")].peer

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        """Hand on a request."""
        self._on_request([peer.id.to_bytes(8, "big"), *frames])

    def drained(self, peer: Peer) -> None:
        """Go on with a requester that has read."""
        requester = self._requesters.get(peer.id)
        if requester is not None and requester.session is not None:
            self._sender.resume(requester.session)

    def closed(self, peer: Peer, reason: str) -> None:
        """Forget a requester, and count the answers that it did not get."""
        requester = self._requesters.pop(peer.id, None)
        if requester is None:
            return
        if requester.asked and requester.asked[0].answer.over and peer.unsent_bytes == 0:
            self._count_first(requester)  # it has got all of this answer, and left at once
        outcomes = {STALLED: STALLED, Reason.INTERNAL: "refused"}
        self._drop(requester, outcomes.get(reason, "gone"))

    # -- answers -------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> int:
        """Unfinished answers, waiting requests included."""
        return sum(len(requester.asked) for requester in self._requesters.values())

    def send(self, answer: Answer, messages: Iterator[list[bytes]]) -> None:
        """Begin an answer, or let it wait for the answers to earlier requests of the same peer."""
        requester = self._requesters.get(int.from_bytes(answer.envelope[0], "big"))
        stats = self._stats
        if requester is None:
            stats.replay_requests["gone"] += 1
            return
        requester.asked.append(_Asked(answer, messages, stats.replay_waiting >= stats.replay_waiting_limit))
        stats.replay_waiting += 1
        if len(requester.asked) == MAX_QUEUED + 1:
            requester.peer.pause()
        if requester.session is None:
            self._begin(requester)

    def _begin(self, requester: _Requester) -> None:
        """Begin with the answer to a requester's oldest request."""
        requester.session = Session(
            requester.peer,
            self._encoded(requester, requester.asked[0]),
            ended=lambda: self._go_on(requester),
            stalled=lambda: requester.peer.close(STALLED),
            limited=True,
        )
        self._sender.start(requester.session)

    def _encoded(self, requester: _Requester, asked: _Asked) -> Iterator[bytes]:
        """Give the messages of an answer, encoded; ``b""`` while the relay still makes the next one."""
        for frames in iter([asked.answer.refusal()]) if asked.refused else asked.messages:
            if not frames:
                yield b""
                continue
            requester.in_message = isinstance(frames, Unfinished)
            self._stats.replay_batches += not requester.in_message
            yield encode_message(frames[1:], unfinished=requester.in_message)

    def _go_on(self, requester: _Requester) -> None:
        """Go on to the next request of a requester that has got an answer."""
        self._count_first(requester)
        requester.session = None
        if requester.asked:
            self._begin(requester)

    def _count_first(self, requester: _Requester) -> None:
        """Count the outcome of a requester's oldest request."""
        answer, _, refused = requester.asked.popleft()
        self._stats.replay_requests["refused" if refused else answer.outcome] += 1
        self._stats.replay_waiting -= 1
        if len(requester.asked) == MAX_QUEUED:
            requester.peer.resume()

    def _drop(self, requester: _Requester, outcome: str) -> None:
        """Drop the unfinished answers of a requester, and count them."""
        if requester.session is not None:
            self._sender.stop(requester.session)
            requester.session = None
        self._stats.replay_requests[outcome] += len(requester.asked)
        self._stats.replay_waiting -= len(requester.asked)
        requester.asked.clear()
        requester.peer.resume()

    def end(self) -> int:
        """Send END for every answer that is not sent whole, and count them; how many they were."""
        count = self.busy
        for requester in self._requesters.values():
            if requester.in_message:
                requester.peer.close(Reason.CLOSED)  # END would become a part of this message
            unfinished = [asked.answer for asked in requester.asked if not asked.answer.over]
            requester.peer.write(b"".join(encode_message(answer.refusal()[1:]) for answer in unfinished))
        self._drop_all("cut_off")
        return count

    def _drop_all(self, outcome: str) -> None:
        for requester in self._requesters.values():
            self._drop(requester, outcome)

    def close(self, linger: float = 0.0) -> None:
        """Close the endpoint and drop unfinished answers; what was handed over has ``linger`` seconds to leave."""
        self._drop_all("cut_off")
        self._endpoint.close(linger)
        self._stats.replay_waiting_limit -= self._waiting_limit
        self._waiting_limit = 0
