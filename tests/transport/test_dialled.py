"""Tests for the live stream of an engine to which kvbus connects, with its own ZMTP.

Publishers use libzmq, or are bare TCP peers that break a rule, or speak as other ZeroMQ libraries do.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import os
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from kvbus.common.errors import BindError
from kvbus.core.types import Reason, Refused
from kvbus.transport.curve import Curve, generate
from kvbus.transport.engine.publisher import EnginePublisher
from kvbus.transport.sockets import PeerPolicy
from kvbus.transport.subscription import MAX_FRAMES, DialledStream, Events
from kvbus.transport.zmtp import endpoint as endpoint_module
from kvbus.transport.zmtp.wire import encode_message
from tests.doubles.bus import eventually
from tests.hostile.test_flood import resident
from tests.ports import free_port
from tests.system.test_descriptors import no_descriptor
from tests.transport.bare import BarePeer, listening
from tests.transport.loops import both_loops, turns, u64
from tests.transport.zmtp.peers import greeting, hello, hello_2

FRAME = 100_000
PLAIN = PeerPolicy(FRAME)


class Stream:
    """A dialled live stream, and a list of all its events in order."""

    def __init__(self, endpoint: str, policy: PeerPolicy, topics: tuple[bytes, ...]) -> None:
        self.endpoint = endpoint
        self.seen: list[Any] = []
        self.refused: list[Refused] = []
        self.details: list[str] = []
        self.bursts = 0
        add = self.seen.append
        events = Events(add, add, self.refused.append, self._broken, self._drained)
        self.stream = DialledStream(endpoint, topics=topics, events=events, policy=policy)

    def _broken(self, reason: Reason, detail: str) -> None:
        self.seen.append(reason)
        self.details.append(detail)

    def _drained(self) -> None:
        self.bursts += 1

    @property
    def batches(self) -> list[list[bytes]]:
        return [each for each in self.seen if isinstance(each, list)]

    @property
    def ups(self) -> list[bool]:
        return [each for each in self.seen if isinstance(each, bool)]


@contextlib.asynccontextmanager
async def dialled(
    endpoint: str | None = None, policy: PeerPolicy = PLAIN, topics: tuple[bytes, ...] = (b"",)
) -> AsyncIterator[Stream]:
    stream = Stream(endpoint or f"tcp://127.0.0.1:{free_port()}", policy, topics)
    try:
        yield stream
    finally:
        stream.stream.close()
        await turns(5)


Publish = Callable[..., zmq.Socket[bytes]]


@pytest.fixture
def publisher(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Publish]:
    """A function that binds an XPUB of libzmq to an endpoint, which was perhaps just closed. The test's end closes it."""
    made: list[zmq.Socket[bytes]] = []

    def bind(endpoint: str, **options: Any) -> zmq.Socket[bytes]:
        engine = context.socket(zmq.XPUB)
        made.append(engine)
        for name, value in {"LINGER": 0, "SNDHWM": 0, "IPV6": 1, **options}.items():
            engine.setsockopt(getattr(zmq, name), value)
        until = time.monotonic() + 60
        while True:
            try:
                engine.bind(endpoint)
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise
            else:
                return engine

    yield bind
    for engine in made:
        engine.close(0)


async def subscriptions(engine: zmq.Socket[bytes], count: int = 1) -> list[bytes]:
    """Wait until kvbus's subscriptions have reached an XPUB, and return them."""
    got: list[bytes] = []
    for _ in range(count):
        await eventually(lambda: engine.poll(0), "a subscription")
        got.append(engine.recv())
    return got


@both_loops
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", None])
async def test_every_batch_arrives_in_order_and_before_the_end_of_its_connection(
    publisher, tmp_path: Path, host
) -> None:
    where = f"ipc://{tmp_path}/kv" if host is None else f"tcp://{host}:{free_port()}"
    async with dialled(where) as stream:
        engine = publisher(where.replace("localhost", "127.0.0.1"), LINGER=60_000)
        await subscriptions(engine)
        sent = [[b"kv", u64(n), b"x" * (n % 3000)] for n in range(3000)]
        for frames in sent:
            engine.send_multipart(frames)
        engine.close()
        await eventually(lambda: stream.seen[-1] is False, "its end")
        assert stream.seen == [True, *sent, False]
        assert 1 <= stream.bursts <= len(sent)


