"""Tests for a port to which an engine and its routers connect, with libzmq peers, bare peers and hostile peers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq

from kvbus.core.stats import OutputStats
from kvbus.transport.interposed import MAX_PUBLISHERS, Interposed, InterposedStream
from kvbus.transport.subscription import Events, limits_of_publishers
from kvbus.transport.zmtp.settings import Settings
from kvbus.transport.zmtp.wire import encode_message, subscribe
from tests.doubles.bus import eventually
from tests.transport.loops import both_loops, turns, u64
from tests.transport.zmtp.peers import Recorder, greeting, hello, ready
from tests.transport.zmtp.test_listener import bare, received

ANY = "tcp://127.0.0.1:0"
FRAME = 100_000


class Port:
    """An interposed port on which a source listens, and a record of the events on its publisher and subscriber
    sides.
    """

    def __init__(self, settings: Settings, topics: tuple[bytes, ...]) -> None:
        self.routers = Recorder()
        self.stats = OutputStats()
        self.refusals: list[tuple[str, str]] = []
        self.seen: list[Any] = []
        """The batches and the changes of connection that the source has reported, in order.

        True means that it is up.
        """
        self.bursts = 0
        self.port = Interposed(ANY, self.routers, settings=settings, stats=self.stats, refused=self._refused)
        self.topics = topics
        self.stream: InterposedStream | None = None
        self.begin()

    def begin(self) -> None:
        events = Events(
            self.seen.append,
            self.seen.append,
            broken=lambda reason, _: self.seen.append(reason),
            drained=self._drained,
        )
        self.stream = InterposedStream(self.port, topics=self.topics, events=events)

    def end(self) -> None:
        assert self.stream is not None
        self.stream.close()
        self.stream = None

    def _refused(self, reason: str, address: str, detail: str) -> None:
        self.refusals.append((reason, detail))

    def _drained(self) -> None:
        self.bursts += 1

    @property
    def endpoint(self) -> str:
        return self.port.endpoint

    @property
    def batches(self) -> list[list[bytes]]:
        return [each for each in self.seen if isinstance(each, list)]


@contextlib.asynccontextmanager
async def opened(*, topics: tuple[bytes, ...] = (b"",), **settings: Any) -> AsyncIterator[Port]:
    port = Port(Settings(publisher_limits=limits_of_publishers(FRAME), **settings), topics)
    try:
        yield port
    finally:
        if port.stream is not None:
            port.end()
        port.port.close()
        await turns()
        assert (port.stats.publishers, port.stats.publishers_limit) == (0, 0)


def batch(n: int) -> list[bytes]:
    return [b"kv", u64(n), b"batch %d" % n]


@both_loops
@pytest.mark.parametrize("kind", [zmq.PUB, zmq.XPUB])
async def test_a_port_reads_a_publisher_and_sends_to_a_subscriber(dial, kind):
    async with opened(topics=(b"kv", b"other")) as port:
        sub = dial(zmq.SUB, port.endpoint, SUBSCRIBE=b"")
        engine = dial(kind, port.endpoint, SNDHWM=0)
        await eventually(lambda: port.seen == [True] and port.routers.topics, "both")
        assert port.stats.publishers == port.stats.publishers_accepted == 1
        assert port.stats.publishers_limit == MAX_PUBLISHERS
        await until_subscribed(engine, port)
        for n in range(3000):
            engine.send_multipart(batch(n))
            engine.send_multipart([b"nobody's", b"topic"])
        await eventually(lambda: len(port.batches) == 3000, "every batch of the topic")
        assert port.batches == [batch(n) for n in range(3000)]
        assert 1 <= port.bursts <= 3000
        port.routers.send(b"kv", b"to routers alone")
        assert await received(sub, 1) == [[b"kv", b"to routers alone"]]
        assert port.routers.messages == []


async def until_subscribed(engine, port):
    """Wait until a batch of the engine reaches the source, which means that the engine's libzmq has read the
    subscription.
    """

    def through():
        engine.send_multipart([b"kv", b"through?"])
        return port.batches

    await eventually(through, "the subscription")
    engine.send_multipart([b"kv", b"begin"])
    await eventually(lambda: [b"kv", b"begin"] in port.batches, "the last of them")
    del port.seen[1:]


@both_loops
async def test_a_source_is_up_while_any_publisher_is_connected(dial):
    """The source is up from the first publisher's handshake to the last publisher's disconnection, as with a bound
    SUB.
    """
    async with opened() as port:
        for _ in range(3):
            port.seen.clear()
            first = dial(zmq.PUB, port.endpoint)
            await eventually(lambda: port.seen == [True], "the first")
            second = dial(zmq.PUB, port.endpoint)
            await eventually(lambda: port.stats.publishers == 2, "the second")
            assert port.stream is not None
            assert len(set(port.stream.peers)) == 2
            first.close()
            await eventually(lambda: port.stats.publishers == 1, "the first one's end")
            assert port.seen == [True]
            second.close()
            await eventually(lambda: port.seen == [True, False], "the second one's end")
        assert port.stats.publishers_accepted == 6


@both_loops
@pytest.mark.parametrize("minor", [0, 1])
async def test_a_port_subscribes_to_a_publisher_of_each_zmtp_version(minor):
    async with (
        opened(topics=(b"kv@", b"x" * 300)) as port,
        bare(port.endpoint, greeting(minor=minor) + ready(b"PUB")) as (reader, writer),
    ):
        expected = greeting() + ready(b"SUB")
        expected += b"".join(subscribe(topic, (3, minor)) for topic in port.topics)
        assert await reader.readexactly(len(expected)) == expected
        data = encode_message([b"kv@", u64(0), b"p"]) * 3
        for at in range(len(data)):
            writer.write(data[at : at + 1])
            await writer.drain()
        await eventually(lambda: len(port.batches) == 3, "the batches")


@both_loops
async def test_a_message_of_1000_frames_is_cut_and_its_publisher_stays_connected(dial):
    async with opened() as port:
        engine = dial(zmq.PUB, port.endpoint)
        await eventually(lambda: port.seen == [True], "the connection")
        await until_subscribed(engine, port)
        engine.send_multipart([b"kv", *(b"%d" % n for n in range(1000))])
        engine.send_multipart(batch(1))
        await eventually(lambda: len(port.batches) == 2, "both")
        assert port.batches == [[b"kv", *(b"%d" % n for n in range(63))], batch(1)]
        assert port.seen[0] is True
        assert False not in port.seen


@both_loops
@pytest.mark.parametrize(
    ("data", "reason", "detail"),
    [
        (greeting(mechanism=b"CURVE"), "mechanism", "the peer's mechanism is CURVE, kvbus's is NULL"),
        (greeting(mechanism=b"PLAIN"), "mechanism", "the peer's mechanism is PLAIN, kvbus's is NULL"),
        (hello(b"DEALER"), "socket_type", "socket type DEALER cannot talk to PUB or SUB"),
        (hello(b"ROUTER"), "socket_type", "socket type ROUTER cannot talk to PUB or SUB"),
        (b"GET / HTTP/1.1\r\n\r\n", "greeting", "the first byte is 0x47: ZMTP 1.0, or another protocol"),
        (greeting() + b"\x04\xff", "bad_command", None),
        (greeting() + b"\x04\x02" + bytes(2), "bad_command", "a command without a name"),
    ],
)
async def test_a_peer_other_than_engine_or_router_is_refused_with_a_reason(data, reason, detail):
    async with opened() as port, bare(port.endpoint, data) as (reader, writer):
        if detail is None:  # complete the frame, whose head gives a length of 255 bytes
            writer.write(bytes(255))
        await reader.read()
        await eventually(lambda: port.refusals, "the refusal")
        assert port.refusals[0][0] == reason
        assert detail is None or port.refusals == [(reason, detail)]
        assert port.seen == port.routers.peers == []


@both_loops
async def test_a_thousand_unfinished_handshakes_do_not_keep_engine_and_router_out(dial):
    """The engine and a router can connect although a thousand connections have stopped at different points of the
    handshake.
    """
    async with opened(max_half_open=64, handshake_timeout=120.0) as port:
        crowd = []
        beginnings = [b"", b"\xff", greeting(), greeting() + b"\x04\x20"]
        address = ("127.0.0.1", int(port.endpoint.rpartition(":")[2]))
        for n in range(1000):
            one = socket.create_connection(address)
            one.sendall(beginnings[n % 4])
            crowd.append(one)
            if n % 16 == 15:
                await turns()
        engine = dial(zmq.PUB, port.endpoint)
        sub = dial(zmq.SUB, port.endpoint, SUBSCRIBE=b"")
        await eventually(lambda: port.seen == [True] and port.routers.topics, "both")
        await until_subscribed(engine, port)
        await eventually(lambda: len(port.refusals) >= 1000 - 64, "the end of all but the newest")
        assert {reason for reason, _ in port.refusals} == {"half_open"}
        engine.send_multipart(batch(0))
        await eventually(lambda: port.batches == [batch(0)], "a batch")
        for one in crowd:
            one.close()
        sub.close()


@both_loops
async def test_engines_and_routers_have_separate_connection_limits(dial):
    async with opened(max_peers=2) as port, contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(bare(port.endpoint, hello(b"SUB")))
        await eventually(lambda: len(port.routers.peers) == 2, "as many subscribers as there may be")
        for _ in range(MAX_PUBLISHERS):
            await stack.enter_async_context(bare(port.endpoint, hello(b"PUB")))
        await eventually(lambda: port.stats.publishers == MAX_PUBLISHERS, "as many engines as there may be")
        port.port.publishers = None  # reading this would fail now, because kvbus must check the limits first
        for kind in (b"PUB", b"SUB"):
            async with bare(port.endpoint, hello(kind)) as (reader, _):
                await reader.read()
        assert port.refusals == [("too_many_peers", "")] * 2


@both_loops
async def test_an_engine_can_connect_if_the_limit_of_routers_is_reached(dial):
    async with opened(max_peers=1) as port, bare(port.endpoint, hello(b"SUB")):
        await eventually(lambda: port.routers.peers, "the only subscriber there may be")
        async with bare(port.endpoint, hello(b"SUB")) as (reader, _):
            await reader.read()
        assert port.refusals == [("too_many_peers", "")]
        dial(zmq.PUB, port.endpoint)
        await eventually(lambda: port.seen == [True], "an engine nevertheless")


@both_loops
async def test_an_engine_reconnects_to_the_source_that_replaces_its_source(dial):
    async with opened() as port:
        engine = dial(zmq.PUB, port.endpoint)
        await eventually(lambda: port.seen == [True], "the connection")
        port.end()
        await eventually(lambda: ("no_source", "") in port.refusals, "an attempt to come back")
        assert port.seen == [True]
        port.begin()
        await eventually(lambda: port.seen == [True, True], "the connection to the next source")
        await until_subscribed(engine, port)


@both_loops
async def test_closing_a_port_disconnects_engine_and_router_and_frees_its_address(dial):
    async with opened() as port:
        dial(zmq.PUB, port.endpoint)
        dial(zmq.SUB, port.endpoint, SUBSCRIBE=b"")
        await eventually(lambda: port.seen == [True] and port.routers.topics, "both")
        endpoint = port.endpoint
        port.port.close(1.0)
        await eventually(lambda: port.seen == [True, False] and port.routers.ends == ["closed"], "both ends")
        again = Interposed(endpoint, Recorder(), settings=Settings(), stats=OutputStats(), refused=lambda *_: None)
        again.close()
        await turns()
