"""Tests for one stream's live side with real SUB sockets, which read, stall, or disconnect in the middle of a state."""

import asyncio
from collections.abc import Callable

import zmq

from kvbus.core.wire.frames import ASKS_REPLAY
from kvbus.transport.live import states
from tests.doubles.bus import eventually
from tests.transport.bare import dialled
from tests.transport.live.streams import Slices, stream_of
from tests.transport.loops import both_loops, turns

# -- the live stream ----------------------------------------------------------------------------------------------------


@both_loops
async def test_a_burst_is_sent_in_the_next_iteration_or_by_a_flush(context):
    async with stream_of(context, state=False) as stream:
        router = stream.sub()
        await stream.are("live")
        stream.publish(3)
        assert (stream.stats.queue_depth, stream.stats.batches) == (3, 0)
        await stream.level(router)
        assert (stream.stats.queue_depth, stream.stats.batches, stream.stats.events) == (0, 3, 6)
    waiting: list[Callable[[], None]] = []
    async with stream_of(context, state=False, waiting=waiting) as stream:
        router = stream.sub()
        await stream.are("live")
        stream.publish(3)
        await turns(10)
        assert (len(waiting), router.read()) == (1, [])
        waiting.pop()()
        await stream.level(router)
        stream.live.flush()


# -- the state ------------------------------------------------------------------------------------------------------------


@both_loops
async def test_a_router_that_disconnects_during_its_state_is_removed(context):
    async with stream_of(context) as stream:
        stream.slices = Slices(100, 100_000)
        stays, leaves = stream.sub(slow=True), stream.sub(slow=True)
        await stream.are("receiving", "receiving")
        leaves.socket.close(0)
        await stream.are("receiving")
        stream.send(3)
        await stream.level(stays)
        assert stays.seqs("live") == list(range(stream.next_seq - 3, stream.next_seq))
        assert stays.holes == []
        (left,) = stream.live.left
        assert (left.state, left.states_sent) == ("receiving", 1)
        assert stream.stats.router_disconnects == {left.left: 1}
        assert (stream.stats.routers, stream.stats.subscribers) == (1, 1)


@both_loops
async def test_a_state_for_a_disconnected_router_is_not_sent(context):
    async with stream_of(context) as stream:
        stream.answers = False
        router = stream.sub()
        await eventually(lambda: stream.asked, "the request")
        router.socket.close(0)
        await stream.are()
        stream.send_state(stream.asked[0])
        assert dict(stream.stats.states_sent) == {}


@both_loops
async def test_a_state_that_is_sent_again_follows_all_earlier_batches_without_a_gap(context, monkeypatch):
    """While the router waits for the state, batches are published. It gets them before the state."""
    async with stream_of(context) as stream:
        router, other = stream.sub(), stream.sub()
        await stream.are("live", "live")
        stream.send(2)
        monkeypatch.setattr(states, "GATHER", 0.3)
        again = stream.asked[0][:1]
        stream.live.repeat_state(again)
        await stream.are("live", "waiting")
        stream.live.repeat_state(again)
        stream.send(3)
        await stream.are("live", "live")
        stream.send(2)
        await stream.level(router, other)
        assert dict(stream.stats.states_sent) == {"subscribed": 2, "asked": 1}
        assert router.holes == other.holes == []
        assert sorted(len(each.seqs("state")) for each in (router, other)) == [2, 4]
        (told,) = (each for each in (router, other) if len(each.seqs("state")) == 4)
        *_, one, two = told.seqs("state")
        kinds = [name for name, _ in told.read()]
        assert kinds[-9:] == ["live"] * 5 + ["state"] * 2 + ["live"] * 2
        assert (one, two) == (stream.next_seq - 4, stream.next_seq - 3)


@both_loops
async def test_a_state_that_is_being_sent_is_sent_again_after_its_end(context):
    async with stream_of(context) as stream:
        stream.slices = Slices(100, 100_000)
        router = stream.sub(slow=True)
        await stream.are("receiving")
        stream.live.repeat_state(stream.asked[0])
        stream.send(3)
        await stream.level(router)
        await eventually(lambda: stream.stats.states_sent["asked"] == 1, "the state again")
        await stream.level(router)
        assert router.holes == []
        assert len(router.seqs("state")) == 200


@both_loops
async def test_a_waiting_or_disconnected_router_gets_the_state_once(context):
    async with stream_of(context) as stream:
        stream.answers = False
        router = stream.sub()
        await eventually(lambda: stream.asked, "the request")
        stream.live.repeat_state((*stream.asked[0], 10**6))
        stream.send_state(stream.asked[0])
        await stream.are("live")
        await stream.level(router)
        assert dict(stream.stats.states_sent) == {"subscribed": 1}


# -- subscriptions --------------------------------------------------------------------------------------------------------


@both_loops
async def test_a_router_that_announces_replay_requests_gets_no_state(context):
    async with stream_of(context, send_hwm=20) as stream:
        asks, slow = stream.sub(b"", ASKS_REPLAY), stream.sub(ASKS_REPLAY, b"", slow=True)
        await stream.are("live", "live")
        await stream.stalled([asks])
        await stream.level(asks, slow)
        assert asks.seqs("state") == slow.seqs("state") == []
        assert len(slow.holes) == stream.slow_drops
        assert dict(stream.stats.states_sent) == {}
        assert stream.stats.subscribers == 2
        asks.socket.setsockopt(zmq.UNSUBSCRIBE, ASKS_REPLAY)
        asks.socket.setsockopt(zmq.UNSUBSCRIBE, b"")
        await stream.are("idle", "live")
        asks.socket.setsockopt(zmq.SUBSCRIBE, b"")
        await eventually(lambda: asks.seqs("state"), "the state, as it asks no more")