@both_loops
async def test_an_engine_that_starts_late_and_restarts_is_up_and_down_once_each_time(publisher) -> None:
    async with dialled() as stream:
        await asyncio.sleep(0.3)  # wait for some failed attempts
        for life in range(3):
            engine = publisher(stream.endpoint)
            await subscriptions(engine)
            engine.send_multipart([b"", u64(life), b"x"])
            await eventually(lambda life=life: len(stream.batches) == life + 1, "a batch of this life")
            assert stream.stream.reached == "127.0.0.1"
            engine.close()
            await eventually(lambda life=life: len(stream.ups) == 2 * (life + 1), "its end")
            assert stream.stream.reached is None
        assert stream.ups == [True, False] * 3
        assert stream.refused == []


@both_loops
async def test_malformed_messages_are_passed_on_unchanged() -> None:
    """The transport passes malformed messages on, because kvbus's core checks and counts them."""
    async with (
        dialled(policy=PeerPolicy(4_000_000)) as stream,
        EnginePublisher(stream.endpoint, None, bind=True) as engine,
    ):
        await engine.wait_for_subscriber(60)
        shapes = [[b""], [b"", b""], [b"t", u64(1), b"p", b"more"], [b"", u64(2), b"x" * 3_000_000], [b"m"] * 64]
        for shape in [*shapes, [b"m"] * 500]:
            engine.send_frames(*shape)
        await eventually(lambda: len(stream.batches) == len(shapes) + 1, "every message")
        assert stream.batches == [*shapes, [b"m"] * 64]
        assert stream.ups == [True]


@both_loops
async def test_the_topics_are_subscribed_to(publisher) -> None:
    async with dialled(topics=(b"kv@", b"state")) as stream:
        engine = publisher(stream.endpoint)
        assert await subscriptions(engine, 2) == [b"\1kv@", b"\1state"]
        for topic in (b"", b"kv", b"kv@a", b"metrics", b"kv@b", b"KV@c", b"state"):
            engine.send_multipart([topic, u64(0), b"x"])
        await eventually(lambda: len(stream.batches) == 3, "the batches")
        assert [frames[0] for frames in stream.batches] == [b"kv@a", b"kv@b", b"state"]


@both_loops
async def test_a_peer_without_zmtp_commands_gets_subscriptions_as_messages() -> None:
    """Like go-zeromq, the peer announces ZMTP 3.0 and passes each command to its application as a message."""
    port = free_port()
    async with dialled(f"tcp://127.0.0.1:{port}", topics=(b"", b"state")), listening(port, b"PUB") as peers:
        await eventually(lambda: peers and len(peers[0].messages) == 2, "the subscriptions")
        assert peers[0].messages == [[b"\1"], [b"\1state"]]
        assert peers[0].commands == [b"READY"]


@both_loops
async def test_a_zmtp_heartbeat_of_an_engine_is_answered() -> None:
    port = free_port()
    peers: list[BarePeer] = []
    server = await asyncio.start_server(lambda r, w: peers.append(BarePeer(r, w, b"PUB", minor=1)), "127.0.0.1", port)
    async with dialled(f"tcp://127.0.0.1:{port}"):
        await eventually(lambda: peers and peers[0].commands == [b"READY", b"SUBSCRIBE"], "the subscription")
        peers[0].command(b"PING", bytes(2) + b"context")
        await eventually(lambda: peers[0].commands[2:] == [b"PONG"], "the answer")
        await peers[0].close()
    server.close()


@both_loops
async def test_a_libzmq_engine_with_heartbeats_keeps_its_connection(publisher) -> None:
    async with dialled() as stream:
        engine = publisher(stream.endpoint, HEARTBEAT_IVL=50, HEARTBEAT_TIMEOUT=1_000, HEARTBEAT_TTL=1_000)
        await subscriptions(engine)
        await asyncio.sleep(2)
        assert stream.seen == [True]


