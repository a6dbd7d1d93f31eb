"""Tests for the sockets of sources with real publishers.

Each action or failure of an engine causes one event for the relay.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import zmq

from kvbus.config import SourceStream
from kvbus.core.commands import CancelReplay, RequestReplay, RequestSnapshot
from kvbus.core.events import (
    BatchReceived,
    HandshakeFailed,
    RelayEvent,
    ReplayAborted,
    ReplayReceived,
    RequestSent,
    RequestWaits,
    SnapshotReceived,
    SourceDown,
    SourceUp,
    StreamBroken,
    Unread,
)
from kvbus.core.outputs.snapshot import REQUEST
from kvbus.core.types import Reason, Refused
from kvbus.core.wire.frames import END_SEQ
from kvbus.daemon.runtime import EngineSockets
from kvbus.daemon.source_sockets import SourceSockets
from kvbus.transport.curve import Curve
from kvbus.transport.engine.publisher import EnginePublisher
from kvbus.transport.pump import MAX_KEPT_FRAMES
from kvbus.transport.request import RequestConnection
from kvbus.transport.sockets import PeerPolicy
from kvbus.transport.subscription import DialledStream
from kvbus.transport.zmtp.peer import EVENTS
from tests.doubles.bus import eventually
from tests.ports import free_ports
from tests.system.test_descriptors import no_descriptor

PLAIN = PeerPolicy(max_frame_bytes=1_000_000)
SMALL = PeerPolicy(max_frame_bytes=1000)


class Opened:
    """The sockets of a source in slot 3, and the events that they have passed to the relay."""

    def __init__(self, sockets: EngineSockets, carrier: Any = None) -> None:
        self.endpoint, self.replay, self.snapshot = (f"tcp://127.0.0.1:{port}" for port in free_ports(3))
        self.events: list[RelayEvent] = []
        self.bursts = 0
        self.fails = False
        """Whether the handling of each batch raises an error."""
        self.cancels: list[int] = []
        """Ids of replay requests that the test cancels as soon as an answer waits to be read."""
        self.sockets = SourceSockets(
            sockets, self._fed, self._took, self._fed, self._drained, carrier=lambda _: carrier
        )

    def _fed(self, event: RelayEvent) -> None:
        self.events.append(event)
        if isinstance(event, Unread):
            for number in self.cancels:
                self.sockets.cancel(CancelReplay(3, number))

    def _took(self, slot: int, messages: deque[list[bytes]]) -> None:
        while messages:
            event = BatchReceived(slot, messages.popleft())
            if self.fails:
                raise RuntimeError("a defect")
            self.events.append(event)
        self.bursts += 1

    def _drained(self) -> None:
        self.bursts += 1

    def open(self, policy: PeerPolicy = PLAIN) -> None:
        stream = SourceStream("engine", 0, 0, self.endpoint, self.replay, self.snapshot, False, b"", "auto", "count", 3)
        self.sockets.open(stream, policy)

    async def answered(self, *numbers: int) -> None:
        await eventually(lambda: {event.request for event in self.replayed} >= {*numbers}, f"answers to {numbers}")

    @property
    def replayed(self) -> list[ReplayReceived]:
        return [event for event in self.events if isinstance(event, ReplayReceived)]

    def engine(self) -> EnginePublisher:
        return EnginePublisher(self.endpoint, self.replay, bind=True)

    def events_of(self, kind: type[RelayEvent]) -> list[RelayEvent]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


class Remembering(EngineSockets):
    """The real engine sockets, with a list of all sockets that they have opened."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        super().__init__(context)
        self.made: list[Any] = []

    def subscribe(self, endpoint: str, **options: Any) -> DialledStream:
        self.made.append(made := super().subscribe(endpoint, **options))
        return made

    def request(self, endpoint: str, *args: Any, **options: Any) -> RequestConnection:
        self.made.append(made := super().request(endpoint, *args, **options))
        return made


@pytest.fixture
async def engine_sockets(context: zmq.Context[zmq.Socket[bytes]]) -> AsyncIterator[Remembering]:
    made = Remembering(context)
    yield made
    await made.close()


@pytest.fixture
async def opened(engine_sockets: EngineSockets) -> AsyncIterator[Opened]:
    made = Opened(engine_sockets)
    yield made
    made.sockets.close_all()


