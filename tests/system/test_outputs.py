"""Tests for a running bus with several engines, ranks and outputs, with gaps, and with a broken connection to an
engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
import zmq

from kvbus.common.errors import InUseError
from kvbus.config import load
from kvbus.core.events import BatchReceived
from kvbus.core.wire.frames import ASKS_REPLAY
from kvbus.daemon.daemon import Daemon
from kvbus.state.sqlite import RESERVE_AHEAD as AHEAD
from kvbus.state.sqlite import reached
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import Bus, eventually, running_bus
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.ports import free_port, free_ports, ports_in_a_row
from tests.state.left import without_state


def run_async(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def tcp(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


class Raw:
    """A SUB socket whose received frames the test reads unchanged."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.setsockopt(zmq.SUBSCRIBE, ASKS_REPLAY)
        self.socket.connect(endpoint)
        self.got: list[list[bytes]] = []

    def read(self) -> int:
        while self.socket.poll(0):
            self.got.append(self.socket.recv_multipart())
        return len(self.got)

    @property
    def seqs(self) -> list[int]:
        return [int.from_bytes(frames[1], "big") for frames in self.got]

    def batches(self) -> list[Any]:
        return [msgspec.msgpack.decode(frames[2]) for frames in self.got]

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


@contextlib.asynccontextmanager
async def subscribed(bus: Bus, *endpoints: str, output: int = 0) -> AsyncIterator[list[Raw]]:
    stats = bus.daemon.outputs.stats[output]
    before = stats.subscribers
    with contextlib.ExitStack() as stack:
        raws = [stack.enter_context(contextlib.closing(Raw(endpoint))) for endpoint in endpoints]
        await eventually(lambda: stats.subscribers == before + len(raws), "the subscriptions")
        yield raws


