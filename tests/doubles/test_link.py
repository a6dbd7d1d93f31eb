"""Tests for the fault proxy between real sockets: it forwards messages unchanged, except for the requested faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvbus.transport.client.raw import RawSubscriber
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually
from tests.doubles.link import Link, Splitter
from tests.ports import ports_in_a_row


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[EnginePublisher, Link, RawSubscriber]]:
    base = ports_in_a_row(2)
    link = Link("live", base, base + 1, "server")
    await link.start()
    async with (
        EnginePublisher(f"tcp://127.0.0.1:{base + 1}", None, bind=True) as engine,
        RawSubscriber(f"tcp://127.0.0.1:{base}") as router,
    ):
        await engine.wait_for_subscriber(60)
        yield engine, link, router
    await link.close()


async def seqs(router: RawSubscriber, count: int) -> list[int]:
    async with asyncio.timeout(60):
        return [int.from_bytes((await router.recv())[1], "big") for _ in range(count)]


async def test_the_proxy_passes_every_message() -> None:
    async with linked() as (engine, _, router):
        payloads = [bytes([n]) * (n * 1000) for n in range(60)]  # frames with short and with long lengths
        for payload in payloads:
            engine.publish(payload)
        async with asyncio.timeout(60):
            assert [(await router.recv())[2] for _ in payloads] == payloads


async def test_the_proxy_drops_doubles_and_swaps_single_messages() -> None:
    async with linked() as (engine, link, router):
        link.wire.drop = 2
        for _ in range(4):
            engine.publish(b"x")
        assert await seqs(router, 2) == [2, 3]
        assert link.wire.dropped == [0, 1]
        link.wire.double = 1
        engine.publish(b"x")
        engine.publish(b"x")
        assert await seqs(router, 3) == [4, 4, 5]
        link.wire.swap = 1
        engine.publish(b"x")
        engine.publish(b"x")
        assert await seqs(router, 2) == [7, 6]


@pytest.mark.parametrize("reset", [True, False])
async def test_a_router_reconnects_after_a_cut_connection(reset: bool) -> None:
    async with linked() as (engine, link, router):
        assert link.cut(reset=reset) == 1
        await engine.wait_for_subscriber(60, count=2)
        engine.publish(b"x")
        assert await seqs(router, 1) == [0]
        assert link.accepted == 2


async def test_a_stalled_proxy_delays_all_messages_and_loses_none() -> None:
    async with linked() as (engine, link, router):
        assert link.stall() == 1
        for _ in range(50):
            engine.publish(b"x" * 1000)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(router.recv(), 0.2)
        link.flow()
        assert await seqs(router, 50) == list(range(50))


async def test_a_router_does_not_notice_a_half_open_connection() -> None:
    """If the proxy closes only the engine's side of a connection, the router notices nothing.

    The router reconnects after the proxy has closed the router's side, too.
    """
    async with linked() as (engine, link, router):
        assert link.half_open() == 1
        for _ in range(3):
            engine.publish(b"x")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(router.recv(), 0.2)
        assert link.accepted == 1
        link.drop_half_open()
        await engine.wait_for_subscriber(60, count=2)
        engine.publish(b"x")
        assert await seqs(router, 1) == [3]


async def test_a_proxy_refuses_connections_until_it_listens_again() -> None:
    async with linked() as (engine, link, _):
        await link.refuse()
        await eventually(lambda: link.connections == 0, "every connection closed")
        await link.listen()
        await engine.wait_for_subscriber(60, count=2)


def test_the_splitter_finds_messages_in_chunks_of_any_size() -> None:
    greeting = bytes(64)
    command = b"\x04\x05READY"
    message = b"\x01\x01t" + b"\x01\x08" + (7).to_bytes(8, "big") + b"\x02" + (300).to_bytes(8, "big") + b"p" * 300
    stream = greeting + command + message + message
    for size in (1, 2, 7, 63, 64, 65, 400, len(stream)):
        splitter = Splitter()
        found = [pair for at in range(0, len(stream), size) for pair in splitter.feed(stream[at : at + size])]
        assert b"".join(piece for _, piece in found) == stream
        assert [frames for frames, _ in found if frames is not None] == [[b"t", (7).to_bytes(8, "big"), b"p" * 300]] * 2
        assert splitter.waiting == 0


async def test_a_connection_is_cut_only_once_after_the_given_bytes() -> None:
    async with linked() as (engine, link, router):
        link.cut_after(5_000)
        engine.publish(bytes(1_000))
        assert await seqs(router, 1) == [0]
        assert link.to_be_cut
        engine.publish(bytes(10_000))
        await engine.wait_for_subscriber(60, count=2)  # the router reconnects, and the connection is not cut again
        assert not link.to_be_cut
        engine.publish(bytes(10_000))
        assert await seqs(router, 1) == [2]
