"""Tests for ``kvbus run`` as a supervisor runs it: signals, exit codes and probes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvbus.core.wire.frames import ASKS_REPLAY
from tests.doubles.bus import eventually
from tests.doubles.kvbus_process import Place, Program, engine_at, router_at, run_async
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.wire.captures import load, matches_truth

# -- ends

PATIENT = 200
"""Seconds that kvbus gives routers at its shutdown.

On a busy machine, 30 MB take long to pass through small buffers.
"""


class Stalled:
    """A router that reads nothing until the test calls it, so that its batches queue in kvbus."""

    def __init__(self, place: Place) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.setsockopt(zmq.RCVBUF, 4096)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.setsockopt(zmq.SUBSCRIBE, ASKS_REPLAY)
        self.socket.connect(place.out)

    def seqs(self, count: int) -> list[int]:
        """Read this number of messages as fast as they arrive, and return their seqs."""
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        return [int.from_bytes(self.socket.recv_multipart()[1], "big") for _ in range(count)]

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


@contextlib.asynccontextmanager
async def with_work_left(place: Place, count: int) -> AsyncIterator[tuple[Program, Stalled]]:
    """Yield a kvbus that has received ``count`` batches, and a router that has not yet received all of them."""
    stalled = Stalled(place)
    try:
        with place.kvbus() as bus:
            await place.ready(bus)
            async with engine_at(place) as engine:
                await place.subscribed()
                for n in range(count):
                    # Each batch has 20 kB: all batches together exceed the buffers of two sockets.
                    engine.publish(batch(store([n], tokens=[2**20 + n] * 4000, block_size=4000)))
                await eventually(lambda: place.sources()[0]["last_seq"] == count - 1, "everything taken in")
                yield bus, stalled
    finally:
        stalled.close()


def test_routers_get_their_queued_batches_at_sigterm(tmp_path: Path) -> None:
    async def main() -> None:
        place, count = Place(tmp_path, shutdown_timeout=PATIENT), 600
        async with with_work_left(place, count) as (bus, router):
            bus.process.send_signal(signal.SIGTERM)
            await eventually(lambda: "SIGTERM: shutting down" in bus.said, "the signal heard")
            seqs = await asyncio.to_thread(router.seqs, count)
            assert seqs == list(range(count))
            assert await bus.ends() == 0, bus.said

    run_async(main())


def test_a_second_sigterm_ends_kvbus_immediately(tmp_path: Path) -> None:
    """The first SIGTERM begins a graceful shutdown, which waits for a router that never reads.

    At the second SIGTERM, kvbus ends immediately.
    """

    async def main() -> None:
        async with with_work_left(Place(tmp_path, shutdown_timeout=PATIENT), 600) as (bus, _):
            bus.process.send_signal(signal.SIGTERM)
            await eventually(lambda: "SIGTERM: shutting down" in bus.said, "the signal heard")
            bus.process.send_signal(signal.SIGTERM)
            # The exit status shows a supervisor that the signal killed the process.
            assert await bus.ends() == -signal.SIGTERM, bus.said

    run_async(main())


def test_a_stalled_router_does_not_delay_a_shutdown_for_ever(tmp_path: Path) -> None:
    async def main() -> None:
        async with with_work_left(Place(tmp_path), 600) as (bus, _):
            bus.process.send_signal(signal.SIGINT)
            assert await bus.ends() == 0, bus.said
            assert "SIGINT: shutting down" in bus.said

    run_async(main())


@pytest.mark.parametrize("key", ["outputs.0.endpoint", "outputs.0.replay_endpoint", "http", "sources.0.endpoint"])
def test_kvbus_names_an_endpoint_in_use_and_exits_with_69(tmp_path: Path, key: str) -> None:
    place = Place(tmp_path)
    place.config["sources"][0]["bind"] = key.startswith("sources")
    node: Any = place.config
    for piece in key.split("."):
        node = node[int(piece) if piece.isdigit() else piece]
    context = zmq.Context()
    holder = context.socket(zmq.REP)
    holder.bind(node if "://" in node else f"tcp://{node}")
    try:
        with place.kvbus() as bus:
            assert bus.ended() == 69, bus.said
            assert node in bus.said
            assert "Traceback" not in bus.said
            assert "Address already in use".lower() in bus.said.lower()
    finally:
        holder.close(0)
        context.term()


def test_kvbus_exits_with_78_and_every_error_of_its_configuration(tmp_path: Path) -> None:
    place = Place(tmp_path, on_lost="shrug", source_timeout=-1, blok_size=16)
    place.config["outputs"][0]["endpoint"] = "not an endpoint"
    with place.kvbus() as bus:
        assert bus.ended() == 78, bus.said
        for key in ("on_lost", "source_timeout", "blok_size", "outputs[0].endpoint"):
            assert key in bus.said
        assert "4 problems" in bus.said
        assert "Traceback" not in bus.said


def test_an_unknown_environment_variable_is_an_error(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("KVBUS_")}
    env["KVBUS_HTPP"] = "127.0.0.1:1"
    done = subprocess.run(
        [sys.executable, "-m", "kvbus", "run", "--source", "tcp://127.0.0.1:1", "--output", "tcp://127.0.0.1:2"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 78
    assert "KVBUS_HTPP" in done.stderr
    assert "KVBUS_HTTP" in done.stderr


# -- life


def test_kvbus_is_ready_and_alive_before_its_engine_starts(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(tmp_path)
        with place.kvbus() as bus, router_at(place) as router:
            await place.ready(bus)
            assert place.get("/livez")[0] == 200
            assert [source["state"] for source in place.sources()] == ["connecting"]
            await place.subscribed()
            messages = load("vllm033_map_int")
            async with engine_at(place) as engine:
                for message in messages:
                    engine.publish(message.payload, seq=message.seq)
                await eventually(lambda: place.sources()[0]["last_seq"] == messages[-1].seq, "everything taken in")
                await eventually(lambda: place.sources()[0]["state"] == "live", "the bus at rest")
                await eventually(
                    lambda: router.read() and not matches_truth("vllm033_map_int", router.view), "the truth"
                )
            await eventually(lambda: place.sources()[0]["state"] == "connecting", "the engine's end noticed")
            # The engine has ended, but kvbus still runs and is ready.
            assert place.get("/readyz")[0] == place.get("/livez")[0] == 200
            bus.process.terminate()
            assert await bus.ends() == 0
            assert router.view.violations == []

    run_async(main())


def test_kvbus_runs_with_options_instead_of_a_file(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(tmp_path)
        flags = ("--source", f"{place.engine},{place.engine_replay}", "--output", f"{place.out},{place.out_replay}")
        with Program(tmp_path, "run", *flags, "--http", place.http) as bus, router_at(place) as router:
            await place.ready(bus)
            await place.subscribed()
            async with engine_at(place) as engine:
                engine.publish(batch(store([1, 2])))
                await eventually(lambda: router.read() and len(router.view.blocks) == 2, "the blocks")
            bus.process.terminate()
            assert await bus.ends() == 0
            lines = [json.loads(line) for line in bus.said.splitlines()]  # without a terminal, the log is JSON
            assert all({"level", "message"} <= line.keys() or {"level", "msg"} <= line.keys() for line in lines)

    run_async(main())
