"""Tests for the state of every output type that sends it, with the type's real readers."""

import asyncio

from tests.doubles.bus import eventually
from tests.transport.loops import both_loops


@both_loops
async def test_a_new_reader_gets_the_state_and_then_each_batch_once(state_output):
    async with state_output() as bus:
        bus.store(3)
        early = await bus.reader()
        await bus.level(early)
        for _ in range(3):
            bus.store(4000)
        late = await bus.reader()
        published = 0
        while not late.more():
            # Only a few batches are published, because kvbus must keep them all until the late reader has the state.
            if published < 10:
                published += 1
                bus.store(1)
            await eventually(lambda: early.more() and early.seqs[-1] == bus.newest, "the newest batch")
            await asyncio.sleep(0.005)
        for _ in range(5):
            bus.store(1)
        await bus.level(early, late)
        for reader in (early, late):
            assert reader.seqs == list(range(reader.seqs[0], bus.newest + 1))
            assert [event["type"] for event in reader.events[reader.seqs[0]]][:1] == ["AllBlocksCleared"]
            assert reader.view.clears == 1
        state = [seq for seq in late.seqs if seq <= late.seqs[0] + 3 and bus.published[seq] == 0]
        assert len(state) >= 3, "more blocks than a batch may hold"
        assert all(late.events[seq] for seq in state)
        assert all(early.events[seq] == [] for seq in state)
        assert (dict(bus.stats.states_sent), bus.stats.routers) == ({"subscribed": 2}, 2)


@both_loops
async def test_a_reader_gets_a_clear_as_the_state_of_an_empty_engine(state_output):
    async with state_output() as bus:
        reader = await bus.reader()
        await eventually(reader.more, "the state")
        assert [[event["type"] for event in reader.events[seq]] for seq in reader.seqs] == [["AllBlocksCleared"]]
        assert reader.seqs != [0], "a batch 0 that begins with AllBlocksCleared is how readers recognize SGLang"


@both_loops
async def test_a_reader_that_lost_batches_gets_the_state_when_it_reads_again(state_output):
    async with state_output(send_hwm=20) as bus:
        healthy, stalled = await bus.reader(), await bus.reader(slow=True)
        await bus.level(healthy, stalled)
        while bus.stats.dropped_batches["slow_router"] < 30:
            bus.store(500)
            await eventually(lambda: healthy.more() and healthy.seqs[-1] == bus.newest, "the newest batch")
        assert bus.driver.behind_seconds > 0
        await bus.level(stalled)
        bus.store(1)
        await bus.level(healthy, stalled)
        assert healthy.holes == []
        assert healthy.view.clears == 1
        holes = stalled.holes
        assert len(holes) >= 30
        assert holes == list(range(holes[0], holes[-1] + 1))
        behind = stalled.seqs[stalled.seqs.index(holes[-1] + 1)]
        assert stalled.events[behind][0]["type"] == "AllBlocksCleared"
        assert stalled.view.clears == 2
        stats = bus.stats
        assert dict(stats.dropped_batches) == {"slow_router": len(holes)}
        assert stats.dropped_events["slow_router"] == sum(bus.published[seq] for seq in holes)
        assert dict(stats.states_sent) == {"subscribed": 2, "lost": 1}
        assert bus.driver.behind_seconds == 0.0