async def test_connections_and_batches_are_events_of_the_slot(opened: Opened) -> None:
    assert not opened.sockets.is_open(3)
    opened.open()
    assert opened.sockets.is_open(3)
    async with opened.engine() as engine:
        await engine.wait_for_subscriber(60)
        await eventually(lambda: opened.events_of(SourceUp), "the connection")
        engine.publish(b"payload")
        await eventually(lambda: opened.events_of(BatchReceived) and opened.bursts, "a batch, and the end of its burst")
    await eventually(lambda: opened.events_of(SourceDown), "the end of the connection")
    assert opened.events == [SourceUp(3), BatchReceived(3, [b"", bytes(8), b"payload"]), SourceDown(3)]
    opened.sockets.close(3)
    assert not opened.sockets.is_open(3)


async def test_an_error_drops_only_the_message_that_has_caused_it(opened: Opened) -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    opened.open()
    async with opened.engine() as engine:
        await engine.wait_for_subscriber(60)
        opened.fails = True
        for payload in (b"0", b"1", b"2"):
            engine.publish(payload)
        await eventually(lambda: errors, "an error")
        opened.fails = False

        def are_all_taken() -> bool:
            opened.sockets.look()  # as at each tick of the daemon
            return len(errors) + len(opened.events_of(BatchReceived)) == 3

        await eventually(are_all_taken, "the remaining batches")


async def test_the_answer_to_a_replay_carries_its_request(opened: Opened) -> None:
    opened.open()
    async with opened.engine() as engine:
        for payload in (b"0", b"1", b"2"):
            engine.publish(payload, live=False)
        opened.sockets.ask(RequestReplay(3, 7, 1))
        await eventually(lambda: len(opened.events_of(ReplayReceived)) == 3, "two batches and the end")
    answer = [event for event in opened.events if isinstance(event, ReplayReceived)]
    assert {(event.source, event.request) for event in answer} == {(3, 7)}
    assert [event.frames[-2:] for event in answer] == [
        [(1).to_bytes(8, "big"), b"1"],
        [(2).to_bytes(8, "big"), b"2"],
        [END_SEQ, b""],
    ]
    assert not opened.events_of(RequestSent), "a request that leaves at once is not worth an event"


@pytest.fixture
def made(engine_sockets: Remembering) -> list[Any]:
    """Return the list of all sockets that the engine sockets under test have opened."""
    return engine_sockets.made


async def test_an_unread_replay_answer_is_reported(made: list[Any], opened: Opened) -> None:
    def looked() -> list[RelayEvent]:
        opened.sockets.look()
        return opened.events_of(Unread)

    opened.open()
    opened.sockets.ask(RequestReplay(3, 6, 0))
    assert not looked()  # no engine is there that could have sent anything
    opened.sockets.cancel(CancelReplay(3, 6))
    async with opened.engine() as engine:
        engine.publish(b"a batch", live=False)
        opened.sockets.ask(RequestReplay(3, 7, 0))
        asked = made[-1]
        asked.read(on=False)
        # Before the engine has read the request, unread bytes in the kernel may belong to the ZMTP handshake.
        await eventually(lambda: engine.replay_requests, "the request")
        await eventually(looked, "an answer that waits")
        assert opened.events_of(Unread) == [Unread(3, 7)]
        asked.read(on=True)
        await eventually(lambda: len(opened.events_of(ReplayReceived)) == 2, "all of it")
        assert looked() == [Unread(3, 7)]


async def test_a_request_can_be_cancelled_while_the_sockets_are_checked(made: list[Any], opened: Opened) -> None:
    opened.cancels = [7, 8]
    opened.open()
    async with opened.engine() as engine:
        for number in (7, 8):
            opened.sockets.ask(RequestReplay(3, number, 0))
            made[-1].read(on=False)
        await eventually(lambda: engine.replay_requests == 2, "the requests")
        await eventually(lambda: made[-1].unread and made[-2].unread, "answers that wait")
        opened.sockets.look()
    assert opened.events_of(Unread) == [Unread(3, 7)]


