"""The replay server of one output stream, which sends each router's replay answers as fast as the router reads.

Each answer is a session of the output's sender (:mod:`kvbus.transport.sender`). The sender skips a router that does not
read, so this router delays no other router. If the kernel of a router acknowledges nothing for 30 s, the server
disconnects the router and counts the answer as stalled.

A second server of the same class answers snapshot requests on a separate endpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, NamedTuple

from kvbus.core.commands import Answer
from kvbus.core.outputs.snapshot import Unfinished
from kvbus.core.stats import OutputStats
from kvbus.transport.live.endpoint import Endpoint, reopening
from kvbus.transport.sender import QUANTUM, STALL_TIMEOUT, Sender, Session
from kvbus.transport.sockets import PLAIN, PeerPolicy
from kvbus.transport.unsent import UNLIMITED, Unsent
from kvbus.transport.zmtp.endpoint import Listener
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.peer import Peer, PeerHandler
from kvbus.transport.zmtp.protocol import DEFAULT, Limits
from kvbus.transport.zmtp.reasons import Reason
from kvbus.transport.zmtp.settings import SYSTEM, Settings, System
from kvbus.transport.zmtp.wire import encode_message, encoded_parts
from kvbus.transport.zmtp_keys import Keys

MAX_PEERS: Final = 2_048
"""Maximum number of routers that are connected to one replay endpoint."""

MAX_WAITING: Final = 10_000
"""Maximum number of requests that wait at one replay endpoint, because the sender is busy or their router does not
read.

kvbus refuses and counts further requests.
"""

MAX_QUEUED: Final = 16
"""Maximum number of replay requests of one router that wait while kvbus sends an answer to this router.

At the limit kvbus reads no further request of the router until an answer is complete.
"""

STALLED: Final = "stalled"

Handler = Callable[[list[bytes]], None]


def sender_of_output(
    stats: OutputStats, limit: int, clock: Callable[[], float] | None = None, stall_timeout: float = STALL_TIMEOUT
) -> Sender:
    """Return the sender of one output, which sends the replay answers and the states of all streams of the output.

    Args:
        stats: counters of the output. They show the numbers of running and waiting answers.
        limit: maximum number of answers that are sent at the same time.
        clock: returns the time in seconds, to measure the progress of routers; None for the event loop's clock.
        stall_timeout: seconds without progress after which the sender reports a session as stalled.
    """
    stats.replay_sessions_limit = limit

    def counted(change: int) -> None:
        stats.replay_sessions += change
        stats.replay_waiting -= change

    return Sender(limit, counted, clock, stall_timeout)


class _Asked(NamedTuple):
    """A replay request that has not been answered completely.

    Attributes:
        answer: the relay's answer. kvbus counts it by its outcome.
        messages: yields the messages of the answer.
        refused: whether kvbus refuses the request, because too many requests wait.
    """

    answer: Answer
    messages: Iterator[list[bytes]]
    refused: bool


class _Requester:
    """A connected router, and its unanswered replay requests.

    ``session`` sends the answer to the oldest of these requests; None if the router has no request.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.asked: deque[_Asked] = deque()
        self.session: Session | None = None
        self.in_message = False
        """Whether kvbus has sent only the first frames of a message of the answer."""


