"""`Subscriber`: an async iterator over one stream of an engine or of kvbus, complete and in order."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Final, Self

from kvbus.client.reachability import Reachability
from kvbus.client.sequence import Output, Payload, Replace, Sequence, Timing
from kvbus.client.updates import Conflict, Gap, Lost, Received, Rejected, Restarted, Snapshot, Update
from kvbus.core.sequencing.actions import Ask, AskSnapshot, Deliver, Stop
from kvbus.core.types import Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.schema import Batch
from kvbus.transport.client.subscriber import AnswerFraming, StreamSockets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from types import TracebackType

    from kvbus.client.sequence import BufferLimits
    from kvbus.core.types import Refused
    from kvbus.transport.client.subscriber import Context
    from kvbus.transport.curve import Curve

_YIELD_EVERY: Final = 256  # number of updates that `receive` returns before it lets other tasks run


class SubscriberClosedError(Exception):
    """The subscriber is closed, or was closed while `receive` waited."""


class Subscriber:
    """A subscription to one stream of KV-cache events.

    The subscriber rebuilds the state from a snapshot of the publisher, or from its replay from seq 0, and then follows
    the live stream. It yields each batch once and in order. It requests missing batches. If the publisher restarts, it
    rebuilds the state. If you pass each update to a `BlockView`, the view has the blocks that the publisher holds.

    There are two ways to use it. ``async for update in Subscriber(…)`` opens the sockets at the first step, and closes
    them when the loop ends by ``break``, an exception or cancellation. ``async with Subscriber(…) as subscriber`` keeps
    them open for the block; `receive` then waits for one update at a time, and cancelling it loses no update.

    The subscriber reads its sockets only while `receive` waits. If the caller is slow, the publisher drops batches at
    its high-water mark, and the subscriber requests the missing batches.

    Args:
        endpoint: the publisher's PUB endpoint, such as ``tcp://127.0.0.1:5557``; None for a replay without a live
            stream.
        replay_endpoint: the publisher's ROUTER endpoint for replays. Without it and without snapshots, the view begins
            empty, and missing batches are always lost.
        snapshot_endpoint: the publisher's ROUTER endpoint for snapshots. One `Snapshot` replaces the replay from seq 0
            at the start, after a restart, and if the replay cannot fill a gap. Set a replay endpoint too: it fills
            gaps, and it is used if the publisher has no snapshot.
        topic: the prefix of the topics to subscribe to. It does not filter replay answers.
        by_topic: True for kvbus's ``layout: per_topic``. Each topic is then a separate stream with its own seqs and
            state, and each update contains its topic. There is no replay, because kvbus sends the state on the live
            connection.
        bind: True if the publisher connects to the subscriber (vLLM with a concrete host).
        from_start: False to begin with the first live batch. Replays and snapshots then only repair gaps and restarts.
        framing: the layout of replay answers; ``auto`` accepts every known layout.
        timing: timeouts in seconds, and attempts.
        limits: limits of the buffers.
        hwm: maximum number of messages that ZeroMQ queues for each socket.
        max_message_bytes: maximum size of one frame, in bytes.
        context: a ZeroMQ context to share, for ``inproc://`` endpoints; None: the subscriber creates its own.
        curve: the keys for a publisher that requires CURVE, from `client_keys`.

    Raises:
        ValueError: there is no endpoint, or there are keys for a socket that binds, or a replay or snapshot endpoint is
            set together with ``by_topic``.
    """

    def __init__(
        self,
        endpoint: str | None,
        replay_endpoint: str | None = None,
        *,
        snapshot_endpoint: str | None = None,
        topic: bytes = b"",
        by_topic: bool = False,
        bind: bool = False,
        from_start: bool = True,
        framing: AnswerFraming = "auto",
        timing: Timing | None = None,
        limits: BufferLimits | None = None,
        hwm: int = 100_000,
        max_message_bytes: int = 64 * 1024 * 1024,
        context: Context | None = None,
        curve: Curve | None = None,
    ) -> None:
        if endpoint is None and replay_endpoint is None and snapshot_endpoint is None:
            raise ValueError("a subscriber needs at least one of endpoint, replay_endpoint and snapshot_endpoint")
        if curve is not None and bind:
            raise ValueError(
                "CURVE needs a subscriber that connects: otherwise it cannot check the key of a publisher that connects"
            )
        if by_topic and (replay_endpoint is not None or snapshot_endpoint is not None):
            raise ValueError("with by_topic there can be no replay and no snapshot, because each is of one stream")
        self._live: Final = endpoint is not None

        def sequence() -> Sequence:
            return Sequence(
                replay=replay_endpoint is not None,
                snapshot=snapshot_endpoint is not None,
                from_start=from_start,
                timing=timing,
                limits=limits,
            )

        self.by_topic: Final = by_topic
        self._sequence: Final = sequence()
        self._new_sequence: Final = sequence
        self._topics: Final[dict[bytes, Sequence]] = {}
        """The `Sequence` of each topic, which puts the topic's batches in order; empty without ``by_topic``."""
        self._up = False
        self._sockets: Final = StreamSockets(
            endpoint,
            replay_endpoint,
            handler=self,
            snapshot_endpoint=snapshot_endpoint,
            topic=topic,
            bind=bind,
            hwm=hwm,
            max_message_bytes=max_message_bytes,
            framing=framing,
            context=context,
            curve=curve,
        )
        timing = timing or Timing()
        self._reachability: Final = Reachability(bind=bind, after=timing.unreachable_s, report=self._report)

        # The updates for the caller, and the number of updates that `receive` has returned.
        self._updates: deque[Update | _Decoding] = deque()
        self._handed_out = 0

        # The event loop, and the future for which `receive` waits.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None

        # Whether the subscriber is closed, and whether an ``async with`` block will close it.
        self._closed = False
        self._managed = False

    @property
    def endpoint(self) -> str | None:
        """The endpoint of the live stream. After `open`, a bound endpoint has its real port."""
        return self._sockets.endpoint

    @property
    def epoch(self) -> int:
        """Number of publisher restarts that the subscriber has noticed.

        With ``by_topic``, it is the sum over all topics.
        """
        return sum(sequence.epoch for sequence in self._sequences)

    @property
    def duplicates(self) -> int:
        """Number of batches that were dropped as duplicates."""
        return sum(sequence.stats.duplicates for sequence in self._sequences)

    @property
    def pending(self) -> int:
        """Number of updates that `receive` can return without waiting."""
        return len(self._updates)

    def open(self) -> None:
        """Open the sockets, in a running event loop. The first call of `receive` does this too.

        Raises:
            BindError: the endpoint cannot be bound.
            ValueError: an endpoint is malformed.
            SubscriberClosedError: the subscriber is closed. Create a new one.
        """
        if self._closed:
            raise SubscriberClosedError("the subscriber is closed")
        if self._loop is not None:
            return
        self._sockets.open()
        self._loop = asyncio.get_running_loop()
        self._follow(self._sequence.open(self._now()))
        self._reachability.missing_at(self.endpoint or "", self._now())
        if not self._live or (self.endpoint or "").startswith("inproc://"):
            # Without a live stream there is no connection to wait for, and ZeroMQ reports no connection for an inproc
            # endpoint. So treat the stream as connected now.
            self.on_connection(up=True)

    async def aclose(self) -> None:
        """Close the sockets immediately. A waiting `receive` raises `SubscriberClosedError`."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        try:
            await self._reachability.aclose()
        finally:  # close the sockets even if the caller is cancelled during this wait
            await self._sockets.aclose()

    async def receive(self) -> Update:
        """Wait for the next update, and return it. Cancelling this loses no update.

        Raises:
            SubscriberClosedError: the subscriber is closed, or was closed during the wait.
            BindError: the first call opens the sockets, and the endpoint cannot be bound.
        """
        self.open()
        self._handed_out += 1
        if self._handed_out % _YIELD_EVERY == 0:
            await asyncio.sleep(0)
        while not self._updates:
            if self._closed:
                raise SubscriberClosedError("the subscriber is closed")
            await self._wait()
            if self._closed:
                # The subscriber was closed during the wait. Send no request: nobody would close its connection.
                continue
            now = self._now()
            self._reachability.look(now)
            if self._sockets.unread:
                self._sequence.unread(now)
            self._follow(self._sequence.tick(now))
            for topic, sequence in self._topics.items():
                self._follow(sequence.tick(now), topic)
        update = self._updates[0]
        if isinstance(update, _Decoding):
            for _ in update.steps():
                await asyncio.sleep(0)
            self._updates.popleft()
            self._updates.extendleft(reversed(update.rejected))
            return Snapshot(update.seq, tuple(update.batches))
        self._updates.popleft()
        return update

    async def __aiter__(self) -> AsyncIterator[Update]:
        try:
            while True:
                try:
                    update = await self.receive()
                except SubscriberClosedError:
                    return
                yield update
        finally:
            if not self._managed:
                await self.aclose()

    async def __aenter__(self) -> Self:
        self._managed = True
        self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # -- callbacks of the sockets

    def on_live(self, frames: list[bytes]) -> None:
        """Handle a message of the live stream. The sockets call this."""
        if not self.by_topic:
            self._follow(self._sequence.live(frames, self._now()))
            return
        topic = frames[0]
        sequence = self._topics.get(topic)
        if sequence is None:
            sequence = self._topics[topic] = self._new_sequence()
            self._follow(sequence.open(self._now()), topic)
            if self._up:
                self._follow(sequence.connected(self._now()), topic)
        self._follow(sequence.live(frames, self._now()), topic)

    def on_replayed(self, frames: list[bytes]) -> None:
        """Handle a message of a replay answer. The sockets call this."""
        self._follow(self._sequence.replayed(frames, self._now()))

    def on_snapshot(self, frames: list[bytes]) -> None:
        """Handle the frames of a snapshot: queue the updates that result from it. The sockets call this."""
        self._follow(self._sequence.snapshot(frames, self._now()))

    def on_connection(self, up: bool) -> None:
        """Handle a new connection, or the loss of a connection. The sockets call this."""
        now = self._now()
        if up:
            self._reachability.connected()
        else:
            self._reachability.missing_at(self.endpoint or "", now)
        self._up = up
        for topic, sequence in [(b"", self._sequence), *self._topics.items()]:
            self._follow(sequence.connected(now) if up else sequence.interrupted(now), topic)

    def on_refused(self, reason: Refused) -> None:
        """Handle a failed handshake. The sockets call this."""
        self._reachability.refused(reason)

    # -- internal methods

    @property
    def _sequences(self) -> list[Sequence]:
        return [self._sequence, *self._topics.values()]

    def _follow(self, outputs: list[Output], topic: bytes = b"") -> None:
        for output in outputs:
            if isinstance(output, Deliver):
                self._updates.append(_decoded(output))
            elif isinstance(output, Ask):
                self._sockets.ask(output.start)
                self._sequence.sent(output.request, self._now())
            elif isinstance(output, Replace):
                self._updates.append(_Decoding(output))
            elif isinstance(output, AskSnapshot):
                self._sockets.ask_snapshot()
                self._sequence.sent(output.request, self._now())
            elif isinstance(output, Stop):
                self._sockets.stop_asking()
            elif topic and isinstance(output, Gap | Lost | Restarted | Conflict):
                self._updates.append(replace(output, topic=topic))
            else:
                self._updates.append(output)
        self._wake()

    def _report(self, update: Update) -> None:
        self._updates.append(update)
        self._wake()

    async def _wait(self) -> None:
        """Read the sockets until a message has arrived, a timeout is due, or the subscriber is closed."""
        if self._loop is None:
            return
        if self._waiter is not None:
            raise RuntimeError("another task already awaits this subscriber")
        self._waiter = self._loop.create_future()
        # Read the sockets before setting the timer, because an answer that has already arrived must not time out.
        self._sockets.read(on=True)
        deadline = min(self._reachability.deadline, *(sequence.deadline for sequence in self._sequences))
        timer = None if deadline == inf else self._loop.call_at(deadline, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._sockets.read(on=False)
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _now(self) -> float:
        if self._loop is None:
            raise RuntimeError("the subscriber is not open")
        return self._loop.time()


class _Decoding:
    """A snapshot that is decoded in steps, because it may have a million blocks.

    If `receive` is cancelled, the decoded part is kept for its next call.
    """

    def __init__(self, source: Replace) -> None:
        self.seq: Final = source.seq
        self.batches: list[Batch] = []
        self.rejected: list[Rejected] = []
        self._chunks: Final = iter(source.chunks)

    def steps(self) -> Iterator[None]:
        """Decode the remaining batches. Each step decodes one batch."""
        for chunk in self._chunks:
            decoded = decode_batch(chunk)
            if isinstance(decoded, Reason):
                self.rejected.append(Rejected(self.seq, b"", decoded))
            else:
                self.batches.append(decoded)
            yield


def _decoded(batch: Deliver) -> Received | Rejected:
    payload = batch.payload
    topic, replayed = (payload.topic, payload.replayed) if isinstance(payload, Payload) else (b"", False)
    decoded = decode_batch(payload)
    if isinstance(decoded, Reason):
        return Rejected(batch.seq, topic, decoded)
    return Received(batch.seq, topic, decoded, replayed)
