"""Tests for the updates by which a subscriber of the client library reports why it has no connection."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

import pytest
import zmq

from kvbus.client import Lost, Reachable, Subscriber, Timing, Unreachable
from kvbus.client.reachability import Reachability
from kvbus.core.types import Refused
from kvbus.transport.engine.publisher import EnginePublisher
from tests.ports import free_ports

SOON = Timing(unreachable_s=0.05, idle_s=0.2, confirm_s=60)


@contextlib.asynccontextmanager
async def listening(greeting: bytes = b""):
    """Start a TCP server that sends these bytes to each client, and return its endpoint."""
    opened: list[asyncio.StreamWriter] = []

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        writer.write(greeting)

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for writer in opened:
            writer.transport.abort()


async def next_of(subscriber, kind) -> Any:
    async with asyncio.timeout(60):
        while not isinstance(update := await subscriber.receive(), kind):
            pass
    return update


async def test_a_publisher_that_starts_and_stops_is_reported():
    endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    async with Subscriber(endpoint, replay, timing=SOON) as subscriber:
        nothing = f"nothing listens at {endpoint} (connection refused)"
        assert await next_of(subscriber, Unreachable) == Unreachable(endpoint, nothing)
        async with EnginePublisher(endpoint, replay, bind=True):
            assert await next_of(subscriber, Reachable) == Reachable(endpoint)
        assert await next_of(subscriber, Unreachable) == Unreachable(endpoint, nothing)


async def test_batches_are_reported_lost_while_the_publisher_is_unreachable():
    async with Subscriber("tcp://127.0.0.1:9", "tcp://127.0.0.1:9", timing=SOON) as subscriber:
        seen = [(await subscriber.receive()) for _ in range(2)]
        assert {type(update) for update in seen} == {Unreachable, Lost}


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.6\r\n"], ids=["silent", "another protocol"])
async def test_the_port_of_another_program_is_reported(greeting):
    async with listening(greeting) as endpoint, Subscriber(endpoint, timing=SOON) as subscriber:
        assert re.search("no publisher answers|does not speak ZeroMQ", (await next_of(subscriber, Unreachable)).why)


async def test_a_replay_endpoint_used_as_live_endpoint_is_reported():
    async with (
        EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True) as publisher,
        Subscriber(publisher.replay_endpoint, timing=SOON) as subscriber,
    ):
        assert "another port or program" in (await next_of(subscriber, Unreachable)).why


async def test_a_publisher_that_requires_curve_is_reported():
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.curve_server, publisher.curve_secretkey, publisher.curve_publickey = True, secret, public
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        async with Subscriber(f"tcp://127.0.0.1:{port}", timing=SOON) as subscriber:
            why = (await next_of(subscriber, Unreachable)).why
            assert re.search(r"only one side of the connection|does not speak ZeroMQ|no publisher answers", why)


async def test_a_binding_subscriber_reports_that_no_publisher_has_connected():
    async with Subscriber("tcp://127.0.0.1:*", bind=True, timing=SOON) as subscriber:
        expected = f"no publisher has dialled in at {subscriber.endpoint}"
        assert (await next_of(subscriber, Unreachable)).why == expected


async def test_a_reason_is_reported_once_and_again_when_it_changes():
    reports: list[Any] = []
    watch = Reachability(bind=False, after=1.0, report=reports.append)
    endpoint = "tcp://no-such-host.invalid:1"
    watch.missing_at(endpoint, 10.0)
    watch.look(10.5)
    assert watch.deadline == 11.0

    async def looked() -> None:
        now = watch.deadline
        watch.look(now)
        async with asyncio.timeout(60):
            await asyncio.gather(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))

    await looked()
    assert watch.deadline == 13.0
    await looked()
    assert [type(report) for report in reports] == [Unreachable]
    async with listening() as there:
        watch.missing_at(there, 20.0)
        await looked()
        assert len(reports) == 1  # the first check does not report, because the connection needs time
        watch.refused(Refused.KEY)
        await looked()
        assert reports[1].why == f"the CURVE keys of kvbus and {there} do not match"
        watch.connected()
        assert reports[2] == Reachable(there)
        assert watch.deadline == float("inf")
    await watch.aclose()


async def test_closing_a_subscriber_ends_its_connection_check():
    async with Subscriber("tcp://198.51.100.1:9", timing=SOON) as subscriber:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await subscriber.receive()
    assert len(asyncio.all_tasks()) == 1