@both_loops
async def test_batches_that_arrive_while_the_loop_is_blocked_count_as_unread(publisher) -> None:
    async with dialled() as stream:
        assert not stream.stream.unread
        engine = publisher(stream.endpoint)
        await subscriptions(engine)
        await eventually(lambda: stream.ups, "the connection")
        assert not stream.stream.unread
        engine.send_multipart([b"kv", u64(0), b"x"])
        until = time.monotonic() + 60
        while not stream.stream.unread:  # the loop does not run in the meantime
            assert time.monotonic() < until
        assert stream.batches == []
        await eventually(lambda: stream.batches, "the batch")
        assert not stream.stream.unread


# -- peers that break a limit or a rule ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def bare_engine(*, data: bytes, chunk: bytes = b"") -> AsyncIterator[tuple[str, list[float]]]:
    """Listen as an engine that sends ``data``, and then ``chunk`` again and again until kvbus closes the connection.

    Yield the endpoint and the times at which kvbus has connected.
    """
    times: list[float] = []
    closing = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        times.append(time.monotonic())
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            while chunk and not closing.is_set():
                writer.write(chunk)
                await writer.drain()
            while not closing.is_set() and await reader.read(65536):
                pass
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", times
    finally:
        closing.set()
        server.close()


PUB = hello(b"PUB")


@both_loops
@pytest.mark.parametrize(
    ("data", "chunk", "reason", "detail"),
    [
        (PUB + b"\2" + (FRAME + 1).to_bytes(8, "big"), b"", Reason.FRAME_SIZE, "a frame of 100001 bytes"),
        (PUB, b"\1\0" * 4096, Reason.MESSAGE_SIZE, f"a message of more than {MAX_FRAMES} frames"),
        (PUB, b"\3" + u64(90_000) + bytes(90_000), Reason.MESSAGE_SIZE, "a message of more than 400000 bytes"),
        (PUB + b"\x40\0", b"", Reason.ZMTP, "flags 0x40"),
        (PUB + b"\4\1\0", b"", Reason.ZMTP, "a command without a name"),
    ],
    ids=["frame", "frames", "bytes", "flags", "command"],
)
async def test_a_broken_limit_or_rule_is_counted_and_kvbus_connects_again(data, chunk, reason, detail) -> None:
    async with bare_engine(data=data, chunk=chunk) as (endpoint, times), dialled(endpoint) as stream:
        await eventually(lambda: len(times) >= 3, "two further connections")
        assert stream.seen[:4] == [True, reason, False, True]
        assert detail in stream.details[0]
        assert stream.refused == []


@both_loops
async def test_one_huge_frame_is_lost_and_later_batches_arrive(publisher) -> None:
    async with dialled() as stream:
        engine = publisher(stream.endpoint)
        await subscriptions(engine)
        engine.send_multipart([b"kv", b"x" * FRAME])
        engine.send_multipart([b"kv", b"x" * (FRAME + 1)])
        await eventually(lambda: stream.seen[-1] is True and len(stream.seen) > 1, "the connection again")

        def sends_again() -> bool:
            engine.send_multipart([b"kv", b"y"])
            return len(stream.batches) > 1

        await eventually(sends_again, "a later batch")
        assert stream.seen[:6] == [True, [b"kv", b"x" * FRAME], Reason.FRAME_SIZE, False, True, [b"kv", b"y"]]


@both_loops
async def test_a_message_without_an_end_costs_little_memory_and_leaves_the_loop_responsive() -> None:
    """libzmq kept each frame of an unfinished message: 16 MB of empty frames took 555 MB."""
    async with bare_engine(data=PUB, chunk=b"\1\0" * 32_768) as (endpoint, times):
        before = resident(os.getpid())
        async with dialled(endpoint) as stream:
            longest, last = 0.0, time.monotonic()
            while stream.seen.count(Reason.MESSAGE_SIZE) < 3:
                await asyncio.sleep(0)
                now = time.monotonic()
                longest, last = max(longest, now - last), now
            assert resident(os.getpid()) - before < 20_000_000
            assert longest < 1.0
        assert len(times) >= 3


