"""Tests for peers that flood kvbus: each costs bounded memory and a share of the CPU, and delays no other peer.

kvbus ends the connection of such a peer for a reason that it names.
"""

import asyncio
import contextlib
import resource
import time
import tracemalloc

import pytest
import zmq

from kvbus.transport.zmtp import wire
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.protocol import Limits
from kvbus.transport.zmtp.reasons import Reason
from kvbus.transport.zmtp.settings import Settings
from kvbus.transport.zmtp.wire import encode_command, encode_message
from tests.doubles.bus import PATIENCE, eventually
from tests.transport.loops import both_loops
from tests.transport.zmtp.peers import hello
from tests.transport.zmtp.test_listener import bare, listening, received

MEGABYTE = 1024 * 1024


class Memory:
    """A context manager that measures the peak memory of Python objects, in bytes."""

    def __enter__(self):
        tracemalloc.start()
        return self

    def __exit__(self, *_):
        tracemalloc.stop()

    @property
    def peak(self):
        return tracemalloc.get_traced_memory()[1]


async def send_all(writer, chunk, count):
    """Send a chunk ``count`` times, or until the other side closes. A flooding peer reads nothing."""
    with contextlib.suppress(ConnectionError):
        for _ in range(count):
            writer.write(chunk)
            await writer.drain()


SUB, DEALER = hello(b"SUB"), hello(b"DEALER")


@both_loops
@pytest.mark.parametrize(
    ("role", "first", "chunk", "reason"),
    [
        # Without this limit, 40 MB of such frames took 1.2 GB of memory.
        (Role.ROUTER, DEALER, b"\1\0" * 40_000, Reason.MESSAGE_FRAMES),
        (Role.PUB, SUB, b"\1\0" * 40_000, Reason.MESSAGE_FRAMES),
        (Role.ROUTER, DEALER, b"\2" + (2**40).to_bytes(8, "big") + bytes(80_000), Reason.FRAME_BYTES),
        (Role.ROUTER, DEALER, (b"\3" + (50_000).to_bytes(8, "big") + bytes(50_000)) * 2, Reason.MESSAGE_BYTES),
        (Role.PUB, SUB, b"", Reason.SUBSCRIPTIONS),  # without the limit, 12 MB of such commands took 560 MB of memory
        (Role.PUB, SUB[:64] + encode_command(b"\5READY" + bytes(70_000)), b"", Reason.HANDSHAKE_BYTES),
    ],
)
async def test_a_flooding_peer_is_disconnected_with_a_reason_and_costs_little_memory(dial, role, first, chunk, reason):
    topics = b"".join(wire.command(b"SUBSCRIBE", n.to_bytes(4, "big") * 10) for n in range(2_000))
    async with listening(role, echo=True) as (listener, seen):
        kind = zmq.SUB if role is Role.PUB else zmq.DEALER
        good = dial(kind, listener.endpoint, **({"SUBSCRIBE": b""} if role is Role.PUB else {}))
        await eventually(lambda: seen.topics if role is Role.PUB else seen.peers, "the peer that behaves")
        with Memory() as memory:
            async with bare(listener.endpoint, first) as (_, writer):
                flood = asyncio.ensure_future(send_all(writer, chunk or topics, 500))
                await eventually(lambda: seen.ends or seen.refused, "its end")
                await flood
            assert [*seen.ends, *seen.refused] == [reason]
            assert memory.peak < 2 * MEGABYTE
        if role is Role.PUB:
            seen.send(b"still", b"there")
        else:
            good.send_multipart([b"still", b"there"])
        assert await received(good, 1) == [[b"still", b"there"]]


@both_loops
async def test_a_peer_that_does_not_read_pongs_is_disconnected(dial):
    async with listening(settings=Settings(unsent_bytes=16_384)) as (listener, seen):
        sub = dial(zmq.SUB, listener.endpoint, SUBSCRIBE=b"")
        await eventually(lambda: seen.topics, "the peer that behaves")
        pings = wire.command(b"PING", b"\0\0" + b"c" * 16) * 2_000
        with Memory() as memory:
            async with bare(listener.endpoint, SUB, buffer=4_096) as (_, writer):
                await eventually(lambda: len(seen.peers) == 2, "its handshake")
                pinging = asyncio.ensure_future(send_all(writer, pings, 2_000))
                await eventually(lambda: seen.ends == [Reason.UNREAD_PONGS], "its end")
                await pinging
            assert memory.peak < 2 * MEGABYTE
        seen.send(b"still there")
        assert await received(sub, 1) == [[b"still there"]]


@both_loops
async def test_a_peer_that_reads_pongs_may_send_any_number_of_pings():
    """A peer that reads kvbus's PONGs may send any number of PINGs.

    The test sends ten times as many PINGs as a peer may send that does not read the PONGs.
    """
    ping, pong = (wire.command(name, data) for name, data in ((b"PING", b"\0\0c"), (b"PONG", b"c")))
    async with listening() as (listener, seen), bare(listener.endpoint, SUB) as (reader, writer):
        await reader.readexactly(64)
        await eventually(lambda: seen.peers, "its handshake")
        await reader.readexactly(2 + 6 + 1 + 11 + 4 + 3)
        for _ in range(200):
            writer.write(ping * 100)
            assert await reader.readexactly(len(pong) * 100) == pong * 100
        assert seen.ends == []