@pytest.mark.parametrize("waits", [True, False])
async def test_unread_live_batches_are_reported_when_an_answer_begins(
    made: list[Any], opened: Opened, waits: bool
) -> None:
    opened.open()
    (stream,) = made
    async with opened.engine() as engine:
        await engine.wait_for_subscriber(60)
        engine.publish(b"a batch")
        await eventually(lambda: opened.events_of(BatchReceived), "it to arrive")
        opened.sockets.ask(RequestReplay(3, 7, 0))
        if waits:
            # The engine answers first. While the event loop is blocked, the answer and live batches arrive.
            made[-1].read(on=False)
            await eventually(lambda: engine.replay_requests and made[-1].unread, "the answer")
            made[-1].read(on=True)
            for _ in range(10 * EVENTS):  # more than kvbus reads in one iteration of the event loop
                engine.publish(b"a batch")
            until = time.monotonic() + 60
            while not stream.unread:
                assert time.monotonic() < until
        await eventually(lambda: len(opened.events_of(ReplayReceived)) == 2, "the answer")
    assert opened.events_of(Unread) == ([Unread(3)] if waits else [])


STATE = [b"part %d" % number for number in range(2 * MAX_KEPT_FRAMES)]
"""The frames of a state snapshot.

They are more than ``MAX_KEPT_FRAMES``, the maximum that kvbus keeps of other messages.
"""


async def test_the_answer_to_a_snapshot_carries_its_request(
    opened: Opened, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    opened.open()
    with context.socket(zmq.ROUTER) as engine:
        engine.bind(opened.snapshot)
        opened.sockets.ask(RequestSnapshot(3, 8))
        await eventually(lambda: engine.poll(0), "the request")
        asker, *asked = engine.recv_multipart()
        assert asked == [REQUEST]
        engine.send_multipart([asker, *STATE])
        await eventually(lambda: opened.events_of(SnapshotReceived), "the answer")
    assert opened.events_of(SnapshotReceived) == [SnapshotReceived(3, 8, STATE)]


async def test_a_request_that_is_cancelled_is_not_answered(opened: Opened) -> None:
    opened.open()
    for number in (1, 2):
        opened.sockets.ask(RequestReplay(3, number, 0))  # the request waits, because there is no engine yet
    for _ in range(2):
        opened.sockets.cancel(CancelReplay(3, 1))
    async with opened.engine():
        await eventually(lambda: opened.events_of(ReplayReceived), "the answer to the other one")
    assert opened.events_of(ReplayReceived) == [ReplayReceived(3, 2, [b"", b"", END_SEQ, b""])]


async def test_a_request_that_cannot_be_sent_is_sent_later(opened: Opened) -> None:
    opened.open()
    async with opened.engine() as engine:
        await engine.wait_for_subscriber(60)
        with no_descriptor():
            opened.sockets.ask(RequestReplay(3, 1, 0))
            opened.sockets.ask(RequestReplay(3, 2, 0))
            opened.sockets.cancel(CancelReplay(3, 2))
            assert not opened.events_of(RequestSent), "not within the call: the relay is busy with what asked"
            await eventually(lambda: len(opened.events_of(RequestSent)) >= 2, "two attempts")
        await eventually(lambda: opened.events_of(ReplayReceived), "the answer")
    *failed, sent = opened.events_of(RequestSent)
    assert set(map(str, failed)) == {str(RequestSent(3, 1, sent=False))}
    assert sent == RequestSent(3, 1, sent=True)


async def test_an_unsent_request_ends_with_its_source(opened: Opened) -> None:
    opened.open()
    with no_descriptor():
        opened.sockets.ask(RequestReplay(3, 1, 0))
    opened.sockets.close(3)
    opened.open()
    async with opened.engine() as engine:
        opened.sockets.ask(RequestReplay(3, 2, 0))
        await eventually(lambda: opened.events_of(ReplayReceived), "the answer to the newer one")
        await engine.wait_for_subscriber(60)
    assert not opened.events_of(RequestSent)
    assert {event.request for event in opened.events if isinstance(event, ReplayReceived)} == {2}


@pytest.fixture
def room_for_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))


