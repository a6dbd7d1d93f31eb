"""The replay server of one output stream: it sends each answer as fast as the requester reads.

Each answer is a session of the fair sender (:mod:`kvbus.transport.sender`). The sender skips a requester that does not
read, so it delays no other requester. A requester whose kernel acknowledges nothing for 30 s is disconnected and
counted.
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
"""Maximum number of connections of one endpoint."""

MAX_WAITING: Final = 10_000
"""Maximum number of requests of one endpoint that wait, for the sender or for a requester to read. kvbus refuses and
counts further requests."""

MAX_QUEUED: Final = 16
"""Maximum number of requests of one peer that wait while it gets an answer. At the limit kvbus stops reading from the
peer until a request is answered."""

STALLED: Final = "stalled"

Handler = Callable[[list[bytes]], None]


def sender_of_output(
    stats: OutputStats, limit: int, clock: Callable[[], float] | None = None, stall_timeout: float = STALL_TIMEOUT
) -> Sender:
    """Make the sender of one output.

    Args:
        stats: counters of the output.
        limit: maximum number of answers that are sent at the same time.
        clock: returns the time in seconds, to measure the progress of peers; None for the event loop's clock.
        stall_timeout: seconds without progress after which a session is stopped.
    """
    stats.replay_sessions_limit = limit

    def counted(change: int) -> None:
        stats.replay_sessions += change
        stats.replay_waiting -= change

    return Sender(limit, counted, clock, stall_timeout)


class _Asked(NamedTuple):
    """A request: its answer, the messages of the answer, and whether the request is refused for lack of room."""

    answer: Answer
    messages: Iterator[list[bytes]]
    refused: bool


class _Requester:
    """A peer, its unanswered requests, and the session of the current answer."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.asked: deque[_Asked] = deque()
        self.session: Session | None = None
        self.in_message = False
        """Whether the answer stops in the middle of a message."""


class ReplayServer:
    """Receive replay requests on one endpoint, and send the relay's answers.

    Args:
        endpoint: the endpoint to bind.
        on_request: called with the frames of each request; an identity of the connection is put before the first frame.
            Pass the answer to :meth:`send`.
        sender: sends the answers; the output's other replay servers share it.
        stats: counters of the output.
        policy: who may connect, and the largest frame to accept.
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
            # with 0, a peer is writable only if no bytes wait here: an answer ends when the kernel has all of it
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
        """Replace the allow-list, and disconnect every requester whose key is no longer on it."""
        self._keys.allow(clients, [requester.peer for requester in self._requesters.values()])

    def reopen(self, policy: PeerPolicy) -> None:
        """Disconnect every requester, drop all answers, and bind again."""
        self._drop_all("gone")
        self._endpoint.close()
        self._endpoint = reopening(self._opener(policy))(self)

    # -- peers ---------------------------------------------------------------------------------------------------------

    def opened(self, peer: Peer) -> None:
        """Add a requester."""
        self._requesters[peer.id] = _Requester(peer)

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Ignore a subscription: a ROUTER socket has no subscribers."""

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Ignore the end of a subscription."""

    def peer_of(self, identity: bytes) -> Peer:
        """Return the connection of a requester, by the identity that `on_request` got."""
        return self._requesters[int.from_bytes(identity, "big")].peer

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        """Pass a request to `on_request`."""
        self._on_request([peer.id.to_bytes(8, "big"), *frames])

    def drained(self, peer: Peer) -> None:
        """Continue the answer to a requester that is writable again."""
        requester = self._requesters.get(peer.id)
        if requester is not None and requester.session is not None:
            self._sender.resume(requester.session)

    def closed(self, peer: Peer, reason: str) -> None:
        """Remove a requester, and count its unfinished answers."""
        requester = self._requesters.pop(peer.id, None)
        if requester is None:
            return
        if requester.asked and requester.asked[0].answer.over and peer.unsent_bytes == 0:
            self._count_first(requester)  # the requester left right after the end of this answer
        outcomes = {STALLED: STALLED, Reason.INTERNAL: "refused"}
        self._drop(requester, outcomes.get(reason, "gone"))

    # -- answers -------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> int:
        """Number of unfinished answers, including waiting requests."""
        return sum(len(requester.asked) for requester in self._requesters.values())

    def send(self, answer: Answer, messages: Iterator[list[bytes]]) -> None:
        """Start an answer, or queue it after the answers to earlier requests of the same peer."""
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
        """Start the answer to a requester's oldest request."""
        requester.session = Session(
            requester.peer,
            self._encoded(requester, requester.asked[0]),
            ended=lambda: self._go_on(requester),
            stalled=lambda: requester.peer.close(STALLED),
            limited=True,
        )
        self._sender.start(requester.session)

    def _encoded(self, requester: _Requester, asked: _Asked) -> Iterator[bytes]:
        """Yield the encoded messages of an answer; ``b""`` while the next message is still being built."""
        for frames in iter([asked.answer.refusal()]) if asked.refused else asked.messages:
            if not frames:
                yield b""
                continue
            requester.in_message = isinstance(frames, Unfinished)
            self._stats.replay_batches += not requester.in_message
            yield encode_message(frames[1:], unfinished=requester.in_message)

    def _go_on(self, requester: _Requester) -> None:
        """Count a finished answer, and start the requester's next answer."""
        self._count_first(requester)
        requester.session = None
        if requester.asked:
            self._begin(requester)

    def _count_first(self, requester: _Requester) -> None:
        """Remove a requester's oldest request, and count its outcome."""
        answer, _, refused = requester.asked.popleft()
        self._stats.replay_requests["refused" if refused else answer.outcome] += 1
        self._stats.replay_waiting -= 1
        if len(requester.asked) == MAX_QUEUED:
            requester.peer.resume()

    def _drop(self, requester: _Requester, outcome: str) -> None:
        """Drop a requester's unfinished answers, and count them with this outcome."""
        if requester.session is not None:
            self._sender.stop(requester.session)
            requester.session = None
        self._stats.replay_requests[outcome] += len(requester.asked)
        self._stats.replay_waiting -= len(requester.asked)
        requester.asked.clear()
        requester.peer.resume()

    def end(self) -> int:
        """End every unfinished answer with END, and count it. Return the number of these answers."""
        count = self.busy
        for requester in self._requesters.values():
            if requester.in_message:
                requester.peer.close(Reason.CLOSED)  # END would become part of the unfinished message
            unfinished = [asked.answer for asked in requester.asked if not asked.answer.over]
            requester.peer.write(b"".join(encode_message(answer.refusal()[1:]) for answer in unfinished))
        self._drop_all("cut_off")
        return count

    def _drop_all(self, outcome: str) -> None:
        for requester in self._requesters.values():
            self._drop(requester, outcome)

    def close(self, linger: float = 0.0) -> None:
        """Close the endpoint and drop unfinished answers. Written bytes are sent for up to ``linger`` seconds."""
        self._drop_all("cut_off")
        self._endpoint.close(linger)
        self._stats.replay_waiting_limit -= self._waiting_limit
        self._waiting_limit = 0
