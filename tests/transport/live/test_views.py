"""Tests for what kvbus shows about a stream's routers, while they are connected and after they have disconnected."""

import time
from types import SimpleNamespace

from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source import RECENT_S
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.frames import ASKS_REPLAY
from kvbus.core.wire.profiles import PROFILES
from kvbus.telemetry.readings import read_routers
from kvbus.transport.live.stream import MAX_LEFT_ROUTERS
from tests.doubles.bus import eventually
from tests.transport.bare import dialled
from tests.transport.live.streams import stream_of
from tests.transport.loops import both_loops


class Requester:
    """A substitute for a replay server's peer, with only the fields that describe its request."""

    def __init__(self, address="127.0.0.1:7", key=b""):
        self.address = address
        self.key = key


@both_loops
async def test_a_request_comes_from_the_subscribed_routers_with_its_address_and_key(context):
    async with stream_of(context) as stream:
        views = stream.live
        assert views.routers_of(Requester()) == ((), True)
        stream.answers = False
        stream.sub()
        await eventually(lambda: stream.asked, "the request")
        assert views.routers_of(Requester("127.0.0.2:7")) == ((), True)
        assert views.routers_of(Requester("unix")) == ((), True)
        assert views.routers_of(Requester(key=b"another")) == ((), True)
        assert views.routers_of(Requester()) == (stream.asked[0], True)
        stream.send_state(stream.asked[0])
        await stream.are("live")
        stream.answers = True
        other = stream.sub()
        await stream.are("live", "live")
        routers, alone = views.routers_of(Requester())
        assert (len(routers), alone) == (2, False)
        other.socket.close(0)
        await stream.are("live")
        assert views.routers_of(Requester()) == (stream.asked[0], True)


@both_loops
async def test_a_request_does_not_come_from_a_router_that_gets_no_states(context):
    async with stream_of(context) as stream:
        stream.sub(b"", ASKS_REPLAY)
        await stream.are("live")
        assert stream.live.routers_of(Requester()) == ((), True)
        stream.sub()
        await stream.are("live", "live")
        assert stream.live.routers_of(Requester()) == (stream.asked[0], False)
    async with stream_of(context, state=False) as stream:
        stream.sub()
        await stream.are("live")
        assert stream.live.routers_of(Requester()) == ((), True)


@both_loops
async def test_only_the_last_disconnected_routers_are_shown(context):
    async with stream_of(context) as stream, dialled(stream.port, b"SUB"):
        for _ in range(MAX_LEFT_ROUTERS + 5):
            async with dialled(stream.port, b"SUB"):
                pass
        await eventually(
            lambda: sum(stream.stats.router_disconnects.values()) == MAX_LEFT_ROUTERS + 5, "the end of all others"
        )
        views = [*stream.live.connected, *stream.live.left]
        assert [view.left is None for view in views] == [True] + [False] * MAX_LEFT_ROUTERS
        assert {view.stream for view in views} == {3}


@both_loops
async def test_the_finding_about_lost_batches_ends_even_without_a_state(context):
    relay = Relay([SourceSpec("engine", 0)], [OutputSpec("out", PROFILES["vllm"], [b""])])
    async with stream_of(context, send_hwm=20) as stream:

        def findings_after(seconds):
            driver = SimpleNamespace(routers=stream.live.connected)
            readings = read_routers(relay, [driver], time.time() + seconds)
            return [finding for each in readings for finding in each.findings]

        asks, slow = stream.sub(b"", ASKS_REPLAY), stream.sub(ASKS_REPLAY, b"", slow=True)
        await stream.are("live", "live")
        await stream.stalled([asks])
        await stream.level(asks, slow)
        await eventually(lambda: [finding.id for finding in findings_after(0)] == ["router_lost_batches"], "the note")
        assert findings_after(0)[0].text.endswith("it has to request them from the replay")
        assert findings_after(RECENT_S + 1) == []
