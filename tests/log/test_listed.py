"""Tests for a stream of a log that ends and begins again.

Its source at the aggregator is removed only when no router holds a block of it.
"""

from __future__ import annotations

import contextlib

from kvbus.core.events import RecordReceived
from kvbus.core.log_relay import EPOCH_BITS
from kvbus.parts.discovery.streams import LogStreams, StreamPatterns
from kvbus.parts.log.contract import Pointer
from kvbus.parts.log.record import RANDOM_BITS
from tests.log.fleet import KEY
from tests.log.kinds import Memory
from tests.log.records import batch, clear, gone


async def begin(kind):
    """Begin an epoch with a state of one block, and return the epoch's writer."""
    writer = await kind.open().claim(KEY)
    await writer.point(Pointer(writer.epoch, 0, await writer.append([clear(writer.epoch, 0, 1)])))
    return writer


async def test_an_ended_stream_is_read_again_only_after_a_new_listing(tmp_path):
    kind = Memory()
    writer = await begin(kind)
    streams = LogStreams(kind.open, StreamPatterns(endpoint="tcp://127.0.0.1:9"), "log")
    fed: list[RecordReceived] = []

    def feed(event):
        if isinstance(event, RecordReceived):
            fed.append(event)

    async with contextlib.aclosing(streams.watch()) as sets:
        (engine,) = await anext(sets)
        streams.open(engine.publishers[0].endpoint, 0, feed, lambda: None)
        await writer.append([batch(writer.epoch, 1, 2), gone(writer.epoch, 2)])
        assert await anext(sets) == ()
        assert [each.seq for each in fed] == [_number(writer, seq) for seq in range(3)]
        assert fed[-1].begins, "an empty state"
        fed.clear()
        writer = await begin(kind)
        assert await anext(sets) == (engine,)
        assert fed == [], "its slot could be freed until now"
        await writer.append([batch(writer.epoch, 1, 2), gone(writer.epoch, 2)])
        assert await anext(sets) == ()
        assert [each.seq for each in fed] == [_number(writer, seq) for seq in range(3)]


def _number(writer, seq):
    return writer.epoch >> RANDOM_BITS << EPOCH_BITS | seq
