"""Tests for a log that loses all its data while its writer restarts.

Readers must notice that a new stream has begun, and no epoch number may be used twice.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.log_relay import EPOCH_BITS, LAST
from kvbus.parts.log import contract
from kvbus.parts.log.contract import Pointer, next_turn, now_as_turn
from kvbus.parts.log.record import RANDOM_BITS, SCHEMA, TURN_BITS, Kind, Record, read, write
from kvbus.parts.outputs import appending
from tests.doubles.bus import eventually
from tests.log.fleet import fleet
from tests.log.kinds import Kafka, Memory, Nats, Redis
from tests.log.records import PLAIN
from tests.log.test_aggregator import TOPIC, Two

KINDS = {"kafka": Kafka, "nats": Nats, "redis": Redis}


@pytest.fixture(params=KINDS)
def lost(request):
    """A log whose server can lose its data. The test runs once for each such kind of log (`KINDS`)."""
    return KINDS[request.param](request.getfixturevalue(request.param))


async def test_a_log_that_lost_its_data_begins_a_new_epoch(lost, tmp_path, monkeypatch):
    async with fleet(lost) as log, Two(lost, tmp_path, monkeypatch) as two:
        first = log.leaf()
        for _ in range(50):
            first.store(2, gone=1)
            await first.written()
        await two.level(first)
        (before,) = two.one.next
        server: Any = lost.broker if isinstance(lost, Kafka) else lost.server
        server.kill()
        server.lose()
        await first.close()
        await asyncio.to_thread(server.start)
        await lost.make()
        second = log.leaf()  # as after a restart without a state on disk
        for _ in range(50):
            second.store(3, gone=1)
            await second.written()
        await two.level(second)
        assert two.router.blocks(TOPIC) == second.blocks != first.blocks
        await eventually(lambda: two.one.next == two.other.next, "equal numbers")
        assert two.one.next[0] >> EPOCH_BITS > before >> EPOCH_BITS
        for each in (two.one, two.other):
            assert [source.stats.restarts for source in each.daemon.relay.present] == [1]


EPOCHS = st.integers(1, 2 ** (TURN_BITS + RANDOM_BITS) - 1)


@given(EPOCHS, st.integers(0, 2**TURN_BITS - 1))
def test_the_next_epoch_is_above_the_last_epoch_and_readable(last, clock):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "now_as_turn", lambda: clock)
        epoch = next_turn(Pointer(last)).epoch
    turns = epoch >> RANDOM_BITS, last >> RANDOM_BITS
    assert turns[0] > turns[1] or turns == (clock, 2**TURN_BITS - 1), "but where there is no room above it"
    assert turns[0] >= clock
    record = Record(SCHEMA, Kind.BATCH, max(1, epoch), LAST - 1, **PLAIN)
    assert read(write(record)) == record


def test_streams_that_begin_at_the_same_time_have_different_epochs(monkeypatch):
    """Two streams that begin at the same time, because the clock was set back, have different epoch numbers."""
    now = now_as_turn()
    monkeypatch.setattr(contract, "now_as_turn", lambda: now)
    assert len({next_turn(None).epoch for _ in range(20)}) > 15


async def test_a_writer_begins_a_new_epoch_when_the_seqs_are_used_up(tmp_path, monkeypatch):
    monkeypatch.setattr(appending, "LAST", 30)
    async with fleet(Memory()) as log:
        leaf, reading = await log.followed_leaf()
        for _ in range(60):
            leaf.store(2, gone=1)
            await leaf.written()
        await reading.holds(leaf)
        assert len(set(reading.epochs)) > 1
        assert leaf.stats.dropped_batches.keys() <= {"log_unavailable"}
