"""Tests for a chain of two kvbus: the second reads the first as it would read an engine, also with snapshots."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from kvbus.tools.capture.play import play
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually, running_bus
from tests.doubles.socket_routers import RouterOnASet
from tests.ports import free_port
from tests.wire.captures import load, matches_truth

NAME = "vllm033_map_int"


async def the_chain(*, by_snapshot: bool) -> None:
    """Relay a recorded stream through two kvbus in a chain, and check the blocks at the end.

    The second kvbus starts when the journal of the first kvbus no longer has the oldest batches.
    """
    messages = load(NAME)
    half = len(messages) // 2
    snapshots = f"tcp://127.0.0.1:{free_port()}"
    offered = {"journal_batches": 5, "snapshot_endpoint": snapshots if by_snapshot else None}
    async with (
        running_bus(output=offered) as first,
        EnginePublisher(first.engine, first.engine_replay, bind=True) as engine,
    ):
        await eventually(lambda: first.source.state == "live", "the first bus in sync")
        await play(engine, lambda: messages[:half], rate=4000, subscribers=1)
        await eventually(lambda: first.caught_up(half - 1), "the first half relayed")
        upstream = {
            "endpoint": first.out,
            "replay_endpoint": first.out_replay,
            "snapshot_endpoint": snapshots if by_snapshot else None,
        }
        async with running_bus(source=upstream) as second:
            await eventually(lambda: second.source.state == "live", "the second bus in sync")
            await eventually(
                lambda: len(second.source.normalizer.index) == len(first.source.normalizer.index), "the same blocks"
            )
            assert not second.source.partial
            asked = second.source.stats.replays
            await eventually(lambda: second.source.stats.replays > asked + 3, "requests about the silent stream")
            assert second.source.stats.restarts == 0
            router = RouterOnASet(second.out, second.out_replay)
            router.subscribe()
            try:
                outputs = second.daemon.relay.outputs
                await eventually(lambda: second.daemon.outputs.stats[0].subscribers, "the router's subscription")
                await router.replay()
                for message in messages[half:]:
                    engine.publish(message.payload, seq=message.seq)
                    await asyncio.sleep(0)
                await eventually(lambda: first.caught_up(messages[-1].seq), "the second half relayed")
                stream = first.daemon.relay.outputs[0].streams[0]
                await eventually(lambda: second.caught_up(stream.next_seq - 1), "relayed twice")
                await eventually(lambda: router.read() == outputs[0].streams[0].next_seq, "the router up to date")
                assert matches_truth(NAME, router.view) is None
                assert router.view.violations == []
                assert second.source.stats.restarts == 0
            finally:
                router.close()


@pytest.mark.parametrize("by_snapshot", [True, False])
def test_a_chained_kvbus_learns_every_block_from_the_first_kvbus(by_snapshot: bool) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(the_chain(by_snapshot=by_snapshot))
