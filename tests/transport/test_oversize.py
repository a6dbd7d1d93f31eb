"""Tests for a frame that is larger than ``limits.max_frame_bytes``: kvbus closes the connection of its sender."""

from __future__ import annotations

import zmq

from kvbus.core.types import Reason
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually, running_bus
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.doubles.socket_routers import RouterOnASet

LIMIT = 4096
HUGE = batch(store([1000], tokens=list(range(2**20, 2**20 + 8000)), block_size=8000))


def filled(n: int) -> bytes:
    return batch(store([n + 1]))


async def test_an_oversize_batch_is_counted_and_later_batches_are_relayed():
    """Only the oversize batch is lost, although kvbus closes the connection because of it.

    kvbus connects again, and also relays the batches that were published while it was not connected.
    """
    assert len(HUGE) > LIMIT
    async with (
        running_bus(limits={"max_frame_bytes": LIMIT}) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await engine.wait_for_subscriber(60)
        for n in range(3):
            engine.publish(filled(n))
        await eventually(lambda: bus.caught_up(2), "three batches")
        engine.publish(HUGE)
        for n in range(4, 8):
            engine.publish(filled(n))
        stats = bus.source.stats
        await eventually(lambda: stats.rejected[Reason.FRAME_SIZE], "the rejection")
        await engine.wait_for_subscriber(60, count=2)
        engine.publish(filled(8))
        await eventually(lambda: bus.caught_up(8), "the newest batch")
        assert stats.lost == 1, stats
        assert stats.missing == stats.recovered + stats.lost
        assert bus.source.partial
        router = RouterOnASet(bus.out, bus.out_replay)
        try:
            await router.replay()
            # the lost batch may have had any event, so kvbus cleared the source, and only blocks of later batches are
            # left
            assert {block for _, _, block in router.view.blocks} == {5, 6, 7, 8, 9}
        finally:
            router.close()


async def test_an_engine_that_connects_to_kvbus_reconnects_after_an_oversize_frame():
    """An engine that connects to kvbus connects again after an oversize frame.

    kvbus closes the connection and counts the batch as missing and lost, as if it had connected to the engine itself.
    """
    async with (
        running_bus(bind=True, limits={"max_frame_bytes": LIMIT}) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=False) as engine,
    ):
        await engine.wait_for_subscriber(60)
        engine.publish(filled(0))
        await eventually(lambda: bus.caught_up(0), "the first batch")
        engine.publish(HUGE)
        await engine.wait_for_subscriber(60, count=2)
        engine.publish(filled(2))
        await eventually(lambda: bus.caught_up(2), "the third batch")
        assert bus.source.stats.lost == 1


async def test_an_oversize_request_closes_only_the_connection_of_its_sender():
    async with (
        running_bus(limits={"max_request_bytes": 1024}) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await engine.wait_for_subscriber(60)
        engine.publish(filled(0))
        await eventually(lambda: bus.caught_up(0), "the first batch")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        rude, router = context.socket(zmq.DEALER), RouterOnASet(bus.out, bus.out_replay)
        sub = context.socket(zmq.SUB)
        try:
            monitor = rude.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            rude.connect(bus.out_replay)
            rude.send_multipart([b"", b"x" * 5000])
            await eventually(lambda: monitor.poll(0), "the connection cut")
            sub.setsockopt(zmq.SUBSCRIBE, b"x" * 5000)
            sub.connect(bus.out)
            assert await router.replay() == [0]
            assert bus.daemon.outputs.stats[0].subscribers == 0
            rude.disable_monitor()
            monitor.close()
        finally:
            rude.close(0)
            sub.close(0)
            router.close()
            context.term()
