"""Tests for a process with few or no free file descriptors.

A replay that kvbus cannot request waits, and no batch is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvbus.config import SourceStream
from kvbus.core.commands import CancelReplay, RequestReplay
from kvbus.core.events import RelayEvent, ReplayReceived, RequestSent, RequestWaits
from kvbus.core.wire.frames import END_SEQ
from kvbus.daemon.runtime import EngineSockets
from kvbus.daemon.source_sockets import OF_REQUEST, OF_SOURCE, SourceSockets
from kvbus.transport.engine.publisher import EnginePublisher
from kvbus.transport.sockets import PLAIN
from tests.doubles.bus import Bus, eventually, running_bus
from tests.doubles.kvbus_process import Process
from tests.doubles.payloads import payload, store


def descriptors() -> list[int]:
    """Return the file descriptors that this process has open."""
    return [int(each.name) for each in Path("/proc/self/fd").iterdir()]


@contextlib.contextmanager
def no_descriptor(spare: int = 0) -> Iterator[None]:
    """Use up the file descriptors of this process except ``spare``, until the ``with`` block ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(descriptors())
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(spare):
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def lose_one(bus: Bus, engine: EnginePublisher, spare: int) -> None:
    """Lose a live batch while only ``spare`` file descriptors are free, and check that the replay recovers it later."""
    stats, seq = bus.source.stats, engine.next_seq
    before = stats.requests_failed, stats.recovered, stats.lost
    with no_descriptor(spare):
        engine.publish(payload(store([10 * seq])), live=False)
        engine.publish(payload(store([10 * seq + 1])))
        # Five attempts take longer than two unanswered requests, after which kvbus would count the gap as lost.
        await eventually(
            lambda: stats.requests_failed >= before[0] + 5 or (stats.recovered, stats.lost) != before[1:],
            f"five attempts with {spare} descriptors, or the replay",
        )
        assert stats.lost == before[2]
    await eventually(lambda: bus.caught_up(seq + 1), "the replay")
    assert (stats.missing, stats.recovered, stats.lost) == (before[1] + 1, before[1] + 1, 0)


