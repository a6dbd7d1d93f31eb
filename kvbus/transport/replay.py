"""The replay server of one output stream: it answers each requester at its own pace, and all of them fairly.

Answers take turns by bytes (deficit round robin), and newcomers stand back until they have shown that they read
(:mod:`kvbus.transport.replay_line`): few of them have a place at a time, for three turns, and they wait a moment for
one that reads and is about to go on. Only requesters that can be written to take part. One that does not read is
parked: it holds no place, delays nobody, and takes part again when it has read. How far it has come is measured in
bytes that its kernel has acknowledged: a slow link is never given up, and one that acknowledges nothing for
``stall_timeout`` is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from kvbus.core.stats import OutputStats
from kvbus.transport.answer_reader import AnswerReader
from kvbus.transport.replay_budget import Budget
from kvbus.transport.replay_endpoint import ReplayEndpoint
from kvbus.transport.replay_line import PAUSE, TURN, Line, WaitingLine
from kvbus.transport.requester import STAY, Place, Requester
from kvbus.transport.sockets import PLAIN, PeerPolicy
from kvbus.transport.zmtp.endpoint import SYSTEM, System
from kvbus.transport.zmtp.peer import Peer
from kvbus.transport.zmtp.reasons import Reason
from kvbus.transport.zmtp.wire import encode_message

SLICE: Final = 0.001
"""Seconds one turn may take. A state snapshot of a million blocks takes long, and the live stream must go on."""

LOOK: Final = 0.01
"""Seconds between two looks at answers that the kernel has not taken yet."""

CHECK: Final = 1.0
"""Seconds between two looks for requesters that acknowledge nothing, at most."""

MAX_WAITING: Final = 10_000
"""Requests that may wait for their turn. The server refuses and counts further ones."""

STALLED: Final = "stalled"

Handler = Callable[[list[bytes]], None]


class ReplayServer:
    """Receive replay requests on one endpoint, and send the relay's answers.

    Args:
        endpoint: the endpoint to bind.
        on_request: called with each request's frames, an identity of the connection first. Pass the answer to
            :meth:`send`.
        stats: counters of the output.
        budget: limit of answers that take part in the turns, shared by the servers of an output; others wait.
        stall_timeout: seconds without an acknowledgement before the server ends a connection.
        policy: who may connect, and the largest frame to accept.
        clock: measures progress: seconds, monotonic; None for the loop's clock.
        system: the operating system.

    Raises:
        BindError: the endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        on_request: Handler,
        stats: OutputStats,
        budget: Budget | None = None,
        stall_timeout: float = 30.0,
        policy: PeerPolicy = PLAIN,
        clock: Callable[[], float] | None = None,
        system: System = SYSTEM,
    ) -> None:
        self._on_request = on_request
        self._stats = stats
        self._stall_timeout = stall_timeout
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._endpoint = ReplayEndpoint(endpoint, self, stats, policy, system)

        # Requesters, by their identity, and those of them that have something to be done.
        self._requesters: dict[bytes, Requester] = {}
        self._sending = Line()
        self._waiting = WaitingLine()
        self._finishing: dict[Requester, None] = {}
        self._reading: dict[Requester, None] = {}  # while they are parked
        self._last_read = -PAUSE  # when one of these has last had a turn

        # Places in the turns: the output's, and how many of them this server holds. Unfinished answers without one.
        self._budget = budget or Budget(64, stats)
        self._places = 0
        self._queued = 0
        self._waiting_limit = MAX_WAITING
        stats.replay_waiting_limit += MAX_WAITING

        # Scheduled calls: the next turn, the next look at finishing answers, the next check for stalled requesters.
        self._handle: asyncio.Handle | None = None
        self._pause: asyncio.Handle | None = None
        self._look: asyncio.Handle | None = None
        self._check = self._loop.call_later(self._between_checks, self._look_for_stalled)

    @property
    def _between_checks(self) -> float:
        return min(CHECK, self._stall_timeout / 4)

    def allow(self, clients: Collection[bytes]) -> None:
        """Replace the allow-list; requesters that are not on it any more are disconnected."""
        self._endpoint.allow(clients)

    def reopen(self, policy: PeerPolicy) -> None:
        """Disconnect every requester, drop their answers, and bind again."""
        self._drop_all("gone")
        self._endpoint.reopen(policy)

    # What happens to peers.

    def opened(self, peer: Peer) -> None:
        """Take in a connection."""
        requester = Requester(peer, self._clock())
        self._requesters[requester.identity] = requester

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Nobody subscribes to a ROUTER."""

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Nobody subscribes to a ROUTER."""

    def peer_of(self, identity: bytes) -> Peer:
        """Return the connection of a requester, whose request is being handed on."""
        return self._requesters[identity].peer

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        """Hand on a request."""
        self._on_request([peer.id.to_bytes(8, "big"), *frames])

    def drained(self, peer: Peer) -> None:
        """A parked requester has read everything: it takes part again."""
        requester = self._requesters.get(peer.id.to_bytes(8, "big"))
        if requester is None or requester.place is not Place.PARKED:
            return
        self._reading.pop(requester, None)
        if requester.answer is not None and requester.answer.done:
            self._over(requester)
        else:
            self._wait(requester)

    def closed(self, peer: Peer, reason: str) -> None:
        """Forget a requester, and count what it did not get."""
        requester = self._requesters.pop(peer.id.to_bytes(8, "big"), None)
        if requester is None:
            return
        if requester.place is Place.FINISHING and peer.unsent_bytes == 0:
            del self._finishing[requester]
            self._over(requester)  # it has got all of this one, and left before the next look
        self._forget(requester, STALLED if reason == STALLED else "gone")

    # Answers: they wait for a place, take their turns, and are over when the kernel has taken all of it.

    @property
    def busy(self) -> int:
        """Unfinished answers, waiting requests included."""
        return self._places + self._queued

    def send(self, answer: AnswerReader) -> None:
        """Begin an answer, or let it wait for its turn: that of others, or of an earlier request of the same peer."""
        requester = self._requesters.get(answer.identity)
        if requester is None:
            self._stats.replay_requests["gone"] += 1
            return
        refused = self._queued >= self._waiting_limit
        requester.ask(answer, refused=refused)
        self._count_queued(1)
        if requester.place is Place.IDLE:
            self._wait(requester, first=refused)

    def _count_queued(self, count: int) -> None:
        self._queued += count
        self._stats.replay_waiting += count

    def _wait(self, requester: Requester, *, first: bool = False) -> None:
        """Let a requester wait for a place in the turns; a refusal is short and goes first."""
        requester.place = Place.WAITING
        self._waiting.add(requester, first=first)
        self._admit()

    def _admit(self) -> None:
        """Give a place to as many waiting requesters as there are places for."""
        while self._waiting.admissible(self._sending, self._budget.limit) and self._budget.take(self._free):
            requester = self._waiting.next()
            self._waiting.charge(1)
            requester.place = Place.SENDING
            requester.stay = 0
            self._places += 1
            self._count_queued(-1)
            self._sending.add(requester)
        while found := self._waiting.overtake(self._sending, self._budget.limit):
            reader, newcomer = found
            reader.place, newcomer.place = Place.SENDING, Place.WAITING
            self._sending.add(reader)
            self._waiting.add(newcomer, first=True)
        if not self._waiting.admissible(self._sending, self._budget.limit):
            self._budget.leave(self._free)
        if self._sending:
            self._schedule()

    def _free(self) -> None:
        """Admit waiting requesters, after another server of this output has released a place."""
        self._schedule()

    def _schedule(self) -> None:
        if self._handle is not None:
            return
        rest = self._last_read + PAUSE - self._loop.time()
        if rest <= 0 or not self._newcomers_wait:
            if self._pause is not None:
                self._pause.cancel()
            self._handle = self._loop.call_soon(self._turn)
        elif self._pause is None:
            self._pause = self._loop.call_later(rest, self._turn)

    @property
    def _newcomers_wait(self) -> bool:
        """Newcomers have had their part, and one that reads will go on."""
        return bool(self._reading) and not self._sending.reading and not self._sending.behind

    def _release(self, place: Place, requester: Requester) -> None:
        """Take a requester out of the turns; its answer is unfinished all the same."""
        requester.place = place
        self._places -= 1
        self._count_queued(1)
        self._budget.release(1)

    def _turn(self) -> None:
        self._handle = self._pause = None
        now = self._loop.time()
        until = now + SLICE
        try:
            for _ in range(len(self._sending)):
                if self._newcomers_wait and now < self._last_read + PAUSE:
                    break
                requester = self._sending.next()
                self._serve(requester, until)
                self._last_read = now if requester.reads else self._last_read
                if self._loop.time() >= until:
                    break
        finally:
            self._admit()

    def _serve(self, requester: Requester, until: float) -> None:
        """Send one requester its share, and put it where it belongs then."""
        peer = requester.peer
        if self._waiting and requester.stay and not requester.look():
            if requester.stay == STAY:
                self._release(Place.WAITING, requester)  # the next one may be one that reads
                self._waiting.add_tried(requester)
                return
            if peer.unread_bytes:
                requester.stay += 1
                self._sending.add(requester)
                return
        try:
            messages = self._take(requester, until)
            share = b"".join(messages)
            self._sending.charge(len(share) + TURN)
            if messages:
                peer.write(share, in_two=not requester.reads)
                self._stats.replay_batches += len(messages)
        except BaseException:
            # the others go on; this one can ask again on another connection
            self._requesters.pop(requester.identity, None)
            self._forget(requester, "refused")
            peer.close(Reason.INTERNAL)
            raise
        answer = requester.answer
        if not peer.writable:
            self._release(Place.PARKED, requester)
            if requester.reads:
                self._reading[requester] = None
        elif answer is not None and answer.done:
            self._release(Place.FINISHING, requester)
            self._finishing[requester] = None
            if self._look is None:
                self._look = self._loop.call_soon(self._look_at_finishing)
        elif messages and requester.credit > 0:
            self._sending.add(requester, first=True)  # the time was over before its share was
        else:
            self._sending.add(requester)

    def _take(self, requester: Requester, until: float) -> list[bytes]:
        """Make the messages of one share, or of as much of it as there is time for."""
        if requester.credit <= 0:
            requester.begin_share()
        messages: list[bytes] = []
        while requester.credit > 0:
            message = requester.next_message()
            if message is None:
                break
            if message:
                messages.append(message)
                requester.credit -= len(message)
            if self._loop.time() >= until:
                break
        return messages

    def _look_at_finishing(self) -> None:
        """Find the answers that have left altogether."""
        self._look = None
        for requester in [each for each in self._finishing if not each.peer.waiting_bytes]:
            del self._finishing[requester]
            self._over(requester)
        if self._finishing and self._look is None:
            self._look = self._loop.call_later(LOOK, self._look_at_finishing)

    def _over(self, requester: Requester) -> None:
        """Count the outcome of an answer; the requester's next one waits behind those of others."""
        answer = requester.answer
        if answer is not None:
            outcome = "refused" if requester.refused else answer.outcome
            self._stats.replay_requests[outcome] += 1
            self._count_queued(-1)
        if requester.next_answer():
            self._wait(requester)
        else:
            requester.place = Place.IDLE

    def _look_for_stalled(self) -> None:
        """End the connections of requesters that have acknowledged nothing for too long."""
        now = self._clock()
        for requester in list(self._requesters.values()):
            if requester.stalled(now, self._stall_timeout):
                requester.peer.close(STALLED)
        self._check = self._loop.call_later(self._between_checks, self._look_for_stalled)

    def _forget(self, requester: Requester, outcome: str) -> None:
        """Count the unfinished answers of a requester, and take it out of everything."""
        self._stats.replay_requests[outcome] += requester.unfinished
        if requester.place is Place.SENDING:
            self._sending.remove(requester)
            self._release(Place.IDLE, requester)
        elif requester.place is Place.WAITING:
            self._waiting.remove(requester)
        self._finishing.pop(requester, None)
        self._reading.pop(requester, None)
        self._count_queued(-requester.unfinished)
        requester.clear()
        self._admit()

    def end(self) -> int:
        """Send END for every answer that is not sent whole, and count them; how many they were."""
        count = self.busy
        for requester in self._requesters.values():
            answers = [] if requester.answer is None else [requester.answer]
            answers += [answer for answer, _ in requester.behind]
            requester.peer.write(
                b"".join(encode_message(answer.refusal()[1:]) for answer in answers if not answer.done)
            )
        self._drop_all("cut_off")
        return count

    def _drop_all(self, outcome: str) -> None:
        """Drop all answers and waiting requests, and count them."""
        for handle in (self._handle, self._pause, self._look):
            if handle is not None:
                handle.cancel()
        self._handle = self._pause = self._look = None
        self._stats.replay_requests[outcome] += self.busy
        self._budget.leave(self._free)
        self._budget.release(self._places)
        self._count_queued(-self._queued)
        self._places = 0
        for queue in (self._sending, self._waiting, self._finishing, self._reading):
            queue.clear()
        for requester in self._requesters.values():
            requester.clear()

    def close(self, linger: float = 0.0) -> None:
        """Close the endpoint and drop unfinished answers; what was handed over has ``linger`` seconds to leave."""
        self._drop_all("cut_off")
        self._check.cancel()
        self._endpoint.close(linger)
        self._stats.replay_waiting_limit -= self._waiting_limit
        self._waiting_limit = 0
