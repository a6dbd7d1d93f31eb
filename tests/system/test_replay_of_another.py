"""Tests of a replay endpoint of another engine over real sockets: two engines, one kvbus and a router."""

from __future__ import annotations

import asyncio
import time

import pytest
import zmq

from kvbus.core.findings.source import source_findings
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import Bus, eventually, running_bus
from tests.doubles.payloads import payload, store
from tests.doubles.router import PlainSetRouter
from tests.ports import free_ports

COUNT = 120
"""Number of batches of the first engine before kvbus connects."""


def found(bus: Bus) -> list[str]:
    return [each.text for each in source_findings(bus.source) if each.id == "replay_of_another"]


class Router(PlainSetRouter):
    """A router that reads the live stream of a running kvbus."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], bus: Bus) -> None:
        super().__init__()
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(bus.out)

    def read(self) -> set[int]:
        while self._socket.poll(0):
            _, seq, body = self._socket.recv_multipart()
            self.take(int.from_bytes(seq, "big"), body)
        return {block for *_, block in self.blocks if isinstance(block, int)}

    def close(self) -> None:
        self._socket.close(0)


class Engine:
    """An engine with a real publisher. Each batch stores one block, whose number begins at ``first``."""

    def __init__(self, publisher: EnginePublisher, first: int) -> None:
        self._publisher, self._first = publisher, first
        self.blocks: set[int] = set()

    def publish(self, count: int) -> None:
        for _ in range(count):
            block = self._first + len(self.blocks)
            self.blocks.add(block)
            self._publisher.publish(payload(store([block]), ts=time.time()))


@pytest.mark.parametrize("ahead", [0, 50, -50])
async def test_routers_get_the_live_engines_blocks_and_the_operator_a_finding(ahead):
    live, live_replay, other, other_replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(4))
    async with (
        EnginePublisher(live, live_replay, bind=True) as one,
        EnginePublisher(other, other_replay, bind=True) as two,
    ):
        first, second = Engine(one, 1), Engine(two, 1_000_001)
        first.publish(COUNT)
        second.publish(COUNT + ahead)
        source = {"endpoint": live, "replay_endpoint": other_replay}
        async with running_bus(source=source, block_size=16) as bus:
            with zmq.Context() as context:
                router = Router(context, bus)

                async def both_publish() -> list[str]:
                    first.publish(1)
                    second.publish(1)
                    await asyncio.sleep(0.05)
                    router.read()
                    return found(bus)

                await eventually(both_publish, "the finding")
                text = f"the replay at {other_replay} returns batches that differ from those that {live} publishes"
                assert found(bus) == [text]
                (finding,) = source_findings(bus.source)
                assert finding.key == "sources[0].replay_endpoint"
                assert bus.source.state == "live"
                before = set(first.blocks)
                for _ in range(20):
                    await both_publish()
                newest = first.blocks - before
                await eventually(lambda: newest <= router.read(), "the live blocks")
                assert router.read() <= first.blocks
                assert bus.source.stats.restarts <= 1
                router.close()
