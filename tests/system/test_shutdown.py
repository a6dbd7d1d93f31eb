"""Tests for a graceful shutdown: kvbus finishes open replay answers within ``shutdown_timeout``.

It ends the remaining answers with END, and counts and logs them.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import zmq

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually, running_bus
from tests.doubles.kvbus_process import Place, Program, engine_at, run_async
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.system.test_run import PATIENT
from tests.transport.loops import END

COUNT = 1500
"""Number of batches in the test.

Each has 20 kB, so that together they are more than the buffers of two sockets hold.
"""


class Requester:
    """A router that requests a replay from 0, and reads only when the test calls it."""

    def __init__(self, replay_endpoint: str) -> None:
        self.since = 0.0
        """Time at which the test told kvbus to end."""
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.setsockopt(zmq.RCVBUF, 4096)
        self.socket.setsockopt(zmq.RCVTIMEO, PATIENT * 1000)
        self.socket.connect(replay_endpoint)

    def ask(self) -> None:
        self.socket.send_multipart([b"", bytes(8)])

    def read_to_the_end(self) -> list[int]:
        seqs = []
        while (frame := self.socket.recv_multipart()[-2]) != END:
            seqs.append(int.from_bytes(frame, "big"))
        return seqs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(0)
        self._context.term()


async def full_bus(place: Place, engine) -> None:
    for n in range(COUNT):
        engine.publish(batch(store([n], tokens=[2**20 + n] * 4000, block_size=4000)))
        if n % 50 == 0:
            await asyncio.sleep(0)
    await eventually(lambda: place.sources()[0]["last_seq"] == COUNT - 1, "everything taken in")


def waiting(place: Place) -> str:
    """Return the line of `/metrics` with the number of replay answers that wait because their router does not read."""
    return next(line for line in place.get("/metrics")[1].splitlines() if line.startswith("kvbus_replay_waiting{"))


@asynccontextmanager
async def ending_beside_an_answer(place: Place) -> AsyncIterator[tuple[Program, Requester]]:
    """Yield a kvbus that got SIGTERM during a long replay answer, and the router that requested this answer."""
    with Requester(place.out_replay) as requester, place.kvbus() as bus:
        await place.ready(bus)
        async with engine_at(place) as engine:
            await full_bus(place, engine)
            requester.ask()
            await eventually(lambda: waiting(place).endswith(" 1.0"), "the answer under way")
            requester.since = time.monotonic()
            bus.process.send_signal(signal.SIGTERM)
            yield bus, requester


def test_a_shutdown_waits_for_an_unfinished_replay_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with ending_beside_an_answer(Place(tmp_path, shutdown_timeout=PATIENT)) as (bus, requester):
            await eventually(lambda: "SIGTERM: shutting down" in bus.said, "the signal heard")
            assert bus.process.poll() is None
            answer = await asyncio.to_thread(requester.read_to_the_end)
            assert answer == list(range(answer[0], COUNT))
            assert await bus.ends() == 0, bus.said
            assert "not finished" not in bus.said

    run_async(main())


def test_an_unread_replay_answer_is_cut_off_at_the_shutdown_timeout(tmp_path: Path) -> None:
    async def main() -> None:
        async with ending_beside_an_answer(Place(tmp_path, shutdown_timeout=1.5)) as (bus, requester):
            assert await bus.ends() == 0, bus.said  # the router never reads, so only the deadline ends the answer
            assert time.monotonic() - requester.since >= 1.5
            assert "1 replay answers were not finished within shutdown_timeout" in bus.said

    run_async(main())


async def test_a_router_gets_end_for_an_answer_that_a_shutdown_cuts_off() -> None:
    """kvbus sends only one replay answer at a time to a router.

    A second request of the router waits, so at the shutdown its answer is only END.
    """
    async with running_bus() as bus:
        stats = bus.daemon.outputs.stats[0]
        async with EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine:
            for n in range(COUNT):
                engine.publish(batch(store([n], tokens=[2**20 + n] * 4000, block_size=4000)))
                if n % 50 == 0:
                    await asyncio.sleep(0)
            await eventually(lambda: bus.caught_up(COUNT - 1), "everything taken in")
            with Requester(bus.out_replay) as slow:
                slow.ask()
                slow.ask()
                await eventually(lambda: stats.replay_waiting == 2, "one answer under way, and one behind it")
                await bus.daemon.outputs.drain(0.2)
                assert stats.replay_requests["cut_off"] == 2
                begun = await asyncio.to_thread(slow.read_to_the_end)
                assert begun == list(range(begun[0], begun[0] + len(begun)))
                assert len(begun) < COUNT
                assert await asyncio.to_thread(slow.read_to_the_end) == []
                assert (stats.replay_sessions, stats.replay_waiting) == (0, 0)