@both_loops
async def test_kvbus_connects_less_often_to_an_engine_that_breaks_a_rule_each_time(monkeypatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda _low, high: high)
    monkeypatch.setattr(endpoint_module, "FIRST", 0.02)
    monkeypatch.setattr(endpoint_module, "LONGEST", 0.32)
    async with bare_engine(data=PUB, chunk=b"\1\0" * 4096) as (endpoint, times), dialled(endpoint) as stream:
        await eventually(lambda: len(times) >= 9, "nine connections")
        waits = [after - before for before, after in itertools.pairwise(times)]
        assert all(wait >= 0.3 for wait in waits[-3:]), waits
        assert stream.ups[:4] == [True, False, True, False]


# -- handshakes that fail --------------------------------------------------------------------------------------------


@both_loops
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", Refused.PROTOCOL),
        (b"SSH-2.0-OpenSSH_9.6\r\n", Refused.PROTOCOL),
        (hello(b"ROUTER"), Refused.PROTOCOL),
        (hello(b"SUB"), Refused.PROTOCOL),
        (hello_2(1), Refused.PROTOCOL),
        (greeting() + b"\x04\x02" + bytes(2), Refused.PROTOCOL),
        (greeting(mechanism=b"CURVE"), Refused.MECHANISM),
        (greeting() + b"\4\7\5ERROR\0", Refused.CLOSED),
    ],
    ids=["http", "ssh", "router", "sub", "zmtp 2", "command", "curve", "error"],
)
async def test_a_failed_handshake_is_reported_with_a_reason_and_tried_again(data: bytes, reason: Refused) -> None:
    async with bare_engine(data=data) as (endpoint, times), dialled(endpoint) as stream:
        await eventually(lambda: len(times) >= 2 and len(stream.refused) >= 1, "a second attempt")
        assert set(stream.refused) == {reason}
        assert stream.seen == []


@both_loops
async def test_a_port_without_a_listener_is_no_failed_handshake(publisher) -> None:
    async with dialled() as stream:
        await asyncio.sleep(0.5)
        assert stream.refused == []
        await subscriptions(publisher(stream.endpoint))


