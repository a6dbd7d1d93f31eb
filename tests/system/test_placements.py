"""SGLang's snapshots on an output of profile sglang, for readers that keep sgl-router's rules, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
import zmq

from kvbus.tools.capture.play import play
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.payloads import payload, removed, store
from tests.doubles.sgl_router import SglRouter
from tests.ports import free_port
from tests.system.bus import Bus, eventually, running_bus
from tests.wire.captures import load, truth

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

NAME = "sglang0523_map"


def run(what: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(what)


@contextlib.asynccontextmanager
async def served(**output: Any) -> AsyncIterator[tuple[Bus, str, EnginePublisher]]:
    snapshots = f"tcp://127.0.0.1:{free_port()}"
    async with (
        running_bus(output={"profile": "sglang", "snapshot_endpoint": snapshots} | output) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await eventually(lambda: bus.source.state == "live", "the bus in sync")
        await engine.wait_for_subscriber(60)
        yield bus, snapshots, engine


async def relayed(bus: Bus, engine: EnginePublisher) -> None:
    await eventually(lambda: bus.caught_up(engine.next_seq - 1), "every batch relayed")


async def holds(router: SglRouter, expected: dict[int, int | None]) -> None:
    await eventually(lambda: router.read() and router.blocks == expected, f"{expected}, and it has {router.blocks}")


@pytest.mark.parametrize("on_subscribe", ["state", "nothing"])
@pytest.mark.parametrize("topic", ["kv", None])
def test_a_reader_that_comes_late_goes_on_exactly(on_subscribe: str, topic: str | None) -> None:
    async def late() -> None:
        async with served(on_subscribe=on_subscribe, topic=topic) as (bus, snapshots, engine):
            engine.publish(payload(store([1, 2]), store([3], 2)))
            await relayed(bus, engine)
            with contextlib.closing(SglRouter(bus.out, snapshots, (topic or "").encode())) as router:
                await holds(router, {1: None, 2: 1, 3: 2})
                first = router.epoch
                engine.publish(payload(removed([3]), store([-4], 1)))
                await holds(router, {1: None, 2: 1, -4: 1})
                router.disconnect()
                engine.publish(payload(store([5], 2)))
                await relayed(bus, engine)
                router.connect()
                engine.publish(payload(store([6], 5)))
                await holds(router, {1: None, 2: 1, -4: 1, 5: 2, 6: 5})
                engine.restart()
                await eventually(lambda: bus.source.stats.restarts, "the new life noticed")
                engine.publish(payload(store([7])))
                await holds(router, {7: None})
                assert router.epoch == first  # kvbus's numbering went on

    run(late())


def _beyond(engine: EnginePublisher, seq: int) -> bool:
    return engine.next_seq > seq


def _knows(router: SglRouter, expected: set[Any]) -> bool:
    return router.read() and router.blocks.keys() == expected


def test_readers_that_come_while_batches_flow_are_exact_at_the_end() -> None:
    async def flow() -> None:
        messages = load(NAME)
        async with served() as (bus, snapshots, engine):
            playing = asyncio.create_task(play(engine, lambda: messages, rate=500, subscribers=1))
            with contextlib.ExitStack() as stack:
                routers = []
                for part in range(1, 6):
                    await eventually(partial(_beyond, engine, part * len(messages) // 8), "some batches")
                    routers.append(stack.enter_context(contextlib.closing(SglRouter(bus.out, snapshots))))
                    for router in routers:
                        router.read()
                await playing
                await eventually(lambda: bus.caught_up(messages[-1].seq), "every batch relayed")
                expected = {block for _, medium, block in truth(NAME) if medium == "GPU"}
                assert len(expected) > 100
                for router in routers:
                    await eventually(partial(_knows, router, expected), "the truth")
                    assert router.why == []

    run(flow())


def test_what_asks_for_anything_else_is_told_so() -> None:
    async def ask() -> None:
        async with served() as (bus, snapshots, _):
            with zmq.Context() as context, contextlib.closing(context.socket(zmq.DEALER)) as dealer:
                dealer.connect(snapshots)
                for wanted in (b"snapshot", b"snapshot-v2"):
                    dealer.send_multipart([b"", wanted])
                    await eventually(lambda: dealer.poll(0), "an answer")
                    assert dealer.recv_multipart()[:2] == [b"", b"error"]
            stats = bus.daemon.outputs.stats[0]
            assert stats.replay_requests["malformed"] == 2

    run(ask())


def test_a_kvbus_that_asks_for_the_other_form_goes_by_the_replay() -> None:
    async def chain() -> None:
        async with served() as (bus, snapshots, engine):
            engine.publish(payload(store([1, 2])))
            await relayed(bus, engine)
            source = {"endpoint": bus.out, "replay_endpoint": bus.out_replay, "snapshot_endpoint": snapshots}
            async with running_bus(source=source) as second:
                await eventually(lambda: second.source.state == "live", "the second bus in sync")
                engine.publish(payload(store([3], 2)))
                index = second.source.normalizer.index
                await eventually(lambda: len(index) == 3, "what the first one holds")
                assert bus.daemon.outputs.stats[0].replay_requests["malformed"] == 1

    run(chain())
