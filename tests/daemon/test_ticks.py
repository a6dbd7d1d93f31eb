"""A tick of a bus with many sources: it looks at all of them, a few in a turn of the loop."""

from __future__ import annotations

import asyncio
import collections
from itertools import chain

from kvbus.daemon import source_log as module
from kvbus.daemon.source_log import SourceLog
from tests.doubles.bus import eventually, running_bus
from tests.ports import free_ports


async def test_many_sources_are_looked_at_a_few_in_each_turn_and_none_that_has_gone(monkeypatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 3)
    looked: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
    turn, real = 0, SourceLog.look

    def look(self, relay, slots):
        slots = list(slots)
        looked[turn] += slots
        real(self, relay, slots)

    def count():
        nonlocal turn
        turn += 1
        timer[0] = asyncio.get_running_loop().call_soon(count)

    def seen():
        return list(chain.from_iterable(looked.values()))

    monkeypatch.setattr(SourceLog, "look", look)
    more = [{"name": f"e{n}", "endpoint": f"tcp://127.0.0.1:{port}"} for n, port in enumerate(free_ports(7))]
    async with running_bus(more_sources=more, output={"layout": "merged"}) as bus:
        timer = [asyncio.get_running_loop().call_soon(count)]
        await eventually(lambda: turn, "turns that are counted")
        looked.clear()
        await eventually(lambda: seen().count(7) > 1, "the last source looked at a second time")
        assert {len(slots) for slots in looked.values()} <= {0, 1, 2, 3}
        begin = seen().index(7) + 1  # the first tick may have begun before
        assert seen()[begin : begin + 8] == list(range(8))
        del bus.daemon.streams[7]
        first = turn
        await eventually(lambda: sum(slots.count(6) for at, slots in looked.items() if at > first) > 1, "ticks later")
        assert not any(7 in slots for at, slots in looked.items() if at > first + 1)
        timer[0].cancel()