@both_loops
async def test_a_silent_port_is_reported_as_closed(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with dialled(f"tcp://127.0.0.1:{silent.getsockname()[1]}") as stream:
            await eventually(lambda: stream.refused, "the end of the handshake")
            assert stream.refused == [Refused.CLOSED]


def curve_of(ours: tuple[bytes, bytes], server: bytes) -> PeerPolicy:
    return PeerPolicy(FRAME, Curve(*ours, server=server))


@contextlib.contextmanager
def authenticated(context: zmq.Context[zmq.Socket[bytes]], allowed: set[bytes]):
    """Answer libzmq's questions (ZAP, RFC 27) about keys of CURVE clients, and yield a function to call again and again."""
    with context.socket(zmq.ROUTER) as zap:
        zap.linger = 0
        zap.bind("inproc://zeromq.zap.01")

        def serve() -> None:
            while zap.poll(0):
                peer, _, _, request, *_, key = zap.recv_multipart()
                status = b"200" if key in allowed else b"400"
                zap.send_multipart([peer, b"", b"1.0", request, status, b"", b"", b""])

        yield serve


@both_loops
async def test_an_encrypted_stream_of_an_engine_with_curve_is_read(context, publisher) -> None:
    engine_keys, ours = generate(), generate()
    async with dialled(policy=curve_of(ours, engine_keys[0])) as stream:
        with authenticated(context, {z85.decode(ours[0])}) as serve:
            engine = publisher(stream.endpoint, CURVE_SERVER=1, CURVE_SECRETKEY=engine_keys[1])
            await eventually(lambda: serve() or engine.poll(0), "the subscription")
            engine.recv()
            sent = [[b"kv", u64(n), b"x" * (n % 2000)] for n in range(500)]
            for frames in sent:
                engine.send_multipart(frames)
            await eventually(lambda: len(stream.batches) == len(sent), "every batch")
            assert stream.seen == [True, *sent]


@both_loops
async def test_an_engine_that_refuses_kvbuss_key_is_reported_and_accepts_the_key_later(context, publisher) -> None:
    engine_keys, ours = generate(), generate()
    allowed: set[bytes] = set()
    async with dialled(policy=curve_of(ours, engine_keys[0])) as stream:
        with authenticated(context, allowed) as serve:
            engine = publisher(stream.endpoint, CURVE_SERVER=1, CURVE_SECRETKEY=engine_keys[1], ZAP_DOMAIN=b"kv")
            await eventually(lambda: serve() or len(stream.refused) >= 2, "two refusals")
            assert set(stream.refused) == {Refused.KEY}
            allowed.add(z85.decode(ours[0]))
            await eventually(lambda: serve() or engine.poll(0), "the connection")
            assert stream.ups == [True]


@both_loops
@pytest.mark.parametrize("side", ["engine", "kvbus"])
async def test_curve_on_one_side_alone_is_reported_as_another_mechanism(publisher, side: str) -> None:
    engine_keys, ours = generate(), generate()
    options = {"CURVE_SERVER": 1, "CURVE_SECRETKEY": engine_keys[1]} if side == "engine" else {}
    policy = PLAIN if side == "engine" else curve_of(ours, engine_keys[0])
    async with dialled(policy=policy) as stream:
        publisher(stream.endpoint, **options)
        await eventually(lambda: stream.refused, "the refusal")
        assert set(stream.refused) == {Refused.MECHANISM}


@both_loops
async def test_another_public_key_of_the_engine_is_reported(publisher) -> None:
    engine_keys, other, ours = generate(), generate(), generate()
    async with dialled(policy=curve_of(ours, other[0])) as stream:
        publisher(stream.endpoint, CURVE_SERVER=1, CURVE_SECRETKEY=engine_keys[1])
        await eventually(lambda: stream.refused, "the refusal")
        assert set(stream.refused) <= {Refused.CLOSED, Refused.PROTOCOL}
        assert stream.seen == []


# -- addresses ----------------------------------------------------------------------------------------------------------


@both_loops
async def test_a_host_name_is_looked_up_at_each_attempt_and_each_of_its_addresses_is_tried(
    publisher, monkeypatch
) -> None:
    """The name has two addresses. Nothing listens at the first one. Later the name has another address."""
    port = free_port()
    answers: list[Any] = [socket.gaierror(-2, "unknown"), UnicodeError("label too long")]
    now = ["127.0.0.2", "127.0.0.3"]
    asked: list[str] = []
    real = socket.getaddrinfo

    def look_up(host: str, number: int, **given: Any) -> list[Any]:
        if host != "engine.test":
            return real(host, number, **given)
        if given["flags"] & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not numeric")
        asked.append(host)
        if answers:
            raise answers.pop(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, number)) for each in now]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    engine = publisher(f"tcp://127.0.0.3:{port}")
    async with dialled(f"tcp://engine.test:{port}") as stream:
        await subscriptions(engine)
        assert stream.stream.reached == "127.0.0.3"
        assert stream.stream.beside("tcp://engine.test:9999") == "tcp://127.0.0.3:9999"
        assert stream.stream.beside("tcp://other.test:9999") == "tcp://other.test:9999"
        assert len(asked) == 3
        now[:] = ["127.0.0.4"]
        engine.close()
        await eventually(lambda: stream.ups == [True, False], "the end")
        assert stream.stream.beside("tcp://engine.test:9999") == "tcp://engine.test:9999"
        await subscriptions(publisher(f"tcp://127.0.0.4:{port}"))
        assert stream.stream.reached == "127.0.0.4"


@both_loops
async def test_the_connected_ipv6_address_replaces_the_host(publisher) -> None:
    async with dialled(f"tcp://[::1]:{free_port()}") as stream:
        await subscriptions(publisher(stream.endpoint))
        assert stream.stream.reached == "::1"
        assert stream.stream.beside("tcp://[::1]:9") == "tcp://[::1]:9"


