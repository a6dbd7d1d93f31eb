"""Who asks over HTTP takes a share of the loop's time, a piece in a turn; addresses and probes take turns."""

import asyncio
import collections
import time
from types import SimpleNamespace

import aiohttp
import pytest
import uvloop

from kvbus.admin import http
from kvbus.admin import pace as module
from kvbus.admin.pace import Pace, client
from tests.admin.test_query import asking


class Clock:
    """The time, which goes on while a piece waits for its turn, or works."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        self.waited = []
        self.loop = asyncio.get_running_loop()
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        here = SimpleNamespace(create_future=self.loop.create_future, call_later=self.call_later)
        known = {name: getattr(asyncio, name) for name in ("CancelledError", "Future", "Handle", "sleep")}
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(get_running_loop=lambda: here, **known))

    def call_later(self, seconds, call):
        self.waited.append(round(seconds, 6))
        self.now += seconds
        return self.loop.call_soon(call)


@pytest.fixture
def crowd(monkeypatch):
    """Everybody has asked much lately."""
    monkeypatch.setattr(module, "LATELY", -1e9)


async def test_pieces_leave_the_loop_three_quarters_of_its_time(monkeypatch, crowd):
    clock, pace = Clock(monkeypatch), Pace()
    for _ in range(5):
        async with pace.piece():
            clock.now += 0.004
    assert clock.waited == [0.002, 0.012, 0.012, 0.012]
    clock.now += 1.0
    async with pace.piece(probe=True):
        clock.now += 0.02
    async with pace.piece():  # what a probe takes counts for all
        pass
    assert clock.waited[4:] == [0.05]


async def test_behind_each_piece_the_threads_of_sockets_may_have_the_core(monkeypatch):
    done = []
    monkeypatch.setattr(module, "let_threads_run", lambda: done.append("theirs"))

    def work():
        for at in range(3):
            done.append(f"piece {at}")
            yield
        return "done"

    assert await Pace().in_turns(work()) == "done"
    assert done == ["piece 0", "theirs", "piece 1", "theirs", "piece 2", "theirs", "theirs"]


async def test_what_each_request_takes_beside_its_work_counts_too(monkeypatch, crowd):
    clock, pace = Clock(monkeypatch), Pace()
    for _ in range(100):
        async with pace.piece(first=True):
            pass
        async with pace.piece():
            pass
    assert clock.now == pytest.approx(100.0 + 4 * 100 * module.REQUEST - module.BURST, abs=module.TIMER)
    assert min(clock.waited) >= module.TIMER


def test_a_wait_that_is_too_short_for_a_timer_of_the_loop_does_not_spin(crowd, monkeypatch):
    given, real = [], vars(Pace)["_give"]

    def give(pace):
        given.append(1)
        real(pace)

    async def work():
        pace = Pace()
        for _ in range(200):
            async with pace.piece():
                until = time.perf_counter() + 0.0001
                while time.perf_counter() < until:
                    pass

    monkeypatch.setattr(Pace, "_give", give)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the daemon does
        runner.run(work())
    assert len(given) < 2 * 200


async def ask(clock, pace, address, seconds, *, probe=False):
    """A piece of an address; how long it waited for its turn."""
    client.set(address)
    asked = clock.now
    async with pace.piece(probe=probe):
        waited = clock.now - asked
        clock.now += seconds
    return round(waited, 6)


async def test_whoever_asks_little_does_not_wait_for_the_share_that_others_have_used_up(monkeypatch):
    clock, pace = Clock(monkeypatch), Pace()
    for _ in range(80):
        await ask(clock, pace, "crowd", 0.004)
    assert await ask(clock, pace, "crowd", 0.004) == 0.012
    assert await ask(clock, pace, "other", 0.001) == 0
    assert await ask(clock, pace, "crowd", 0.001, probe=True) == 0
    assert await ask(clock, pace, "crowd", 0.004) > 0.012


async def test_many_who_ask_little_leave_the_loop_half_of_its_time(monkeypatch):
    clock, pace = Clock(monkeypatch), Pace()
    for at in range(200):
        await ask(clock, pace, f"client {at}", 0.004)
    assert clock.now == pytest.approx(100.0 + 2 * 200 * 0.004 - module.BURST, abs=0.005)


async def test_an_address_asks_little_up_to_an_eighth_of_the_time(monkeypatch):
    clock, pace = Clock(monkeypatch), Pace()
    monkeypatch.setattr(module, "SHARE", 1e-6)  # of everybody's nothing is left
    begun, work = clock.now, 0.0
    while clock.now < begun + 30.0:
        await ask(clock, pace, "other", 0.001)
        work += 0.001
    assert work == pytest.approx((30.0 + module.LATELY) / 8, abs=0.002)


async def test_a_piece_that_fails_has_taken_its_time(monkeypatch):
    clock, pace = Clock(monkeypatch), Pace()
    piece = pace.piece()
    await piece.__aenter__()
    clock.now += 0.5
    assert not await piece.__aexit__(ValueError, ValueError(), None)
    async with pace.piece():
        assert clock.waited == [1.49]  # half of the last second is not little


async def piece(pace, done, name, address="a", *, probe=False):
    client.set(address)
    async with pace.piece(probe=probe):
        done.append(name)


async def test_addresses_take_turns_and_so_do_the_probes_of_each(monkeypatch):
    Clock(monkeypatch)  # all have had the same
    pace = Pace()
    done: list[int | str] = []
    crowd = [piece(pace, done, n) for n in range(20)]
    others = [piece(pace, done, f"b{n}", "b") for n in range(2)]
    await asyncio.gather(*crowd, piece(pace, done, "probe", probe=True), *others, piece(pace, done, "c", "c"))
    assert [name for name in done if isinstance(name, int)] == list(range(20))
    assert done[:8] == [0, 1, "probe", "b0", "c", 2, "b1", 3]


async def test_who_has_had_least_lately_goes_first(monkeypatch):
    clock, pace = Clock(monkeypatch), Pace()
    done: list[int | str] = []

    async def one_after_the_other(address, seconds):
        client.set(address)
        for n in range(4):
            async with pace.piece():
                done.append(f"{address}{n}")
                clock.now += seconds

    await ask(clock, pace, "crowd", 0.01)
    await ask(clock, pace, "other", 0.004)
    crowd, other = (one_after_the_other(*each) for each in (("crowd", 0.001), ("other", 0.003)))
    await asyncio.gather(crowd, other)
    assert done[:4] == ["other0", "other1", "crowd0", "crowd1"]
    assert sorted(done) == [f"{each}{n}" for each in ("crowd", "other") for n in range(4)]


async def test_who_comes_back_at_once_does_not_go_before_others(monkeypatch):
    Clock(monkeypatch)  # both have had the same
    pace = Pace()
    done: list[int | str] = []

    async def one_after_the_other():
        for n in range(5):
            await piece(pace, done, f"b{n}", "b")

    await asyncio.gather(*[piece(pace, done, n) for n in range(6)], one_after_the_other())
    assert done == [0, 1, "b0", 2, "b1", 3, "b2", 4, "b3", 5, "b4"]


async def test_requests_that_are_given_up_leave_their_turns_to_others():
    pace = Pace()
    done: list[int | str] = []
    asked = [asyncio.create_task(piece(pace, done, n)) for n in range(6)]
    await asyncio.sleep(0)
    asked[1].cancel()
    asked[5].cancel()
    await asked[0]
    await asyncio.wait(asked)
    assert done == [0, 2, 3, 4]
    last = asyncio.create_task(piece(pace, done, "last"))
    await asyncio.wait_for(last, 10)
    assert done[-1] == "last"


async def test_a_request_that_is_given_up_in_its_turn_does_not_keep_it(monkeypatch):
    real = vars(Pace)["_give"]

    def give(pace):
        real(pace)
        asked[1].cancel()  # before it goes on

    monkeypatch.setattr(Pace, "_give", give)
    pace = Pace()
    done: list[int | str] = []
    asked = [asyncio.create_task(piece(pace, done, n)) for n in range(3)]
    await asyncio.sleep(0)
    asked[0].cancel()  # nobody else waited when it came
    await asyncio.wait(asked, timeout=10)
    assert done == [2]


async def test_what_nobody_asks_for_goes_last_for_a_while(monkeypatch):
    clock, pace = Clock(monkeypatch), Pace()
    done: list[str] = []

    async def again_and_again(address, seconds, every):
        client.set(address)
        for n in range(40):
            async with pace.piece():
                done.append(f"{address}{n}")
                clock.now += seconds
            clock.now += every

    await asyncio.gather(
        again_and_again("asks", 0.0001, 0.004),
        *[piece(pace, done, f"sample {n}", module.NOBODY) for n in range(3)],
    )
    asked = [name for name in done if not name.startswith("sample")]
    first = done.index("sample 0")
    assert 0 < first < len(done) - 1
    assert 0.004 * first == pytest.approx(module.GIVE_WAY, rel=0.1)
    assert len(asked) == 40


async def test_a_question_does_not_wait_for_the_time_that_a_long_scrape_has_taken(monkeypatch):
    clock, pace = Clock(monkeypatch), Pace()
    waited = [await ask(clock, pace, "scrapes", 0.0002) for _ in range(300)]
    assert sum(waited) == pytest.approx(0.3 * 0.2, abs=0.02)
    assert await ask(clock, pace, "asks", 0.002) == 0
    assert await ask(clock, pace, "scrapes", 0.0002) > 0


async def test_a_crowd_that_never_waits_has_one_answer_made_in_a_turn(monkeypatch):
    """A hundred clients ask for all there is. Each turn of the loop makes one answer."""
    work: collections.Counter[tuple[int, bool]] = collections.Counter()
    turn = requests = 0

    def look():
        nonlocal turn
        turn += 1
        timer[0] = asyncio.get_running_loop().call_soon(look)

    class Watched(Pace):
        async def _turn(self, asking):
            await super()._turn(asking)
            work[turn, asking[1]] += 1

        def piece(self, *, first=False, **more):
            nonlocal requests
            requests += first
            return super().piece(first=first, **more)

        async def begin(self, waiting):
            nonlocal requests
            requests += 1
            await super().begin(waiting)

    monkeypatch.setattr(http, "Pace", Watched)
    answered: collections.Counter[str] = collections.Counter()
    async with asking() as here, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=50)) as session:
        url = here.url.removesuffix("/query")

        async def client(first):
            for at in range(5):
                path = ("/livez", "/metrics", "/sources", "/readyz", "/routers")[(first + at) % 5]
                async with session.get(url + path) as answer:
                    await answer.read()
                    answered[path] += answer.status == 200

        timer = [asyncio.get_running_loop().call_soon(look)]
        await asyncio.gather(*map(client, range(100)))
        timer[0].cancel()
    assert set(answered.values()) == {100}
    assert max(work.values()) == 1
    assert requests == 500 < work.total()