async def lose_some() -> None:
    async with (
        running_bus(replay_timeout=0.6, probe_interval=0) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await eventually(lambda: bus.source.state == "live", "the bus in sync")
        await engine.wait_for_subscriber(60)
        engine.publish(payload(store([1])))
        await eventually(lambda: bus.caught_up(0), "the first batch")
        quiet = len(descriptors())
        # With only four free descriptors, kvbus could send the request, but the engine in this process could not accept it.
        for spare in range(4):
            # libzmq closes the socket of a request with a delay, and would free descriptors in the middle of the next test.
            await eventually(lambda: len(descriptors()) <= quiet, "the sockets of earlier requests closed")
            await lose_one(bus, engine, spare)
        assert bus.source.stats.requests_failed >= 5
        assert not bus.source.partial


ROOM = 4
"""Maximum number of replay requests that kvbus keeps open at once."""

ASKED = 5 * ROOM


async def ask_many() -> None:
    """Request a replay from one engine for many sources at the same time. The engine delays every answer."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OF_SOURCE * ASKED + 3 * ROOM * OF_REQUEST
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events: list[RelayEvent] = []
    sockets = SourceSockets(EngineSockets(context), events.append, lambda *_: None, events.append, lambda: None)
    engine = context.socket(zmq.ROUTER)
    port = engine.bind_to_random_port("tcp://127.0.0.1")
    live, replay = "tcp://127.0.0.1:1", f"tcp://127.0.0.1:{port}"
    for slot in range(ASKED):
        sockets.open(SourceStream(f"s{slot}", 0, 0, live, replay, None, False, b"", "auto", "count", slot), PLAIN)
    quiet = len(descriptors())
    for slot in range(ASKED):
        sockets.ask(RequestReplay(slot, 1, slot))
    assert not events, "not within the call: the relay is busy with what asked"
    asked: list[tuple[bytes, int]] = []

    def heard() -> int:
        while engine.poll(0):
            identity, *_, start = engine.recv_multipart()
            asked.append((identity, int.from_bytes(start, "big")))
        return len(asked)

    for done in range(ASKED):
        under_way = min(done + ROOM, ASKED)
        await eventually(lambda due=under_way: heard() >= due, f"{under_way} requests")
        assert heard() == under_way
        assert {start for _, start in asked} == set(range(under_way)), "the oldest first"
        if not done:
            await eventually(lambda: len(events) == ASKED - ROOM, "those that wait")
            assert events == [RequestWaits(slot, 1) for slot in range(ROOM, ASKED)]
            assert len(descriptors()) - quiet <= ROOM * OF_REQUEST
            await _connections(limit - len(descriptors()) - 2 * ROOM * OF_REQUEST)
        identity, start = asked[done]
        engine.send_multipart([identity, b"", END_SEQ, b""])
        await eventually(lambda due=done + 1: _answered(events) == due, "its answer")
        sockets.cancel(CancelReplay(start, 1))
    assert {event.source for event in events if isinstance(event, RequestSent) and event.sent} == set(
        range(ROOM, ASKED)
    )
    assert not any(isinstance(event, RequestSent) and not event.sent for event in events)
    sockets.close_all()
    context.destroy(linger=0)


def _answered(events: list[RelayEvent]) -> int:
    return sum(isinstance(event, ReplayReceived) for event in events)


async def _connections(number: int) -> None:
    """Check that this process can still accept ``number // 2`` connections, at two descriptors each."""
    assert number > 0
    listener = await asyncio.start_server(lambda _, writer: writer.write(b"!"), "127.0.0.1", 0)
    async with listener:
        for _ in range(number // 2):
            reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
            assert await reader.readexactly(1) == b"!"
            writer.close()


@pytest.mark.parametrize("what", ["lose_some", "ask_many"])
def test_a_replay_request_waits_for_a_free_descriptor(what: str) -> None:
    """A replay request for which kvbus has no free file descriptor is sent as soon as there is one.

    The test runs in a process of its own. In the process of the test suite, a socket of an earlier test may close
    during the test, and so free a descriptor.
    """
    alone = f"import asyncio; from tests.system.test_descriptors import {what}; asyncio.run({what}())"
    done = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


FEW = 64
"""Maximum number of file descriptors of the kvbus process. Without a router it uses about thirty."""


async def test_engines_have_reserved_descriptors_when_routers_use_all_others(tmp_path):
    process = Process(tmp_path, keeps_state=True)
    process.start(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW)))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        async with EnginePublisher(process.engine, process.engine_replay, bind=True) as engine:
            await engine.wait_for_subscriber(60)
            routers = [context.socket(zmq.SUB) for _ in range(30)]
            for router in routers:
                router.subscribe(b"")
                router.connect(process.out)
            refused = re.compile(
                rb'^kvbus_output_handshakes_failed_total.*reason="no_descriptor".* [1-9]', re.MULTILINE
            )
            await eventually(lambda: refused.search(process.get("/metrics")) is not None, "a router refused")
            for _ in range(10):
                assert process.get("/livez")
            engine.publish(payload(store([1])), live=False)
            engine.publish(payload(store([2])))
            await eventually(lambda: process.sources()[0]["counts"]["recovered"] == 1, "the replay")
            assert b"kvbus_state_writing 1.0" in process.get("/metrics")
    finally:
        context.destroy(0)
        process.kill()
    assert f"may open only {FEW} files and sockets" in process.log.read_text()


async def test_kvbus_raises_its_soft_limit_of_descriptors_to_the_hard_limit(tmp_path):
    process = Process(tmp_path, keeps_state=False)
    process.start(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, 4096)))
    try:
        limit = re.compile(rb"^process_max_fds 4096.0$", re.MULTILINE)
        await eventually(lambda: limit.search(process.get("/metrics")) is not None, "the limit")
    finally:
        process.kill()
    assert "files and sockets" not in process.log.read_text()