@both_loops
async def test_a_silent_name_server_delays_no_other_source_and_no_end(publisher, monkeypatch) -> None:
    """Look-ups of a hundred names hang. A source with an address, and one with another name, connect meanwhile."""
    hang, real = threading.Event(), socket.getaddrinfo

    def look_up(host: Any, *args: Any, **given: Any) -> list[Any]:
        if str(host).startswith("hangs"):
            if given.get("flags"):
                raise socket.gaierror(socket.EAI_NONAME, "not numeric")
            hang.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return real(host, *args, **given)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        async with contextlib.AsyncExitStack() as stack:
            for n in range(20):
                await stack.enter_async_context(dialled(f"tcp://hangs{n}:9"))
            for host in ("127.0.0.1", "localhost"):
                stream = await stack.enter_async_context(dialled(f"tcp://{host}:{free_port()}"))
                await subscriptions(publisher(stream.endpoint.replace("localhost", "127.0.0.1")))
    finally:
        hang.set()


@both_loops
async def test_a_process_without_free_descriptors_connects_once_it_has_one(publisher) -> None:
    async with dialled() as stream:
        with no_descriptor():
            await asyncio.sleep(0.5)
        assert stream.seen == []
        await subscriptions(publisher(stream.endpoint))
        await eventually(lambda: stream.ups == [True], "the connection")


@pytest.mark.parametrize("endpoint", ["tcp://nowhere", "udp://127.0.0.1:1", "tcp://:1", "tcp://127.0.0.1:70000"])
async def test_a_malformed_endpoint_raises_bind_error(endpoint: str) -> None:
    with pytest.raises(BindError, match=f"cannot connect to {endpoint}"):
        DialledStream(endpoint, topics=[b""], events=Events(print, print), policy=PLAIN)


@both_loops
async def test_an_engine_with_a_full_queue_loses_batches_and_never_waits(publisher) -> None:
    """kvbus does not read for a moment. TCP stops the engine's queue, and the engine drops batches at its own limit."""
    async with dialled() as stream:
        engine = publisher(stream.endpoint, SNDHWM=100, SNDBUF=65536)
        await subscriptions(engine)
        await eventually(lambda: stream.ups, "the connection")
        begin = time.monotonic()
        for n in range(2_000):
            engine.send_multipart([b"kv", u64(n), bytes(50_000)])
        assert time.monotonic() - begin < 30
        await eventually(lambda: stream.batches and not stream.stream.unread, "the batches that were not dropped")
        seqs = [int.from_bytes(frames[1], "big") for frames in stream.batches]
        assert seqs == sorted(set(seqs))
        assert stream.ups == [True]


@both_loops
async def test_a_source_with_many_batches_delays_no_other_source(publisher) -> None:
    """One engine has thousands of batches to read. Another engine's batch does not wait for all of them."""
    order: list[str] = []

    def tell(name: str, _frames: list[bytes]) -> None:
        order.append(name)

    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for name in ("busy", "other"):
            where = f"tcp://127.0.0.1:{free_port()}"
            engines.append(publisher(where))
            events = Events(functools.partial(tell, name), lambda _: None)
            stream = DialledStream(where, topics=[b""], events=events, policy=PLAIN)
            stack.callback(stream.close)
            await subscriptions(engines[-1])
        busy, other = engines
        for n in range(5_000):
            busy.send_multipart([b"", u64(n), bytes(200)])
        other.send_multipart([b"", u64(0), b"x"])
        await eventually(lambda: "other" in order, "the other's batch")
        await eventually(lambda: len(order) == 5_001, "every batch")
        assert order.index("other") < 4_000


@both_loops
async def test_encoded_messages_of_any_split_arrive_complete() -> None:
    """The bytes of messages arrive in pieces of any size, also in the middle of a frame's head."""
    chance = random.Random(7)
    sent = [
        [b"t" * chance.randrange(300), u64(n), bytes(chance.choice([0, 3, 254, 255, 256, 9000]))] for n in range(200)
    ]
    data = b"".join(encode_message(frames) for frames in sent)
    connected: list[asyncio.StreamWriter] = []

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer)
        writer.write(PUB)
        at = 0
        while at < len(data):
            size = chance.choice([1, 2, 7, 100, 5000])
            writer.write(data[at : at + size])
            at += size
            await writer.drain()
            if chance.random() < 0.1:
                await asyncio.sleep(0)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with dialled(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}") as stream:
        await eventually(lambda: len(stream.batches) == len(sent), "every message")
        assert stream.batches == sent
    server.close()
    for writer in connected:
        writer.close()