async def replay(endpoint: str, start: int = 0) -> list[list[bytes]]:
    """Request a replay with a DEALER, and return the frames of each message of the answer, including END."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    dealer.send_multipart([b"", start.to_bytes(8, "big")])
    got: list[list[bytes]] = []
    try:
        while not got or got[-1][-2] != b"\xff" * 8:
            await eventually(lambda: dealer.poll(0), "an answer")
            got.append(dealer.recv_multipart())
        return got
    finally:
        dealer.close(0)
        context.term()


@contextlib.asynccontextmanager
async def four_engines(**output: Any) -> AsyncIterator[tuple[Bus, list[EnginePublisher], int]]:
    """A bus with two sources of two ranks each, their engines, and one output with a separate port for each rank.

    Live ports begin at `first`, and replay ports at `first + 4`.
    """
    first = ports_in_a_row(16)
    sources = [
        {
            "name": name,
            "endpoint": tcp(first + 8 + 4 * n),
            "replay_endpoint": tcp(first + 10 + 4 * n),
            "data_parallel_size": 2,
        }
        for n, name in enumerate("ab")
    ]
    out = {"endpoint": tcp(first), "replay_endpoint": tcp(first + 4), "heartbeat": 0, **output}
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(running_bus(sources=sources, outputs=[out]))
        engines = [
            await stack.enter_async_context(
                EnginePublisher(tcp(first + 8 + 4 * n + rank), tcp(first + 10 + 4 * n + rank), bind=True)
            )
            for n in range(2)
            for rank in range(2)
        ]
        await eventually(lambda: all(s.state == "live" for s in bus.daemon.relay.sources), "all four in sync")
        for engine in engines:
            await engine.wait_for_subscriber(60)
        yield bus, engines, first


def test_each_rank_of_two_sources_has_its_own_port() -> None:
    async def main() -> None:
        async with (
            four_engines() as (bus, engines, first),
            subscribed(bus, *(tcp(first + i) for i in range(4))) as routers,
        ):
            for i, engine in enumerate(engines):
                for n in range(5 * (i + 1)):
                    engine.publish(batch(store([100 * i + n]), rank=i % 2))
            for i, router in enumerate(routers):
                count = 5 * (i + 1)
                await eventually(lambda router=router, count=count: router.read() == count, f"stream {i}")
                assert router.seqs == list(range(count))
                assert {b[2] for b in router.batches()} == {i % 2}
                assert [b[1][0]["block_hashes"] for b in router.batches()] == [[100 * i + n] for n in range(count)]
                answer = await replay(tcp(first + 4 + i))
                assert [frames[-1] for frames in answer[:-1]] == [frames[2] for frames in router.got]

    run_async(main)


def test_a_merged_output_has_one_series_of_seqs_without_gaps() -> None:
    async def main() -> None:
        async with (
            four_engines(layout="merged") as (bus, engines, first),
            subscribed(bus, tcp(first)) as (router,),
        ):
            for n in range(25):
                for i, engine in enumerate(engines):
                    engine.publish(batch(store([100 * i + n]), rank=i % 2))
            await eventually(lambda: router.read() == 100, "all of all four")
            assert router.seqs == list(range(100))
            by_rank: dict[int, list[int]] = {}
            for _, (event,), rank in router.batches():
                by_rank.setdefault(rank, []).extend(event["block_hashes"])
            # Engines of different sources use the same ranks. On the merged stream, kvbus gives each engine a rank of its own.
            assert by_rank == {i: [100 * i + n for n in range(25)] for i in range(4)}
            answer = await replay(tcp(first + 4))
            assert [frames[-1] for frames in answer[:-1]] == [frames[2] for frames in router.got]

    run_async(main)


def test_an_output_sends_its_own_topic_or_the_engines_topic() -> None:
    """An output's `topic` may contain the worker and the model. If it is null, kvbus sends the engine's own topic."""

    async def main() -> None:
        ports = free_ports(4)
        outputs: list[dict[str, Any]] = [
            {"name": "a", "topic": "kv@{worker}@{model}", "endpoint": tcp(ports[0]), "replay_endpoint": tcp(ports[1])},
            {"name": "b", "topic": None, "endpoint": tcp(ports[2]), "replay_endpoint": tcp(ports[3])},
        ]
        for output in outputs:
            output["heartbeat"] = 0
        async with (
            running_bus(outputs=outputs, worker="10.0.0.7:8000", model="Qwen/Qwen3-32B") as bus,
            subscribed(bus, tcp(ports[0])) as (templated,),
            subscribed(bus, tcp(ports[2]), output=1) as (own,),
            EnginePublisher(bus.engine, bus.engine_replay, topic=b"engine's own", bind=True) as engine,
        ):
            await eventually(lambda: bus.source.state == "live", "the bus in sync")
            await engine.wait_for_subscriber(60)
            engine.publish(batch(store([1])))
            await eventually(lambda: templated.read() and own.read(), "a batch on both")
            assert templated.got[0][0] == b"kv@10.0.0.7:8000@Qwen/Qwen3-32B"
            assert own.got[0][0] == b"engine's own"
            assert (await replay(tcp(ports[1])))[0][1] == b"kv@10.0.0.7:8000@Qwen/Qwen3-32B"
            assert (await replay(tcp(ports[3])))[0][1] == b"engine's own"

    run_async(main)


def test_an_idle_output_sends_heartbeats() -> None:
    """An idle output sends heartbeats: empty batches with seqs, before the first engine exists and after its last
    batch.

    Replays contain these batches, too.
    """

    async def main() -> None:
        async with running_bus(output={"heartbeat": 0.05}) as bus, subscribed(bus, bus.out) as (router,):
            await eventually(lambda: router.read() >= 3, "heartbeats without an engine")
            async with EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine:
                await eventually(lambda: bus.source.state == "live", "the bus in sync")
                await engine.wait_for_subscriber(60)
                engine.publish(batch(store([1])))
                await eventually(lambda: bus.source.sequencer.next == 1, "the batch relayed")
                at = bus.daemon.relay.outputs[0].streams[0].next_seq
                await eventually(lambda: router.read() and router.seqs[-1] >= at + 2, "heartbeats after it")
            batches = router.batches()
            assert router.seqs == list(range(router.seqs[0], router.seqs[-1] + 1))
            assert sum(bool(b[1]) for b in batches) == 1
            assert all(len(b) == 3 and isinstance(b[0], float) and b[2] == 0 for b in batches)
            stamps = [b[0] for b in batches if not b[1]]
            assert stamps == sorted(stamps)
            answer = await replay(bus.out_replay)
            assert [int.from_bytes(m[-2], "big") for m in answer[:-1]] == list(range(len(answer) - 1))
            assert router.seqs[-1] < len(answer) + 1
            stats = bus.daemon.outputs.stats[0]
            assert bus.daemon.relay.outputs[0].stats.heartbeats == stats.batches - 1

    run_async(main)


def test_a_second_kvbus_on_the_same_endpoint_does_not_change_the_seqs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    live, again = free_ports(2)
    output = {"endpoint": tcp(live), "replay_endpoint": tcp(again), "heartbeat": 0}
    overrides = {"sources": [{"endpoint": tcp(free_port())}], "outputs": [output], "http": None, "state_dir": None}
    config = load(None, env={}, overrides=overrides)

    async def main() -> None:
        first = Daemon(config)
        await first.start()
        for n in range(3 * AHEAD):
            received = BatchReceived(0, [b"", n.to_bytes(8, "big"), batch(store([n]))])
            first.carry_out(first.relay.handle(received, first.clock.time()))
        with pytest.raises(InUseError, match=rf"the numbering in {tmp_path}.*process {os.getpid()} "):
            Daemon(config)
        used = first.relay.outputs[0].streams[0].next_seq
        assert used >= 3 * AHEAD
        assert reached(without_state(config, tmp_path)) >= used, "after a kill its numbers would be used again"
        await first.close(drain=0)

    run_async(main)
