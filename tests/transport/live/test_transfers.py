"""Who gets the state and when, on a clock of its own: peers are counters of acknowledged bytes."""

import asyncio
import contextlib
import functools
import selectors
from types import SimpleNamespace
from typing import Any

from kvbus.transport.live.router import Router
from kvbus.transport.live.transfers import GATHER, GROUPS, PACE, SLOW_AFTER, STALLED_AFTER, Transfers


class Skipping(selectors.DefaultSelector):
    """Waits for nothing: the time of its loop jumps instead."""

    passed = 0.0

    def select(self, timeout=None):
        self.passed += max(0.0, timeout or 0.0)
        return super().select(0)


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop on which every timer is due at once."""

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
    """Transfers, and what they asked for: routers by name, each with a peer that takes what it is told to."""

    def __init__(self):
        self.requests = []
        """Time and routers of each."""
        self.abandoned = []
        self.routers: dict[int, Any] = {}
        self.transfers = Transfers(self._request, self._abandon)

    def _request(self, routers):
        names = tuple(router.peer.id for router in routers)
        self.requests.append((asyncio.get_running_loop().time(), names))
        self.transfers.begin(routers)

    def _abandon(self, router):
        self.abandoned.append(router.peer.id)

    def want(self, *names):
        for name in names:
            if name not in self.routers:
                peer: Any = SimpleNamespace(id=name, acknowledged_bytes=0, writable=True)
                self.routers[name] = Router(peer)
            self.transfers.want(self.routers[name])

    def done(self, *names):
        for name in names:
            self.routers[name].slow = False
            self.transfers.forget(self.routers[name])

    async def read(self, seconds, *names):
        """So many seconds, in which these take something now and then."""
        for _ in range(round(seconds)):
            for name in names:
                self.routers[name].peer.acknowledged_bytes += 1
            await asyncio.sleep(1.0)

    @property
    def asked(self):
        return [names for _, names in self.requests]


@contextlib.asynccontextmanager
async def bench():
    made = Bench()
    try:
        yield made
    finally:
        made.transfers.close()


@on_its_own_clock
async def test_those_who_come_together_share_a_state():
    async with bench() as b:
        b.want(1, 2)
        await asyncio.sleep(GATHER / 2)
        b.want(3)
        await asyncio.sleep(1.0)
        assert b.asked == [(1, 2), (3,)]
        (first, _), (second, _) = b.requests
        assert GATHER <= first <= GATHER + 2 * PACE
        assert GATHER / 2 <= second - GATHER <= GATHER / 2 + 2 * PACE
        assert len(b.transfers) == 3


@on_its_own_clock
async def test_few_states_are_under_way_at_once():
    async with bench() as b:
        for name in range(GROUPS + 1):
            b.want(name)
            await b.read(1, *b.routers)
        b.want(GROUPS + 1)
        await b.read(1, *b.routers)
        assert b.asked == [(name,) for name in range(GROUPS)]
        b.done(0)
        await b.read(1, *b.routers)
        assert b.asked == [*((name,) for name in range(GROUPS)), (GROUPS, GROUPS + 1)]
        assert len(b.transfers) == GROUPS + 1


@on_its_own_clock
async def test_the_slow_ones_hold_up_nobody():
    async with bench() as b:
        for name in range(GROUPS):
            b.want(name)
            await b.read(1, *b.routers)
        b.want(9)
        await b.read(SLOW_AFTER, *b.routers)
        assert b.asked[-1] == (9,)
        assert not b.abandoned
        assert [b.routers[name].slow for name in (0, 9)] == [True, False]


@on_its_own_clock
async def test_there_are_few_places_for_the_slow_ones_too():
    async with bench() as b:
        for name in range(GROUPS + 1):
            b.want(name)
            await b.read(1, *b.routers)
        await b.read(3 * SLOW_AFTER, *b.routers)
        last = GROUPS
        assert b.abandoned == [last]
        assert len(b.transfers) == GROUPS
        b.want(last)
        await b.read(1, *b.routers)
        assert b.asked == [(name,) for name in range(GROUPS + 1)], "it waits for a place among the slow ones"
        b.want(99)
        await b.read(1, *b.routers)
        assert b.asked[-1] == (99,), "and nobody else waits for one of these"
        b.done(0)
        await b.read(1, *b.routers)
        assert b.asked[-1] == (last,)


@on_its_own_clock
async def test_a_router_that_takes_nothing_loses_its_place():
    async with bench() as b:
        b.want(1, 2)
        await b.read(STALLED_AFTER - 1, 1)
        assert b.abandoned == []
        await b.read(3, 1)
        assert b.abandoned == [2]
        await b.read(3 * STALLED_AFTER, 1)
        assert b.abandoned == [2]
        assert len(b.transfers) == 1


@on_its_own_clock
async def test_who_has_left_gets_none():
    async with bench() as b:
        b.want(1, 2)
        b.transfers.forget(b.routers[1])
        await b.read(1, 2)
        b.transfers.forget(b.routers[2])
        assert b.asked == [(2,)]
        assert len(b.transfers) == 0
        b.want(3)
        b.transfers.close()
        await b.read(2)
        assert b.asked == [(2,)]


@on_its_own_clock
async def test_a_state_that_nobody_takes_has_no_place():
    async with bench() as b:
        b.transfers.begin([])
        assert len(b.transfers) == 0


@on_its_own_clock
async def test_streams_share_the_places_and_a_router_gets_one_state_at_a_time():
    async with bench() as b:
        peers: list[Any] = [SimpleNamespace(id=i, acknowledged_bytes=0, writable=True) for i in range(2)]
        routers = [[Router(peer, stream) for peer in peers] for stream in range(3)]
        for both in routers:
            for router in both:
                b.transfers.want(router)
        await asyncio.sleep(1.0)
        assert b.asked == [(0, 1)]  # of the first stream
        b.transfers.forget(routers[0][0])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert b.asked == [(0, 1), (0,)]
        assert len(b.transfers) == 5
        peers[1].writable = False
        b.transfers.forget(routers[0][1])
        await asyncio.sleep(1.0)
        assert b.asked == [(0, 1), (0,)]
        peers[1].writable = True
        b.transfers.look_again()
        assert b.asked == [(0, 1), (0,), (1,)]


@on_its_own_clock
async def test_a_slow_router_is_slow_on_every_stream():
    async with bench() as b:
        peer: Any = SimpleNamespace(id=1, acknowledged_bytes=0, writable=True)
        first, second = Router(peer, 0), Router(peer, 1)
        b.transfers.want(first)
        b.transfers.want(second)
        for _ in range(round(SLOW_AFTER) + 2):
            peer.acknowledged_bytes += 1
            await asyncio.sleep(1.0)
        assert (first.slow, second.slow) == (True, True)
        b.transfers.look_again()
        assert b.asked == [(1,)]
        b.transfers.close()
        b.transfers.look_again()
        assert b.asked == [(1,)]


@on_its_own_clock
async def test_a_place_that_becomes_free_at_the_end_is_nobodys():
    async with bench() as b:
        peer: Any = SimpleNamespace(id=1, acknowledged_bytes=0, writable=True)
        first, second = Router(peer, 0), Router(peer, 1)
        b.transfers.want(first)
        b.transfers.want(second)
        await asyncio.sleep(1.0)
        b.transfers.forget(first)
        b.transfers.close()
        await asyncio.sleep(1.0)
        assert b.asked == [(1,)]
