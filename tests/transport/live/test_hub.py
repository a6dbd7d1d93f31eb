"""Tests for an endpoint that many streams share.

They test which router gets which streams, and what a router that never reads costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import zmq

from kvbus.common.errors import BindError
from kvbus.core.commands import SendState
from kvbus.core.outputs.stream import StateTransfer
from kvbus.core.stats import OutputStats
from kvbus.core.wire.frames import ASKS_REPLAY
from kvbus.transport.live import states
from kvbus.transport.live.hub import Hub
from kvbus.transport.live.ring import OVERHEAD
from kvbus.transport.live.stream import LivePublisher
from kvbus.transport.sender import Sender
from kvbus.transport.zmtp.endpoint import Listener
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.settings import DEFAULT_SETTINGS
from tests.doubles.bus import eventually
from tests.ports import free_port
from tests.transport.live.streams import BIG, Slices
from tests.transport.loops import both_loops, turns, u64


class HubStream:
    """One stream of the shared endpoint, and a substitute for the relay that feeds it."""

    def __init__(self, bench: Bench, slot: int, topic: bytes) -> None:
        self.bench, self.slot, self.topic = bench, slot, topic
        self.next_seq = 0
        self.states = 0
        """Number of states that the stream has requested from the relay."""
        self.slices: Any = Slices(1, 10)
        self.live = LivePublisher(
            slot,
            topic,
            "routers",
            partial(bench.hub.open, slot, topic),
            sender=bench.sender,
            stats=bench.stats,
            waiting=[],
            queue_batches=1000,
            send_hwm=10_000,
            send_bytes=1,
            request_state=self._state,
            shared=bench.hub.shared,
        )

    def _state(self, routers: tuple[int, ...]) -> None:
        self.states += 1
        transfer = StateTransfer(self.slices, self.next_seq, self.topic, b"")
        for _ in range(transfer.first_seq, transfer.end_seq):
            self.publish(b"empty")
        self.live.send_state(SendState(0, self.slot, routers, transfer))
        self.bench.most = max(self.bench.most, len(self.bench.under_way))
        peers = [router.peer.id for group in self.bench.under_way for router in group]
        assert len(peers) == len(set(peers))  # one state at a time for each router

    def publish(self, payload: bytes = b"live", size: int = 0) -> None:
        self.live.publish(self.topic, u64(self.next_seq), payload + bytes(size), int(payload == b"live"))
        self.next_seq += 1


class Reader:
    """A SUB socket that checks the seqs of each topic: no batch is missing, except before a state."""

    def __init__(self, bench: Bench, *topics: bytes, slow: bool = False) -> None:
        self.socket = bench.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, 1 if slow else 0)
        if slow:
            self.socket.setsockopt(zmq.RCVBUF, 4096)
        for topic in topics or (b"",):
            self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        self.socket.connect(bench.endpoint)
        self.next: dict[bytes, int] = {}
        self.states: dict[bytes, int] = {}
        self.wrong: list[str] = []

    def read(self) -> dict[bytes, int]:
        while self.socket.poll(0):
            topic, frame, payload = self.socket.recv_multipart()
            seq, expected = int.from_bytes(frame, "big"), self.next.get(topic)
            state = payload.startswith(b"state 0")
            self.states[topic] = self.states.get(topic, 0) + state
            if (seq != expected and not state) or seq < (expected or 0):
                self.wrong.append(f"{topic!r}: {payload[:7]!r} {seq} instead of {expected}")
            self.next[topic] = seq + 1
        return self.next


class Bench:
    """A shared endpoint on a free port, with its streams and its readers."""

    def __init__(self, context: Any, *, send_bytes: int = 2**30) -> None:
        self.context = context
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.stats = OutputStats()
        self.sender = Sender()
        self.hub = Hub(
            "routers",
            lambda handler: Listener(self.endpoint, Role.PUB, handler),
            stats=self.stats,
            send_bytes=send_bytes,
        )
        self.streams: dict[bytes, HubStream] = {}
        self.readers: list[Reader] = []
        self._slots = itertools.count()
        self.most = 0
        """Highest number of states that kvbus was sending at the same time in this test."""

    @property
    def under_way(self) -> list[Any]:
        return list(self.hub.shared.state_slots.under_way.values())

    def add(self, *topics: bytes) -> None:
        for topic in topics:
            self.streams[topic] = HubStream(self, next(self._slots), topic)

    def reader(self, *topics: bytes, **how: bool) -> Reader:
        self.readers.append(Reader(self, *topics, **how))
        return self.readers[-1]

    def publish(self, count: int = 1, size: int = 0, *topics: bytes) -> None:
        for topic in topics or self.streams:
            for _ in range(count):
                self.streams[topic].publish(size=size)
            self.streams[topic].live.flush()

    async def level(self, reader: Reader, *topics: bytes) -> None:
        """Wait until a reader has every batch of the given streams, and check that it has no other batch."""

        def is_level() -> bool:
            return reader.read() == {topic: self.streams[topic].next_seq for topic in topics or self.streams}

        await eventually(is_level, "a level reader")
        assert reader.wrong == []


@contextlib.asynccontextmanager
async def bench_of(context: Any, **settings: Any) -> AsyncIterator[Bench]:
    made = Bench(context, **settings)
    try:
        yield made
    finally:
        for one in made.streams.values():
            one.live.close()
        for reader in made.readers:
            reader.socket.close(0)
        await turns()
        assert (made.stats.routers, made.stats.subscribers) == (0, 0)
        assert made.hub.shared.share.bytes == made.hub.shared.share.entries == 0


@both_loops
async def test_a_reader_may_cancel_a_topic_and_subscribe_again(context: Any) -> None:
    async with bench_of(context) as bench:
        bench.add(b"a", b"b")
        reader = bench.reader(b"a")
        await bench.level(reader, b"a")
        reader.socket.setsockopt(zmq.SUBSCRIBE, b"b")
        reader.socket.setsockopt(zmq.SUBSCRIBE, ASKS_REPLAY)
        await bench.level(reader)
        reader.socket.setsockopt(zmq.UNSUBSCRIBE, b"a")
        reader.socket.setsockopt(zmq.UNSUBSCRIBE, ASKS_REPLAY)
        await eventually(lambda: bench.stats.subscribers == 1, "the end of a subscription")
        bench.publish(5)
        await eventually(lambda: reader.read()[b"b"] == bench.streams[b"b"].next_seq, "the other one goes on")
        assert reader.next[b"a"] < bench.streams[b"a"].next_seq
        reader.socket.setsockopt(zmq.SUBSCRIBE, b"a")
        await bench.level(reader)
        assert reader.states == {b"a": 2, b"b": 1}


async def test_a_second_stream_with_the_same_topic_is_refused(context: Any) -> None:
    async with bench_of(context) as bench:
        bench.add(b"a")
        with pytest.raises(BindError, match="stream 0 already has this topic"):
            HubStream(bench, 1, b"a")
        assert bench.stats.queue_limit == 1000


@both_loops
async def test_a_stalled_router_queues_a_bounded_number_of_bytes_for_all_streams(context: Any) -> None:
    """A router that does not read forty streams may have at most 1 MB of queued data, for all streams together.

    When the router reads again, it gets the state of each stream that lost a batch.
    """
    limit = 1_000_000
    async with bench_of(context, send_bytes=limit) as bench:
        topics = [b"kv@%02d" % i for i in range(40)]
        bench.add(*topics)
        slow, reads = bench.reader(slow=True), bench.reader()
        await eventually(lambda: [view.state for view in bench.hub.routers] == ["live"] * 2, "both")
        await bench.level(reads)
        slow.read()
        share = bench.hub.shared.share
        most = waits = 0
        while bench.stats.dropped_batches["slow_router"] < 200:
            bench.publish(1, BIG)
            most = max(most, share.bytes)
            waits = max(waits, *(peer.waiting_bytes for peer in bench.hub.peers))
            await bench.level(reads)
        assert most <= limit + BIG + OVERHEAD + 100
        assert waits <= DEFAULT_SETTINGS.high_water + 2 * BIG
        assert reads.states == dict.fromkeys(topics, 1)
        await bench.level(slow)
        await bench.level(reads)
        assert bench.most <= 2 * states.MAX_STATES


@both_loops
async def test_a_slow_router_gets_new_states_only_of_streams_with_losses(context: Any) -> None:
    async with bench_of(context, send_bytes=200_000) as bench:
        bench.add(b"loud", b"quiet")
        slow = bench.reader(slow=True)
        await bench.level(slow)
        bench.publish(1, 0, b"quiet")
        while bench.stats.dropped_batches["slow_router"] < 50:
            bench.publish(1, BIG, b"loud")
            await asyncio.sleep(0)
        await bench.level(slow)
        assert slow.states == {b"loud": 2, b"quiet": 1}


@both_loops
async def test_a_router_of_300_streams_soon_gets_their_states_one_by_one(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "PACE", 0.05)  # longer than an iteration of the loop takes
    async with bench_of(context) as bench:
        bench.add(*(b"%03d" % i for i in range(300)))
        begun = asyncio.get_running_loop().time()
        reader, other = bench.reader(), bench.reader()
        await bench.level(reader)
        await bench.level(other)
        assert bench.most <= 2 * states.MAX_STATES
        assert asyncio.get_running_loop().time() < begun + 300 * states.PACE
        assert sum(one.states for one in bench.streams.values()) <= 600


@both_loops
async def test_reopening_an_endpoint_ends_connections_and_keeps_streams(context: Any) -> None:
    async with bench_of(context) as bench:
        bench.add(b"a", b"b")
        reader = bench.reader()
        await bench.level(reader)
        bench.hub.reopen(lambda handler: Listener(bench.endpoint, Role.PUB, handler))
        assert bench.stats.routers == 0
        bench.publish(2)
        await bench.level(reader)
        assert reader.states == {b"a": 2, b"b": 2}
        assert bench.stats.router_disconnects == {"closed": 1}
        assert [view.left for view in bench.hub.routers] == [None, "closed"]


@both_loops
@pytest.mark.parametrize("seed", range(8))
async def test_after_a_random_script_every_reader_has_all_batches(context: Any, seed: int) -> None:
    """In the end, every reader has all batches of a random script.

    In the script, readers stall and read again, and streams and subscriptions come and go. States are large, and the
    limit of queued data is low.
    """
    rng = random.Random(seed)
    async with bench_of(context, send_bytes=300_000) as bench:
        bench.add(*(b"kv@%d" % i for i in range(8)))
        readers = [bench.reader(slow=bool(i % 2)) for i in range(4)]
        for step in range(150):
            match rng.choice(("publish", "publish", "publish", "read", "add", "end", "turns")):
                case "publish":
                    bench.publish(rng.randrange(1, 6), rng.choice((0, BIG)), rng.choice([*bench.streams]))
                case "read":
                    rng.choice(readers).read()
                case "add":
                    bench.add(b"kv@new%d" % step)
                    bench.streams[b"kv@new%d" % step].slices = Slices(rng.randrange(1, 4), rng.choice((10, BIG)))
                case "end" if len(bench.streams) > 1:
                    topic = rng.choice([*bench.streams])
                    bench.streams.pop(topic).live.close()
                case _:
                    await asyncio.sleep(0.002)
        for reader in readers:
            await eventually(
                lambda reader=reader: (
                    {**reader.read()} and all(reader.next.get(at) == one.next_seq for at, one in bench.streams.items())
                ),
                "a level reader",
            )
            assert reader.wrong == []


@both_loops
async def test_a_removed_stream_sends_its_end_even_to_a_stalled_router(context: Any) -> None:
    async with bench_of(context, send_bytes=200_000) as bench:
        bench.add(b"ends", b"stays")
        bench.streams[b"stays"].slices = Slices(1, 10)
        slow, reads = bench.reader(slow=True), bench.reader()
        await bench.level(slow)
        await bench.level(reads)
        while bench.stats.dropped_batches["slow_router"] < 50:
            bench.publish(1, BIG)
            await bench.level(reads)
        one = bench.streams.pop(b"ends")
        one.live.retire()
        one.live.close()
        states = dict(slow.states)
        await eventually(lambda: slow.read().get(b"ends") == one.next_seq, "the last word")
        assert slow.states[b"ends"] == states[b"ends"] + 1
        await eventually(lambda: reads.read()[b"ends"] == one.next_seq, "an empty batch")
        assert reads.states == {b"ends": 1, b"stays": 1}
        await eventually(lambda: slow.read()[b"stays"] == bench.streams[b"stays"].next_seq, "the other stream")
        assert slow.wrong == reads.wrong == []
