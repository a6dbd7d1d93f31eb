"""Who asks over HTTP takes half of the loop's time at most, a piece in a turn; probes have a queue of their own."""

import asyncio
import collections
import contextlib
import time
from types import SimpleNamespace

import aiohttp

from kvbus.admin import http
from kvbus.admin import pace as module
from kvbus.admin.pace import Pace
from tests.admin.test_query import asking


class Clock:
    """The time, which goes on while a piece sleeps or works."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        self.slept = []
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=self.sleep, Lock=asyncio.Lock))

    async def sleep(self, seconds):
        self.slept.append(round(seconds, 6))
        self.now += seconds


async def test_pieces_leave_the_loop_half_of_its_time(monkeypatch):
    clock, pace = Clock(monkeypatch), Pace()
    for _ in range(6):
        async with pace.piece():
            clock.now += 0.004
    assert clock.slept == [0, 0, 0, 0.002, 0.004, 0.004]
    clock.now += 1.0
    async with pace.piece(probe=True):
        clock.now += 0.02
    async with pace.piece():  # what a probe takes counts for all
        pass
    assert clock.slept[6:] == [0, 0.01]


async def test_a_piece_that_fails_has_taken_its_time(monkeypatch):
    clock, pace = Clock(monkeypatch), Pace()
    piece = pace.piece()
    await piece.__aenter__()
    clock.now += 0.5
    assert not await piece.__aexit__(ValueError, ValueError(), None)
    async with pace.piece():
        assert clock.slept == [0, 0.49]


async def test_pieces_are_done_in_the_order_they_come_and_probes_beside_them():
    pace, done = Pace(), []

    async def piece(name, *, probe=False):
        async with pace.piece(probe=probe):
            done.append(name)

    await asyncio.gather(*[piece(n) for n in range(20)], piece("probe", probe=True))
    assert [name for name in done if name != "probe"] == list(range(20))
    assert done.index("probe") <= 1


async def test_a_crowd_that_never_waits_has_one_answer_made_in_a_turn(monkeypatch):
    """A hundred clients ask for all there is. Each turn of the loop makes one answer, and one to a probe."""
    work: collections.Counter[tuple[int, bool]] = collections.Counter()
    turn = 0

    def look():
        nonlocal turn
        turn += 1
        timer[0] = asyncio.get_running_loop().call_soon(look)

    class Watched(Pace):
        @contextlib.asynccontextmanager
        async def piece(self, *, probe=False):
            async with super().piece(probe=probe):
                work[turn, probe] += 1
                yield

    monkeypatch.setattr(http, "Pace", Watched)
    answered: collections.Counter[str] = collections.Counter()
    async with asking() as here, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=50)) as session:
        url = here.url.removesuffix("/query")

        async def client(first):
            for at in range(20):
                path = ("/livez", "/metrics", "/sources", "/readyz", "/routers")[(first + at) % 5]
                async with session.get(url + path) as answer:
                    await answer.read()
                    answered[path] += answer.status == 200

        timer = [asyncio.get_running_loop().call_soon(look)]
        began = time.perf_counter()
        await asyncio.gather(*map(client, range(100)))
        timer[0].cancel()
        assert time.perf_counter() - began < 60
    assert set(answered.values()) == {400}
    assert max(work.values()) == 1
    assert work.total() == 2000
