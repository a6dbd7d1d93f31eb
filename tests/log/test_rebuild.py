"""A relay, its output in a log, and readers that know nothing but the log: each holds the engine's blocks."""

import asyncio

from kvbus.parts.log.contract import START
from kvbus.parts.log.follower import Holds
from tests.doubles.bus import eventually
from tests.log.fleet import fleet


async def test_readers_of_the_log_hold_the_engines_blocks_from_whatever_state_they_begin_at(kind):
    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(700)
        await leaf.written()
        first = await log.reading(START)
        await first.holds(leaf)
        for _ in range(20):
            leaf.store(40, gone=30)
        await first.holds(leaf)
        late = await log.reading()
        await late.holds(leaf)
        assert not late.follower.counts
        assert leaf.stats.states_sent == {"subscribed": 1}
        assert not sum(leaf.stats.dropped_batches.values())


async def test_what_was_let_go_is_counted_and_made_good_by_a_state(kind):
    async with fleet(kind) as log:
        leaf, reading = await log.followed_leaf(queue_batches=5)
        for _ in range(50):  # the loop has no turn in between
            leaf.store(3, gone=2)
        assert leaf.stats.dropped_batches == {"queue_full": 45}
        assert leaf.stats.queue_depth == 5
        await eventually(lambda: leaf.stats.states_sent["lost"], "a state behind what is missing")
        await reading.holds(leaf)
        late = await log.reading()
        await late.holds(leaf)
        assert (leaf.stats.dropped_batches, reading.follower.counts) == ({"queue_full": 45}, {})


async def test_a_second_writer_has_the_stream_and_the_first_one_says_so(kind, caplog):
    async with fleet(kind) as log:
        first = log.leaf()
        first.store(10)
        await first.written()
        reading = await log.reading()
        await reading.holds(first)
        before = reading.follower.epoch
        second = log.leaf()
        second.store(20)
        await second.written()
        first.store(5)
        await eventually(lambda: "taken by another writer" in caplog.text, "the first one to say so")
        first.store(5)
        assert first.stats.dropped_batches == {"fenced": 2}
        second.store(1, gone=4)
        await reading.holds(second)
        assert reading.follower.epoch > before
        assert reading.follower.counts["lost"] == 0


async def test_a_leaf_that_is_back_begins_a_new_epoch_and_an_ended_stream_is_empty(kind):
    async with fleet(kind) as log:
        leaf, reading = await log.followed_leaf()
        leaf.store(5)
        await leaf.close(linger=20.0)
        await reading.until(lambda: reading.blocks == leaf.blocks)
        before = reading.follower.epoch
        again = log.leaf()
        again.store(3)
        await reading.holds(again)
        again.driver.retire(0)
        await reading.until(lambda: not reading.blocks)
        assert (reading.follower.epoch > before, reading.follower.holds) == (True, Holds.NOTHING)


async def test_a_log_that_goes_away_and_comes_back_has_everything_again(kind):
    async with fleet(kind) as log:
        leaf, reading = await log.followed_leaf(queue_batches=20)
        restarting = asyncio.ensure_future(log.kind.restart())
        for _ in range(30):
            leaf.store(5, gone=3)
            await asyncio.sleep(0.01)
        await restarting
        leaf.store(5)
        await reading.holds(leaf)
        late = await log.reading()
        await late.holds(leaf)
        assert reading.follower.counts["lost"] == 0
