"""`Subscriber`: one engine's stream, or one of kvbus's, in order and complete, as an async iterator."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Self

from kvbus.client.outputs import Ask, AskSnapshot, Deliver, Malformed, Output, Replace, StopAsking
from kvbus.client.sequence import Sequence
from kvbus.client.updates import Received, Rejected, Snapshot, Update
from kvbus.core.types import Reason
from kvbus.core.wire.codec import Batch, decode_batch
from kvbus.transport.client.subscriber import AnswerFraming, StreamSockets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from types import TracebackType

    from kvbus.client.timeouts import BufferLimits, Timing
    from kvbus.transport.client.subscriber import Context
    from kvbus.transport.curve import Curve

_YIELD_EVERY: Final = 256  # updates handed out before other tasks have their turn


class SubscriberClosedError(Exception):
    """The subscriber was closed while, or before, it was asked for the next update."""


class Subscriber:
    """Subscribe to a stream of KV-cache events.

    The stream is rebuilt by the publisher's snapshot, or by its replay from seq 0, then followed; batches come in
    order and once each. What is missing is asked for; a publisher's restart is noticed and rebuilt from. Feed
    each update to a `BlockView` and it holds what the publisher holds.

    Two ways to use it: ``async for update in Subscriber(…)`` opens at the first step and closes when the loop
    is left, by ``break``, an exception or cancellation; ``async with Subscriber(…) as subscriber`` keeps it
    open in between, and `receive` can be awaited (and cancelled, with nothing lost) one update at a time.

    Sockets are read only while an update is awaited: a slow caller is slow at its own expense, at the
    publisher's high-water mark batches drop, and the gap is then asked for.

    Args:
        endpoint: the publisher's PUB endpoint, such as ``tcp://127.0.0.1:5557``; None replays without a live
        stream.
        replay_endpoint: its replay ROUTER; without it and without snapshots nothing can be rebuilt and every gap
        is lost.
        snapshot_endpoint: its snapshot ROUTER: at the start, after a restart and where the replay cannot fill a
        gap, one `Snapshot` takes the place of a replay from seq 0. Best with a replay endpoint, which then fills
        gaps and stands in where there is no snapshot.
        topic: subscription prefix; replay answers are not filtered by it.
        bind: True for publishers that dial in (vLLM with a concrete host).
        from_start: False begins with the first live batch; replay and snapshots then serve gaps and restarts only.
        framing: layout of replay answers; ``auto`` accepts every known one.
        timing: timeouts in seconds and attempts.
        limits: bounds of what is held back.
        hwm: messages ZeroMQ queues for each socket.
        max_message_bytes: limit of one frame, in bytes.
        context: a ZeroMQ context to share, for ``inproc://`` endpoints; by default the subscriber has its
        own.

        curve: keys for a publisher that wants CURVE, from `client_keys`.

    Raises:
        ValueError: no endpoint is given, or keys for a socket that binds.
    """

    def __init__(
        self,
        endpoint: str | None,
        replay_endpoint: str | None = None,
        *,
        snapshot_endpoint: str | None = None,
        topic: bytes = b"",
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
            raise ValueError("a subscriber needs an endpoint, a replay endpoint, a snapshot endpoint, or several")
        if curve is not None and bind:
            raise ValueError(
                "keys are for publishers that are connected to; one that dials in cannot be asked for its key"
            )
        self._live: Final = endpoint is not None
        self._sequence: Final = Sequence(
            replay=replay_endpoint is not None,
            snapshot=snapshot_endpoint is not None,
            from_start=from_start,
            timing=timing,
            limits=limits,
        )
        self._sockets: Final = StreamSockets(
            endpoint,
            replay_endpoint,
            wake=self._wake,
            snapshot_endpoint=snapshot_endpoint,
            topic=topic,
            bind=bind,
            hwm=hwm,
            max_message_bytes=max_message_bytes,
            framing=framing,
            context=context,
            curve=curve,
        )
        self._updates: deque[Update | _Decoding] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False
        self._closed = False
        self._managed = False
        self._handed_out = 0

    @property
    def endpoint(self) -> str | None:
        """The live endpoint; once open, the one really bound, port included."""
        return self._sockets.endpoint

    @property
    def epoch(self) -> int:
        """Restarts of the publisher noticed so far."""
        return self._sequence.epoch

    @property
    def duplicates(self) -> int:
        """Batches left out because they had come before."""
        return self._sequence.duplicates

    @property
    def pending(self) -> int:
        """Updates ready to be received."""
        return len(self._updates)

    def open(self) -> None:
        """Open the sockets; `receive` does it too. Needs a running event loop.

        Raises:
            BindError: the endpoint cannot be bound.
            ValueError: an endpoint is malformed.
            SubscriberClosedError: it was closed before; a new one is needed.
        """
        if self._closed:
            raise SubscriberClosedError("the subscriber is closed")
        if self._loop is not None:
            return
        self._sockets.open()
        self._loop = asyncio.get_running_loop()
        self._follow(self._sequence.open(self._now()))
        if not self._live or (self.endpoint or "").startswith("inproc://"):
            self.on_connected()  # no connection to wait for, or none that tells

    async def aclose(self) -> None:
        """Close the sockets at once, once; a `receive` that waits ends with `SubscriberClosedError`."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        await self._sockets.aclose()

    async def receive(self) -> Update:
        """Wait for the next update. Cancelling it loses nothing.

        Raises:
            SubscriberClosedError: closed, now or before.
            BindError: the first call opens the sockets, see `open`.
        """
        self.open()
        self._handed_out += 1
        if self._handed_out % _YIELD_EVERY == 0:
            await asyncio.sleep(0)
        while not self._updates:
            if self._closed:
                raise SubscriberClosedError("the subscriber is closed")
            self._woken = False
            more = self._sockets.pump(self)
            # after the sockets: an answer that waits there is not a late one
            self._follow(self._sequence.tick(self._now()))
            if self._updates:
                break
            if more:
                await asyncio.sleep(0)
            else:
                await self._wait()
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

    # -- the sockets' handler -------------------------------------------------------------------------------

    def on_live(self, frames: list[bytes]) -> None:
        """Take a live message (called by the sockets)."""
        if len(frames) != 3:
            self._updates.append(Rejected(None, frames[0], Reason.FRAME_COUNT))
            return
        self._follow(self._sequence.live(frames[0], frames[1], frames[2], self._now()))

    def on_replayed(self, topic: bytes, seq: bytes, payload: bytes) -> None:
        """Take a replayed batch (called by the sockets)."""
        self._follow(self._sequence.replayed(topic, seq, payload, self._now()))

    def on_replay_ended(self) -> None:
        """Take an END marker (called by the sockets)."""
        self._follow(self._sequence.replay_ended(self._now()))

    def on_snapshot(self, frames: list[bytes]) -> None:
        """Take a snapshot (called by the sockets)."""
        self._follow(self._sequence.snapshot(frames, self._now()))

    def on_connected(self) -> None:
        """Take note of a connection (called by the sockets)."""
        self._follow(self._sequence.connected(self._now()))

    def on_interrupted(self) -> None:
        """Take note of a broken connection (called by the sockets)."""
        self._follow(self._sequence.interrupted())

    # -- inside ---------------------------------------------------------------------------------------------

    def _follow(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Deliver):
                self._updates.append(_decoded(output))
            elif isinstance(output, Ask):
                self._sockets.ask(output.start)
            elif isinstance(output, Replace):
                self._updates.append(_Decoding(output))
            elif isinstance(output, AskSnapshot):
                self._sockets.ask_snapshot()
            elif isinstance(output, StopAsking):
                self._sockets.stop_asking()
            elif isinstance(output, Malformed):
                self._updates.append(Rejected(None, output.topic, output.reason))
            else:
                self._updates.append(output)

    async def _wait(self) -> None:
        if self._woken or self._loop is None:
            return
        if self._waiter is not None:
            raise RuntimeError("another task already awaits this subscriber")
        self._waiter = self._loop.create_future()
        deadline = self._sequence.deadline
        timer = None if deadline is None else self._loop.call_at(deadline, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _now(self) -> float:
        if self._loop is None:
            raise RuntimeError("the subscriber is not open")
        return self._loop.time()


class _Decoding:
    """A snapshot being decoded, piece by piece, because it may be a million blocks; kept if a receive is cancelled."""

    def __init__(self, source: Replace) -> None:
        self.seq: Final = source.seq
        self.batches: list[Batch] = []
        self.rejected: list[Rejected] = []
        self._chunks: Final = iter(source.chunks)

    def steps(self) -> Iterator[None]:
        """Decode what is left, pausing now and then."""
        for chunk in self._chunks:
            decoded = decode_batch(chunk)
            if isinstance(decoded, Reason):
                self.rejected.append(Rejected(self.seq, b"", decoded))
            else:
                self.batches.append(decoded)
            yield


def _decoded(batch: Deliver) -> Received | Rejected:
    decoded = decode_batch(batch.payload)
    if isinstance(decoded, Reason):
        return Rejected(batch.seq, batch.topic, decoded)
    return Received(batch.seq, batch.topic, decoded, batch.replayed)
