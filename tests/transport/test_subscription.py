"""Tests for a port of kvbus's own ZMTP to which engines connect. Engines use libzmq, and some peers must be refused."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from kvbus.common.errors import BindError
from kvbus.core.types import Reason, Refused
from kvbus.transport.curve import Curve, generate
from kvbus.transport.grants import Client
from kvbus.transport.sockets import PeerPolicy
from kvbus.transport.subscription import BoundStream, Events
from tests.doubles.bus import eventually
from tests.ports import free_port
from tests.transport.loops import both_loops, turns, u64
from tests.transport.zmtp.peers import greeting, hello, hello_2
from tests.transport.zmtp.test_listener import bare

FRAME = 100_000
PLAIN = PeerPolicy(FRAME)

Dial = Callable[..., zmq.Socket[bytes]]


class Stream:
    """A bound live stream, and a list of all its events in order."""

    def __init__(self, policy: PeerPolicy) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.seen: list[Any] = []
        self.refused: list[Refused] = []
        self.bursts = 0
        events = Events(
            self.seen.append,
            self.seen.append,
            self.refused.append,
            lambda reason, _: self.seen.append(reason),
            self._drained,
        )
        self.stream = BoundStream(self.endpoint, topics=[b""], events=events, policy=policy)

    def _drained(self) -> None:
        self.bursts += 1

    @property
    def batches(self) -> list[list[bytes]]:
        return [each for each in self.seen if isinstance(each, list)]


@contextlib.asynccontextmanager
async def bound(policy: PeerPolicy = PLAIN) -> AsyncIterator[Stream]:
    stream = Stream(policy)
    try:
        yield stream
    finally:
        stream.stream.close()
        await turns()


async def engine_of(dial: Dial, stream: Stream, **options: Any) -> zmq.Socket[bytes]:
    """Return the socket of an engine that has connected to a stream and received the stream's subscription."""
    engine = dial(zmq.XPUB, stream.endpoint, SNDHWM=0, **options)
    await eventually(lambda: engine.poll(0), "the subscription")
    engine.recv()
    return engine


@both_loops
async def test_the_batches_of_a_connection_are_delivered_before_its_end(dial: Dial) -> None:
    async with bound() as stream:
        engine = await engine_of(dial, stream, LINGER=60_000)
        sent = [[b"kv", u64(n), b"x" * (n % 3000)] for n in range(3000)]
        for frames in sent:
            engine.send_multipart(frames)
        engine.close()
        await eventually(lambda: stream.seen[-1] is False, "its end")
        assert stream.seen == [True, *sent, False]
        assert 1 <= stream.bursts <= len(sent)


@both_loops
async def test_batches_that_arrive_while_the_loop_is_blocked_count_as_unread(dial: Dial) -> None:
    async with bound() as stream:
        engine = await engine_of(dial, stream)
        assert not stream.stream.unread
        engine.send_multipart([b"kv", u64(0), b"x"])
        until = time.monotonic() + 60
        while not stream.stream.unread:  # the loop does not run in the meantime
            assert time.monotonic() < until
        assert stream.batches == []
        await eventually(lambda: stream.batches, "the batch")
        assert not stream.stream.unread


@both_loops
async def test_an_oversize_frame_closes_the_connection_of_its_publisher(dial: Dial) -> None:
    async with bound() as stream:
        engine = await engine_of(dial, stream)
        engine.send_multipart([b"kv", b"x" * FRAME])
        engine.send_multipart([b"kv", b"x" * (FRAME + 1)])
        await eventually(lambda: stream.seen[-1] is True and len(stream.seen) > 1, "the connection again")
        assert stream.seen == [True, [b"kv", b"x" * FRAME], Reason.FRAME_SIZE, False, True]


@both_loops
async def test_an_endless_message_closes_the_connection_of_its_publisher() -> None:
    async with bound(PeerPolicy(1000)) as stream, bare(stream.endpoint, hello(b"PUB")) as (reader, writer):
        await eventually(lambda: stream.seen == [True], "the connection")
        writer.write((b"\1\x64" + bytes(100)) * 41)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        await eventually(lambda: stream.seen == [True, Reason.MESSAGE_SIZE, False], "its end")


@both_loops
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", Refused.PROTOCOL),
        (hello(b"DEALER"), Refused.PROTOCOL),
        (hello(b"SUB"), Refused.PROTOCOL),
        (hello_2(1), Refused.PROTOCOL),
        (greeting() + b"\x04\x02" + bytes(2), Refused.PROTOCOL),
        (greeting(mechanism=b"CURVE"), Refused.MECHANISM),
    ],
)
async def test_a_peer_that_is_not_a_publisher_is_refused_with_a_reason(data: bytes, reason: Refused) -> None:
    async with bound() as stream, bare(stream.endpoint, data) as (reader, _):
        with contextlib.suppress(ConnectionError):
            await reader.read()
        await eventually(lambda: stream.refused == [reason], "the refusal")
        assert stream.seen == []


@both_loops
async def test_a_peer_that_leaves_during_its_handshake_is_counted_as_refused() -> None:
    async with bound() as stream:
        async with bare(stream.endpoint, greeting()):
            pass
        await eventually(lambda: stream.refused == [Refused.CLOSED], "the refusal")


@both_loops
async def test_removing_a_key_from_the_list_ends_only_its_connection(dial: Dial) -> None:
    ours, (one, two) = generate(), (generate(), generate())
    raw = [z85.decode(public) for public, _ in (one, two)]

    def curved(pair: tuple[bytes, bytes]) -> dict[str, bytes]:
        return {"CURVE_SERVERKEY": ours[0], "CURVE_PUBLICKEY": pair[0], "CURVE_SECRETKEY": pair[1]}

    async with bound(PeerPolicy(FRAME, Curve(*ours, clients={raw[0]: Client()}))) as stream:
        first = await engine_of(dial, stream, **curved(one))
        dial(zmq.XPUB, stream.endpoint, **curved(two))
        await eventually(lambda: stream.refused, "the refusal")
        assert set(stream.refused) == {Refused.KEY}
        stream.stream.allow({raw[0], raw[1]})
        second = await engine_of(dial, stream, **curved(two))
        stream.stream.allow({raw[1]})
        await eventually(lambda: len(stream.stream.peers) == 1, "the end of the removed one")
        for n, engine in enumerate((first, second)):
            engine.send_multipart([b"kv", u64(n), b"x"])
        await eventually(lambda: stream.batches, "a batch")
        assert stream.batches == [[b"kv", u64(1), b"x"]]
        assert stream.seen[0] is True
        assert False not in stream.seen


@both_loops
async def test_a_used_endpoint_is_named_and_a_closed_endpoint_can_be_reused() -> None:
    async with bound() as stream:
        events = Events(print, print)
        with pytest.raises(BindError, match=stream.endpoint):
            BoundStream(stream.endpoint, topics=[b""], events=events, policy=PLAIN)
        stream.stream.close()
        BoundStream(stream.endpoint, topics=[b""], events=events, policy=PLAIN).close()
