"""Tests that a router which lacks batches gets them from the seq that it has reached, as fast as it reads."""

import pytest

from tests.doubles.bus import eventually
from tests.transport.live.streams import BIG, Slices, stream_of
from tests.transport.loops import both_loops, turns


@both_loops
@pytest.mark.parametrize("limit", [{"send_hwm": 20}, {"send_bytes": 20 * BIG}])
async def test_each_lost_batch_of_a_slow_router_without_states_is_counted(context, limit, caplog):
    async with stream_of(context, state=False, **limit) as stream:
        fast, slow = stream.sub(), stream.sub(slow=True)
        await stream.are("live", "live")
        await stream.stalled([fast])
        assert 0 < stream.live.queue_max <= 20
        await stream.level(fast, slow)
        assert fast.seqs() == list(range(stream.next_seq))
        assert len(slow.holes) == stream.slow_drops
        assert stream.stats.dropped_events == {"slow_router": 2 * stream.slow_drops}
        (said,) = [record for record in caplog.records if "it has to request a replay" in record.message]
        assert {"output", "stream", "peer"} <= vars(said).keys()
        (view,) = [view for view in stream.live.connected if view.dropped_batches]
        assert (view.dropped_batches, view.dropped_events) == (stream.slow_drops, 2 * stream.slow_drops)
        assert (stream.live.queue_max, stream.live.behind_seconds) == (0, 0.0)


@both_loops
async def test_live_batches_follow_a_state_without_a_gap_or_a_repetition(context):
    async with stream_of(context) as stream:
        stream.answers = False
        stream.slices = Slices(100, 100_000)
        router = stream.sub(slow=True)
        await eventually(lambda: stream.asked, "the request")
        assert stream.states == ["waiting"]
        stream.send(5)
        assert router.read() == []
        stream.send_state(stream.asked[0])
        stream.send(5)
        await turns(20)
        assert stream.states == ["receiving"]
        assert stream.live.busy == 1
        assert stream.live.queue_max == 5
        await stream.level(router)
        assert router.seqs("state") == list(range(5, 105))
        assert router.seqs("live") == list(range(105, 110))
        assert stream.states == ["live"]
        await eventually(lambda: not stream.live.busy, "rest")
        assert stream.stats.states_sent == {"subscribed": 1}
        assert stream.slow_drops == 0


@both_loops
async def test_a_router_that_stalls_during_its_state_gets_a_new_state(context):
    async with stream_of(context, send_hwm=20) as stream:
        fast = stream.sub()
        await stream.are("live")
        stream.slices = Slices(500, 20_000)
        slow = stream.sub(slow=True)
        await stream.are("live", "receiving")
        await stream.fills()
        await stream.stalled([fast])
        assert sorted(stream.states) == ["live", "stalled"]
        stream.slices = Slices(2, 100)
        await stream.level(fast, slow)
        assert slow.seqs("state")[-2:] == slow.seqs()[-2:]
        assert stream.stats.states_sent == {"subscribed": 2, "lost": 1}