class ReplayServer:
    """The server of one replay endpoint, which receives routers' requests and sends the relay's answers.

    Args:
        endpoint: the endpoint to bind.
        on_request: called with the frames of each request; an identity of the connection is put before the first frame.
            Pass the relay's answer to :meth:`send`.
        sender: sends the answers. All replay servers of an output share it.
        stats: counters of the output.
        policy: the rules for routers: who may connect, and the largest frame that kvbus accepts.
        unsent: the limit for the bytes that wait in kvbus for the routers of all outputs together.
        system: the operating system's functions; a simulation replaces them.

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
        unsent: Unsent = UNLIMITED,
        system: System = SYSTEM,
    ) -> None:
        self._address = endpoint
        self._on_request = on_request
        self._sender = sender
        self._stats = stats
        self._unsent = unsent
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
            # With both water marks at 0, a peer is writable only while kvbus queues no bytes for it. So an answer
            # counts as ended only after the kernel has accepted all bytes of the answer.
            high_water=0,
            low_water=0,
            unsent_bytes=QUANTUM // 2,
            unsent=self._unsent,
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
        """Replace the allow-list of CURVE keys, and disconnect every router whose key is not on the new list."""
        self._keys.allow(clients, [requester.peer for requester in self._requesters.values()])

    def reopen(self, policy: PeerPolicy) -> None:
        """Disconnect every router, drop all answers, and bind the endpoint again with a new policy."""
        self._drop_all("gone")
        self._endpoint.close()
        self._endpoint = reopening(self._opener(policy))(self)

    # -- peers ---------------------------------------------------------------------------------------------------------

    def opened(self, peer: Peer) -> None:
        """Add a router that has connected."""
        self._requesters[peer.id] = _Requester(peer)

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Do nothing: a peer of this ROUTER socket does not subscribe."""

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Do nothing: a peer of this ROUTER socket has no subscription."""

    def peer_of(self, identity: bytes) -> Peer:
        """Return the connection from which a request came.

        Args:
            identity: the first frame that ``on_request`` got for the request.

        Raises:
            KeyError: the connection has ended.
        """
        return self._requesters[int.from_bytes(identity, "big")].peer

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        """Pass a router's request to ``on_request``, with an identity of the connection as the first frame."""
        self._on_request([peer.id.to_bytes(8, "big"), *frames])

    def drained(self, peer: Peer) -> None:
        """Continue the answer to a router that is writable again."""
        requester = self._requesters.get(peer.id)
        if requester is not None and requester.session is not None:
            self._sender.resume(requester.session)

    def closed(self, peer: Peer, reason: str) -> None:
        """Remove a router whose connection has ended, and count each of its unfinished answers by the reason."""
        requester = self._requesters.pop(peer.id, None)
        if requester is None:
            return
        if requester.asked and requester.asked[0].answer.finished and peer.unsent_bytes == 0:
            # The kernel accepted every byte of this answer before the router disconnected, so the answer is complete.
            self._count_first(requester)
        outcomes = {STALLED: STALLED, Reason.INTERNAL: "refused"}
        self._drop(requester, outcomes.get(reason, "gone"))

    # -- answers -------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> int:
        """Number of unfinished answers, including the answers that have not begun."""
        return sum(len(requester.asked) for requester in self._requesters.values())

    def send(self, answer: Answer, messages: Iterator[list[bytes]]) -> None:
        """Start sending an answer. If the router still gets an earlier answer, queue the new answer after it.

        Args:
            answer: the relay's answer; its envelope names the router's connection.
            messages: yields the messages of the answer.
        """
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
        """Start sending the answer to a router's oldest request."""
        requester.session = Session(
            requester.peer,
            self._encoded(requester, requester.asked[0]),
            ended=lambda: self._go_on(requester),
            stalled=lambda: requester.peer.close(STALLED),
            limited=True,
        )
        self._sender.start(requester.session)

    def _encoded(self, requester: _Requester, asked: _Asked) -> Iterator[Sequence[bytes]]:
        """Yield the parts of each encoded message of an answer, and no part while the relay is building a message."""
        for frames in iter([asked.answer.refusal()]) if asked.refused else asked.messages:
            if not frames:
                yield ()
                continue
            requester.in_message = isinstance(frames, Unfinished)
            self._stats.replay_batches += not requester.in_message
            yield encoded_parts(frames[1:], unfinished=requester.in_message)

    def _go_on(self, requester: _Requester) -> None:
        """Count a router's completed answer, and start the answer to its next request."""
        self._count_first(requester)
        requester.session = None
        if requester.asked:
            self._begin(requester)

    def _count_first(self, requester: _Requester) -> None:
        """Remove a router's oldest request from its queue, and count the outcome of the answer."""
        answer, _, refused = requester.asked.popleft()
        self._stats.replay_requests["refused" if refused else answer.outcome] += 1
        self._stats.replay_waiting -= 1
        if len(requester.asked) == MAX_QUEUED:
            requester.peer.resume()

    def _drop(self, requester: _Requester, outcome: str) -> None:
        """Drop all unfinished answers to a router, and count each of them with this outcome."""
        if requester.session is not None:
            self._sender.stop(requester.session)
            requester.session = None
        self._stats.replay_requests[outcome] += len(requester.asked)
        self._stats.replay_waiting -= len(requester.asked)
        requester.asked.clear()
        requester.peer.resume()

    def end(self) -> int:
        """End every unfinished answer with an END message, and count it as ``cut_off``, before kvbus shuts down.

        Returns:
            Number of answers that were unfinished.
        """
        count = self.busy
        for requester in self._requesters.values():
            if requester.in_message:
                requester.peer.close(Reason.CLOSED)  # END would become a part of the incomplete message
            unfinished = [asked.answer for asked in requester.asked if not asked.answer.finished]
            requester.peer.write(b"".join(encode_message(answer.refusal()[1:]) for answer in unfinished))
        self._drop_all("cut_off")
        return count

    def _drop_all(self, outcome: str) -> None:
        for requester in self._requesters.values():
            self._drop(requester, outcome)

    def close(self, linger: float = 0.0) -> None:
        """Close the endpoint and drop unfinished answers. Queued bytes are sent for up to ``linger`` seconds."""
        self._drop_all("cut_off")
        self._endpoint.close(linger)
        self._stats.replay_waiting_limit -= self._waiting_limit
        self._waiting_limit = 0
