"""Tests for a relay with a log output, and readers that read only the log: each reader holds the engine's blocks."""

from kvbus.parts.log.contract import START
from tests.doubles.bus import eventually
from tests.log.fleet import fleet


async def test_readers_from_any_state_have_the_blocks_of_the_engine(kind):
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


async def test_dropped_batches_are_counted_and_replaced_by_a_state(kind):
    async with fleet(kind) as log:
        leaf, reading = await log.followed_leaf(queue_batches=5)
        for _ in range(50):  # the event loop does not run between these batches
            leaf.store(3, gone=2)
        assert leaf.stats.dropped_batches == {"queue_full": 45}
        assert leaf.stats.queue_depth == 5
        await eventually(lambda: leaf.stats.states_sent["lost"], "a state behind what is missing")
        await reading.holds(leaf)
        late = await log.reading()
        await late.holds(leaf)
        assert (leaf.stats.dropped_batches, reading.follower.counts) == ({"queue_full": 45}, {})