@both_loops
async def test_a_router_misses_no_batch_before_it_announces_replay_requests(context, monkeypatch):
    """A router subscribes to the stream, and then announces by a second subscription that it requests replays.

    It gets the batches published between the two subscriptions, and no state.
    """
    monkeypatch.setattr(states, "GATHER", 600.0)
    async with stream_of(context) as stream:
        router = stream.sub(b"")
        await stream.are("waiting")
        stream.send(3)
        router.socket.setsockopt(zmq.SUBSCRIBE, ASKS_REPLAY)
        await stream.are("live")
        stream.send(2)
        await stream.level(router)
        assert router.seqs("state") == []
        assert not router.holes
        assert dict(stream.stats.states_sent) == {}


@both_loops
async def test_a_stalled_router_that_announces_replay_requests_gets_batches_again(context):
    async with stream_of(context, send_hwm=20) as stream:
        fast, slow = stream.sub(), stream.sub(slow=True)
        await stream.are("live", "live")
        await stream.stalled([fast])
        await stream.are("live", "stalled")
        slow.socket.setsockopt(zmq.SUBSCRIBE, ASKS_REPLAY)
        await stream.are("live", "behind")
        stream.send(1)
        await stream.level(fast, slow)
        assert len(slow.seqs("state")) == 2


@both_loops
async def test_a_router_gets_nothing_after_its_cancellation_until_it_subscribes_again(context):
    async with stream_of(context) as stream:
        router = stream.sub(b"kv@", b"other")
        await stream.are("live")
        router.socket.setsockopt(zmq.UNSUBSCRIBE, b"other")
        await eventually(lambda: stream.stats.subscribers == 1, "the cancellation")
        assert stream.states == ["live"]
        router.socket.setsockopt(zmq.UNSUBSCRIBE, b"kv@")
        await stream.are("idle")
        assert stream.stats.subscribers == 0
        stream.send(5)
        router.socket.setsockopt(zmq.SUBSCRIBE, b"kv@pod")
        await stream.are("live")
        stream.send(1)
        await stream.level(router)
        assert router.seqs("live") == [9]
        assert router.seqs("state") == [0, 1, 7, 8]
        assert stream.stats.states_sent == {"subscribed": 2}


@both_loops
async def test_the_topic_of_a_stream_may_change(context):
    async with stream_of(context) as stream:
        old, new, both = stream.sub(b"kv@pod"), stream.sub(b"kv@other"), stream.sub(b"kv@")
        await stream.are("live", "idle", "live")
        stream.send(1)
        stream.topic = b"kv@other"
        stream.send(1)
        await stream.are("idle", "live", "live")
        stream.send(1)
        await stream.level(new, both)
        assert both.holes == []
        assert new.seqs("live") == both.seqs("live")[-1:]
        assert len(old.seqs("live")) == 1


@both_loops
async def test_messages_of_a_subscriber_are_ignored(context):
    async with stream_of(context) as stream, dialled(stream.port, b"SUB", minor=1) as router:
        router.send(b"\x01")
        router.send(b"hello", b"world")
        await stream.are("live")
        stream.send(1)
        await eventually(lambda: len(router.messages) == 3, "the state and the batch")
        assert not router.gone


# -- a full queue ----------------------------------------------------------------------------------------------------------


@both_loops
async def test_every_router_gets_the_state_again_after_the_queue_was_full(context):
    async with stream_of(context, queue_batches=10) as stream:
        router, asks = stream.sub(), stream.sub(b"", ASKS_REPLAY)
        await stream.are("live", "live")
        stream.publish(25)
        assert stream.stats.dropped_batches == {"queue_full": 15}
        assert stream.stats.dropped_events == {"queue_full": 30}
        await eventually(lambda: stream.stats.states_sent["lost"], "the state")
        await stream.are("live", "live")
        stream.send(1)
        await stream.level(router, asks)
        assert router.seqs("state")[-2:] == [27, 28]
        assert router.seqs("live") == [*range(2, 12), 29], "what was queued before is not lost"
        assert router.holes == asks.holes == list(range(12, 27))
        assert stream.stats.states_sent == {"subscribed": 1, "lost": 1}


@both_loops
async def test_empty_batches_never_fill_the_queue(context):
    async with stream_of(context, queue_batches=10) as stream:
        router = stream.sub()
        await stream.are("live")
        stream.publish(25, events=0)
        stream.send(0)
        assert not stream.stats.dropped_batches["queue_full"]
        await stream.level(router)
        assert router.holes == []
        assert stream.stats.states_sent == {"subscribed": 1}


# -- the end ---------------------------------------------------------------------------------------------------------------


@both_loops
async def test_a_stream_can_close_without_linger_while_it_sends_a_state(context):
    async with stream_of(context, send_hwm=20) as stream:
        stream.slices = Slices(100, 100_000)
        stream.sub(slow=True)
        await stream.are("receiving")
        stream.sub()
        await stream.are("receiving", "waiting")
        stream.publish(3)
        stream.live.close()
        await eventually(lambda: stream.stats.router_disconnects == {"closed": 2}, "the end of both")
        stream.live.flush()
        await asyncio.sleep(0.2)  # scheduled callbacks must have no effect after the close
        assert (stream.stats.routers, stream.stats.subscribers, stream.stats.queue_depth) == (0, 0, 0)
