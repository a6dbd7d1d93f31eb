"""Tests for the time at which kvbus sends the state to each router, on a simulated clock.

The routers are objects without sockets.
"""

import asyncio
import contextlib
import functools
import selectors
from types import SimpleNamespace
from typing import Any

from kvbus.core.stats import OutputStats
from kvbus.transport.live.router import Router, Routers, RouterState
from kvbus.transport.live.states import GATHER, MAX_STATES, PACE, SLOW_AFTER, StateSlots


class Skipping(selectors.DefaultSelector):
    """A selector that never waits. Instead of waiting, it advances the simulated time of its event loop."""

    passed = 0.0

    def select(self, timeout=None):
        self.passed += max(0.0, timeout or 0.0)
        return super().select(0)


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop with a simulated clock, which jumps to the next timer instead of waiting."""

    def __init__(self):
        self._skipping = Skipping()
        super().__init__(self._skipping)

    def time(self):
        return self._skipping.passed


def on_its_own_clock(test):
    @functools.wraps(test)
    def run():
        with asyncio.Runner(loop_factory=SkippingLoop) as runner:
            runner.run(test())

    return run


class Bench:
    """Streams for tests on a simulated clock, with simulated routers.

    A stream records each request for a state, and begins to send it immediately.
    """

    def __init__(self, streams=1):
        self.requests: list[tuple[float, int, tuple[int, ...]]] = []
        """Time, stream and routers of each request for a state."""
        self.abandoned: list[int] = []
        self.peers: dict[int, Any] = {}
        self.state_slots = StateSlots()
        for slot in range(streams):
            self.state_slots.streams[slot] = OneStream(self, slot)

    def router(self, name, stream=0):
        routers = self.state_slots.streams[stream].routers
        if name not in self.peers:
            self.peers[name] = SimpleNamespace(id=name, writable=True, address="")
        if routers.get(name) is None:
            routers.add(Router(self.peers[name], stream))
        return routers.of(self.peers[name])

    def want(self, *names, stream=0):
        for name in names:
            router = self.router(name, stream)
            self.state_slots.streams[stream].routers.move(router, RouterState.WAITING)
            self.state_slots.want(router)

    def done(self, *names, stream=0):
        for name in names:
            router = self.router(name, stream)
            self.state_slots.streams[stream].routers.move(router, RouterState.BEHIND)
            self.state_slots.has_state(router)
            self.state_slots.look_soon()

    def leave(self, *names, stream=0):
        for name in names:
            router = self.router(name, stream)
            self.state_slots.left(router)
            self.state_slots.streams[stream].routers.move(router, RouterState.GONE)
            self.state_slots.look_soon()

    @property
    def asked(self):
        return [names for _, _, names in self.requests]


class OneStream:
    def __init__(self, bench, slot):
        self.bench, self.slot = bench, slot
        self.routers = Routers("routers", OutputStats())

    def request(self, routers):
        now = asyncio.get_running_loop().time()
        self.bench.requests.append((now, self.slot, tuple(router.peer.id for router in routers)))
        for router in routers:
            self.routers.move(router, RouterState.RECEIVING)
            router.state_sent_at = now
        self.bench.state_slots.begin(routers)

    def restart(self, router):
        self.bench.abandoned.append(router.peer.id)
        self.routers.move(router, RouterState.WAITING)
        self.bench.state_slots.want(router)


@contextlib.asynccontextmanager
async def bench(streams=1):
    made = Bench(streams)
    try:
        yield made
    finally:
        made.state_slots.close()


@on_its_own_clock
async def test_routers_that_subscribe_together_share_a_state():
    async with bench() as b:
        b.want(1, 2)
        await asyncio.sleep(GATHER / 2)
        b.want(3)
        await asyncio.sleep(1.0)
        assert b.asked == [(1, 2), (3,)]
        (first, *_), (second, *_) = b.requests
        assert GATHER <= first <= GATHER + 2 * PACE
        assert GATHER / 2 <= second - GATHER <= GATHER / 2 + 2 * PACE


@on_its_own_clock
async def test_at_most_max_states_are_sent_concurrently():
    async with bench() as b:
        for name in range(MAX_STATES + 1):
            b.want(name)
            await asyncio.sleep(1.0)
        b.want(MAX_STATES + 1)
        await asyncio.sleep(1.0)
        assert b.asked == [(name,) for name in range(MAX_STATES)]
        b.done(0)
        await asyncio.sleep(1.0)
        assert b.asked == [*((name,) for name in range(MAX_STATES)), (MAX_STATES, MAX_STATES + 1)]
        assert len(b.state_slots.under_way) == MAX_STATES


@on_its_own_clock
async def test_slow_routers_do_not_delay_the_state_of_another_router():
    async with bench() as b:
        for name in range(MAX_STATES):
            b.want(name)
            await asyncio.sleep(1.0)
        b.want(9)
        await asyncio.sleep(SLOW_AFTER)
        assert b.asked[-1] == (9,)
        assert not b.abandoned
        assert [b.router(name).in_slow_slot for name in (0, 9)] == [True, False]


@on_its_own_clock
async def test_slots_for_slow_routers_are_limited():
    async with bench() as b:
        for name in range(MAX_STATES + 1):
            b.want(name)
            await asyncio.sleep(1.0)
        await asyncio.sleep(3 * SLOW_AFTER)
        last = MAX_STATES
        assert b.abandoned == [last]
        assert len(b.state_slots.under_way) == MAX_STATES
        assert b.asked == [(name,) for name in range(MAX_STATES + 1)], "it waits for a place among the slow ones"
        b.want(99)
        await asyncio.sleep(1.0)
        assert b.asked[-1] == (99,), "and nobody else waits for one of these"
        b.done(0)
        await asyncio.sleep(1.0)
        assert b.asked[-1] == (last,)


@on_its_own_clock
async def test_a_disconnected_router_gets_no_state_and_frees_its_slot():
    async with bench() as b:
        b.want(1, 2)
        b.leave(1)
        await asyncio.sleep(1.0)
        assert b.asked == [(2,)]
        b.leave(2)
        await asyncio.sleep(1.0)
        assert b.state_slots.under_way == {}
        b.want(3)
        b.state_slots.close()
        await asyncio.sleep(2.0)
        assert b.asked == [(2,)]


@on_its_own_clock
async def test_streams_share_the_slots_and_a_router_gets_one_state_after_another():
    async with bench(streams=3) as b:
        for stream in range(3):
            b.want(0, 1, stream=stream)
        await asyncio.sleep(1.0)
        assert b.asked == [(0, 1)]  # the routers of the first stream
        b.done(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert b.asked == [(0, 1), (0,)]
        b.peers[1].writable = False
        b.done(1)
        await asyncio.sleep(1.0)
        assert b.asked == [(0, 1), (0,)]
        b.peers[1].writable = True
        b.state_slots.look_soon()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert b.asked == [(0, 1), (0,), (1,)]


@on_its_own_clock
async def test_a_slow_router_is_slow_on_every_stream():
    async with bench(streams=2) as b:
        b.want(1)
        await asyncio.sleep(SLOW_AFTER + 1)
        b.done(1)
        b.want(1)
        b.want(1, stream=1)
        await asyncio.sleep(SLOW_AFTER + 1)
        b.state_slots.streams[0].restart(b.router(1))
        await asyncio.sleep(1.0)
        assert [b.router(1, stream).in_slow_slot for stream in (0, 1)] == [True, True]
        assert b.asked == [(1,), (1,), (1,)]


@on_its_own_clock
async def test_no_state_is_requested_after_the_close():
    async with bench(streams=2) as b:
        b.want(1)
        b.want(1, stream=1)
        await asyncio.sleep(1.0)
        b.done(1)
        b.state_slots.close()
        await asyncio.sleep(1.0)
        assert b.asked == [(1,)]
