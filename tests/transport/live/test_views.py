"""What is shown of a stream's routers, while they are there and after they have left."""

from kvbus.core.wire.frames import ASKS_REPLAY
from kvbus.transport.live.views import LEFT
from tests.transport.bare import dialled
from tests.transport.live.streams import stream_of
from tests.transport.loops import both_loops, eventually


@both_loops
async def test_who_has_just_got_the_state_is_known_by_the_address(context):
    async with stream_of(context) as stream:
        assert not stream.live.views.claim_state("127.0.0.1")
        stream.answers = False
        stream.sub()
        await eventually(lambda: stream.asked, "the request")
        assert not stream.live.views.claim_state("127.0.0.2")
        assert stream.live.views.claim_state("127.0.0.1")
        assert not stream.live.views.claim_state("127.0.0.1"), "it asks again"
        stream.send_state(stream.asked[0])
        await stream.are("live")
        assert not stream.live.views.claim_state("127.0.0.1"), "this was the state"
        stream.sub()
        await eventually(lambda: len(stream.asked) == 2, "the request of another")
        assert stream.live.views.claim_state("127.0.0.1")
        stream.send_state(stream.asked[1])
        await stream.are("live", "live")
        assert not stream.live.views.claim_state("127.0.0.1")
    async with stream_of(context) as stream:
        stream.sub()
        await eventually(lambda: stream.asked, "the request")
        stream.send_state(stream.asked[0])
        await stream.are("live")
        assert stream.live.views.claim_state("127.0.0.1")
        assert not stream.live.views.claim_state("127.0.0.1")
    async with stream_of(context) as stream:
        stream.sub(b"", ASKS_REPLAY)
        await stream.are("live")
        assert not stream.live.views.claim_state("127.0.0.1")


@both_loops
async def test_who_may_have_asked_in_place_of_the_one_whose_state_answers(context):
    async with stream_of(context) as stream:
        views = stream.live.views
        stream.sub()
        await eventually(lambda: stream.asked, "the request")
        stream.send_state(stream.asked[0])
        await stream.are("live")
        for _ in range(2):
            views.claim_state("127.0.0.1")
        assert views.perhaps_empty("127.0.0.1") == [], "there is nobody else"
        stream.sub()
        await eventually(lambda: len(stream.asked) == 2, "the request of another")
        assert views.claim_state("127.0.0.1")
        (first,) = views.perhaps_empty("127.0.0.1")
        assert first.state == "live", "the other one has its state coming"
        assert views.perhaps_empty("127.0.0.2") == []
        stream.live.answered_by_state("127.0.0.1")
        assert (first.state, first.requests) == ("waiting", 0)
        await eventually(lambda: len(stream.asked) == 3, "the request for its state")
        for asked in stream.asked[1:]:
            stream.send_state(asked)
        await stream.are("live", "live")
        assert stream.stats.states_sent == {"subscribed": 2, "asked": 1}
        assert not views.claim_state("127.0.0.1"), "it answers no further request"


@both_loops
async def test_only_those_who_left_last_are_shown(context):
    async with stream_of(context) as stream, dialled(stream.port, b"SUB"):
        for _ in range(LEFT + 5):
            async with dialled(stream.port, b"SUB"):
                pass
        await eventually(lambda: sum(stream.stats.router_disconnects.values()) == LEFT + 5, "the end of all others")
        views = stream.live.views.routers
        assert [view.left is None for view in views] == [True] + [False] * LEFT
        assert {view.stream for view in views} == {3}