class Counting(list):
    """A list of received messages, which counts empty messages but does not store them."""

    empty = 0

    def append(self, frames):
        if frames == [b""]:
            self.empty += 1
        else:
            super().append(frames)


@both_loops
async def test_a_flood_of_messages_does_not_block_the_loop(dial):
    """While tiny messages arrive as fast as possible, kvbus still answers another peer and runs other callbacks."""
    async with listening(Role.ROUTER) as (listener, seen), contextlib.AsyncExitStack() as stack:
        seen.messages = flood_messages = Counting()
        floods = []
        for _ in range(4):
            _, writer = await stack.enter_async_context(bare(listener.endpoint, DEALER))
            floods.append(asyncio.ensure_future(send_all(writer, b"\0\0" * 30_000, 10**6)))
        await eventually(lambda: flood_messages.empty > 1_000, "the flood")
        loop = asyncio.get_running_loop()
        longest, until = 0.0, loop.time() + 0.5
        while loop.time() < until:
            at = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - at)
        good = dial(zmq.DEALER, listener.endpoint)
        good.send(b"heard?")
        await eventually(lambda: flood_messages == [[b"heard?"]], "the peer beside it")
        assert longest < 0.1  # seconds; an iteration that handled 4 times 64 KiB of these messages would take longer
        for flood in floods:
            flood.cancel()
        await asyncio.gather(*floods, return_exceptions=True)


@both_loops
async def test_a_peer_that_never_reads_delays_no_other_peer(dial):
    async with listening() as (listener, seen), bare(listener.endpoint, SUB + encode_message([b"\1"])) as (reader, _):
        await eventually(lambda: seen.topics, "the subscription")
        stalled = seen.peers[0]
        sub = dial(zmq.SUB, listener.endpoint, SUBSCRIBE=b"")
        await eventually(lambda: len(seen.topics) == 2, "the other one's")
        message, sent = encode_message([b"x" * 100_000]), 0
        while stalled.writable:
            stalled.write(message)
            sent += len(message)
            await asyncio.sleep(0)
        assert stalled.waiting_bytes > 256 * 1024
        assert stalled.waiting_bytes <= stalled.unread_bytes <= sent
        assert stalled.acknowledged_bytes < sent
        seen.send(b"for both")
        assert await received(sub, 1) == [[b"for both"]]
        assert seen.drains == 0
        async with asyncio.timeout(PATIENCE):
            while not stalled.writable:
                await reader.read(MEGABYTE)
            assert seen.drains == 1
            while stalled.acknowledged_bytes < stalled.written_bytes:
                await reader.read(MEGABYTE)
        assert stalled.unread_bytes == 0


@both_loops
async def test_a_paused_peer_is_read_only_after_it_is_resumed():
    async with listening(Role.ROUTER) as (listener, seen), bare(listener.endpoint, DEALER) as (_, writer):
        await eventually(lambda: seen.peers, "the peer")
        peer = seen.peers[0]
        peer.pause()
        sending = asyncio.ensure_future(send_all(writer, encode_message([b"x" * 1_000]), 20_000))
        await asyncio.wait([sending], timeout=0.2)
        assert not sending.done()  # TCP has slowed the sender down
        assert seen.messages == []
        peer.resume()
        await sending
        await eventually(lambda: len(seen.messages) == 20_000, "all of it")


@both_loops
async def test_a_peer_may_be_paused_after_each_of_its_messages():
    async with listening(Role.ROUTER) as (listener, seen), bare(listener.endpoint, DEALER) as (_, writer):
        await eventually(lambda: seen.peers, "the peer")
        peer = seen.peers[0]
        seen.messages = Pausing(peer)
        writer.write(b"".join(encode_message([bytes([n])]) for n in range(200)))
        for n in range(200):
            await eventually(lambda n=n: len(seen.messages) == n + 1, "one message more")
            peer.resume()
        assert seen.messages == [[bytes([n])] for n in range(200)]


class Pausing(list):
    """A list of received messages. It pauses the reading from the peer whenever a message is appended."""

    def __init__(self, peer):
        super().__init__()
        self.peer = peer

    def append(self, frames):
        super().append(frames)
        self.peer.pause()


@both_loops
async def test_a_thousand_silent_connections_do_not_keep_a_router_out(dial):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4_096)), hard))
    try:
        settings = Settings(max_half_open=100, handshake_timeout=100)
        async with listening(settings=settings) as (listener, seen), contextlib.AsyncExitStack() as stack:
            for _ in range(1_000):
                await stack.enter_async_context(bare(listener.endpoint))
            sub = dial(zmq.SUB, listener.endpoint, SUBSCRIBE=b"")
            await eventually(lambda: seen.topics, "the one that speaks")
            await eventually(lambda: listener.half_open == 99, "the bound")
            assert seen.refused == [Reason.HALF_OPEN] * 901
            seen.send(b"you")
            assert await received(sub, 1) == [[b"you"]]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@both_loops
async def test_a_frame_of_30_mb_arrives_if_the_limits_allow_it():
    settings = Settings(limits=Limits(frame_bytes=2**26, message_bytes=2**26))
    async with listening(Role.ROUTER, settings=settings) as (listener, seen), bare(listener.endpoint, DEALER) as (_, w):
        w.write(encode_message([b"", b"x" * 30_000_000]))
        await eventually(lambda: seen.messages, "all of it")
        assert [len(frame) for frame in seen.messages[0]] == [0, 30_000_000]