@pytest.mark.usefixtures("room_for_one_request")
async def test_requests_beyond_the_limit_are_sent_later_oldest_first(opened: Opened) -> None:
    opened.open()
    for number in (1, 2, 3, 4):
        opened.sockets.ask(RequestReplay(3, number, 0))
    assert not opened.events, "not within the call: the relay is busy with what asked"
    await eventually(lambda: len(opened.events_of(RequestWaits)) == 3, "they say that they wait")
    assert opened.events_of(RequestWaits) == [RequestWaits(3, number) for number in (2, 3, 4)]
    async with opened.engine():
        await opened.answered(1)
        opened.sockets.cancel(CancelReplay(3, 3))
        for over, following in ((1, 2), (2, 4)):
            opened.sockets.cancel(CancelReplay(3, over))
            await opened.answered(following)
    assert opened.events_of(RequestSent) == [RequestSent(3, number, sent=True) for number in (2, 4)]
    assert {event.request for event in opened.replayed} == {1, 2, 4}


@pytest.mark.usefixtures("room_for_one_request")
async def test_waiting_requests_end_with_their_source(opened: Opened) -> None:
    opened.open()
    for number in (1, 2):
        opened.sockets.ask(RequestReplay(3, number, 0))
    opened.sockets.close(3)
    opened.open()
    opened.sockets.ask(RequestReplay(3, 3, 0))
    async with opened.engine():
        await opened.answered(3)
    opened.sockets.ask(RequestReplay(3, 4, 0))
    opened.sockets.close_all()
    assert {event.request for event in opened.replayed} == {3}
    assert opened.events_of(RequestWaits) == []


async def test_no_request_waits_without_a_limit_of_descriptors(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    opened.open()
    async with opened.engine():
        for number in range(10):
            opened.sockets.ask(RequestReplay(3, number, 0))
        await opened.answered(*range(10))
    assert opened.events_of(RequestWaits) == opened.events_of(RequestSent) == []


class CarrierOfOne:
    """A carrier: a discoverer that also passes the batches of its one engine to the relay, so kvbus opens no socket."""

    def __init__(self) -> None:
        self.feeds: dict[int, tuple[str, Callable[[RelayEvent], None], Callable[[], None]]] = {}

    def open(self, endpoint: str, slot: int, feed: Callable[[RelayEvent], None], drained: Callable[[], None]) -> None:
        self.feeds[slot] = endpoint, feed, drained

    def close(self, slot: int) -> None:
        del self.feeds[slot]


async def test_a_source_with_a_carrier_has_no_socket(engine_sockets: EngineSockets) -> None:
    carrier = CarrierOfOne()
    opened = Opened(engine_sockets, carrier)
    opened.open()
    endpoint, feed, drained = carrier.feeds[3]
    assert endpoint == opened.endpoint
    feed(BatchReceived(3, [b"", bytes(8), b"payload"]))
    drained()
    assert (len(opened.events), opened.bursts) == (1, 1)
    assert opened.sockets.is_open(3)
    assert opened.sockets.dialled_in(3) is None
    opened.sockets.close_all()
    assert carrier.feeds == {}
    assert not opened.sockets.is_open(3)


async def test_an_oversized_frame_is_an_event(opened: Opened) -> None:
    opened.open(SMALL)
    async with opened.engine() as engine:
        await engine.wait_for_subscriber(60)
        engine.publish(bytes(2000))
        await eventually(lambda: opened.events_of(StreamBroken), "the event")
        opened.sockets.ask(RequestReplay(3, 1, 0))
        await eventually(lambda: opened.events_of(ReplayAborted), "the end of the answer")
    assert opened.events_of(StreamBroken) == [StreamBroken(3, Reason.FRAME_SIZE)]
    assert opened.events_of(ReplayAborted)[0] == ReplayAborted(3, 1)


async def test_an_engine_without_keys_fails_the_handshake(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    public, secret = zmq.curve_keypair()
    opened.open(PeerPolicy(1_000_000, Curve(public, secret, server=public)))
    async with opened.engine():
        await eventually(lambda: opened.events_of(HandshakeFailed), "the event")
    failed = opened.events_of(HandshakeFailed)[0]
    reasons = (Refused.MECHANISM, Refused.CLOSED)  # the reason depends on which side closes first
    assert failed in [HandshakeFailed(3, reason) for reason in reasons]
    assert "source engine: handshake failed: " in caplog.text
    assert not opened.events_of(SourceUp)
