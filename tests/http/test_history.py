"""Tests for the history of the last five minutes that kvbus keeps for its status page.

They test rates and levels, a bounded size, and that a removed source's history is removed.
"""

from __future__ import annotations

import itertools
import math

import pytest

from kvbus.http import history as module
from kvbus.http.history import MAX_SAMPLES, Course, History
from tests.doubles.bus import eventually, running_bus
from tests.doubles.payloads import payload, store
from tests.http.test_http import relayed, web_and_engine
from tests.ports import free_ports


def test_the_history_has_rates_from_the_second_sample_and_no_negative_rate() -> None:
    course = Course(("batches",), ("blocks",))
    course.add(0, 7.0, (100,), {"blocks": 7})
    assert math.isnan(course.latest["batches"])
    assert course.latest["blocks"] == 7
    course.add(1, 9.0, (150,), {"blocks": 8})
    assert course.latest == {"batches": 25.0, "blocks": 8}
    # A source of the same name replaces the first one, so its counters begin again.
    course.add(2, 10.0, (3,), {"blocks": 0})
    assert course.latest["batches"] == 0.0
    samples = course.samples([0, 1, 2])
    assert samples["batches"][1:] == [25.0, 0.0]
    assert samples["blocks"] == [7.0, 8.0, 0.0]


def sampling(history, daemon, now, wall):
    clock = now if callable(now) else lambda: now
    return history.sample(daemon.relay, daemon.drivers, daemon.output_stats, clock, wall)


def steps_of_sample(history, daemon, now, wall):
    """Let the history take a complete sample of the daemon, and return the number of steps that this took."""
    return 1 + sum(1 for _ in sampling(history, daemon, now, wall))


async def test_the_history_keeps_the_newest_five_minutes() -> None:
    async with web_and_engine() as (client, engine):
        await engine.wait_for_subscriber(60)
        engine.publish(payload(store([1, 2, 3])))
        await relayed(client, 1)
        daemon, history = client.bus.daemon, History()
        for n in range(MAX_SAMPLES + 10):
            assert steps_of_sample(history, daemon, float(n), 1000.0 + n) == 1
        assert history.times() == [1010.0 + n for n in range(MAX_SAMPLES)]
        source = history.samples(history.sources["engine"])
        assert source["blocks"] == [3.0] * MAX_SAMPLES
        assert set(source["batches"]) == {0.0}
        assert history.newest["all"]["blocks"] == 3
        assert history.newest["at"] == 1000.0 + MAX_SAMPLES + 9
        assert set(history.outputs) == {"routers"}
        engine.publish(payload(store([4])))
        await relayed(client, 2)
        steps_of_sample(history, daemon, MAX_SAMPLES + 12.0, 2000.0)
        assert history.newest["sources"]["engine"]["batches"] == pytest.approx(1 / 3)
        assert history.newest["all"]["batches"] == pytest.approx(1 / 3)
        assert history.newest["outputs"]["routers"]["batches"] == pytest.approx(1 / 3)
        daemon.relay.sources[0].gone = True
        steps_of_sample(history, daemon, MAX_SAMPLES + 13.0, 2001.0)
        assert history.sources == {}
        daemon.relay.sources[0].gone = False


async def test_the_history_takes_a_sample_in_slices_and_shows_it_when_complete(monkeypatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 2)
    more = [{"name": f"e{n}", "endpoint": f"tcp://127.0.0.1:{port}"} for n, port in enumerate(free_ports(5))]
    async with running_bus(more_sources=more, output={"layout": "merged"}) as bus:
        daemon, history, moments = bus.daemon, History(), itertools.count()
        clock = lambda: float(next(moments))  # noqa: E731 - each look at it is a second later
        first = sampling(history, daemon, clock, 1000.0)
        next(first)
        assert (history.times(), history.newest, history.sources) == ([], {}, {})
        assert list(first) == [None, None]
        assert list(history.sources) == ["engine", *(f"e{n}" for n in range(5))]
        before = history.newest
        for source in daemon.relay.sources:
            source.stats.batches += 80
        second = sampling(history, daemon, clock, 1001.0)
        next(second)
        course = history.sources["engine"]
        assert (history.times(), history.newest) == ([1000.0], before)
        assert (
            before["sources"]["engine"]["batches"] != before["sources"]["engine"]["batches"]
        )  # It is NaN, which equals nothing: a first sample has no rate.
        assert history.samples(course)["blocks"] == [0.0]
        daemon.relay.sources[1].gone = True
        daemon.relay.sources[5].gone = True  # the sample has already read source 1, but not source 5
        assert list(second) == [None, None]
        daemon.relay.sources[1].gone = daemon.relay.sources[5].gone = False
        assert list(history.sources) == ["engine", *(f"e{n}" for n in range(4))]
        # Between two samples of a source, the clock was read eight times, one second each: for six sources, their sum,
        # and one output. So 80 batches are 10 per second.
        assert {name: latest["batches"] for name, latest in history.newest["sources"].items()} == dict.fromkeys(
            history.sources, 10.0
        )
        assert history.newest["all"]["batches"] == 50.0
        assert history.newest["at"] == 1001.0


async def test_the_history_begins_no_sample_before_the_previous_one_is_complete(monkeypatch) -> None:
    async with web_and_engine() as (client, _):
        admin = client.bus.daemon.admin
        await eventually(admin.history.times, "a sample")
        begun: list[float] = []
        real, held = admin.history.sample, True

        def waiting(*whole):
            begun.append(whole[-1])
            while held:
                yield
            yield from real(*whole)

        monkeypatch.setattr(admin.history, "sample", waiting)
        await eventually(lambda: begun, "one that has begun")
        taken, now = admin.history.times(), 1e9
        for n in range(3):
            admin.look(now + 2 * n)
        assert (admin.history.times(), len(begun)) == (taken, 1)
        held = False
        await eventually(lambda: len(admin.history.times()) > len(taken), "it is there")
        admin.look(now + 10)
        await eventually(lambda: len(begun) == 2, "the next one")


async def test_kvbus_samples_its_history_every_second_and_shows_it() -> None:
    async with web_and_engine() as (client, engine):
        await engine.wait_for_subscriber(60)
        engine.publish(payload(store([1])))
        await relayed(client, 1)
        history = client.bus.daemon.admin.history
        await eventually(lambda: len(history.times()) >= 4, "four samples")
        shown = await client.json("/overview")
        times = shown["times"]
        assert all(after - before > 0.5 for before, after in itertools.pairwise(times))
        assert set(shown["all"]) == {"batches", "events", "blocks", "queue"}
        assert {len(values) for values in shown["all"].values()} == {len(times)}
        assert len(shown["outputs"]["routers"]["behind"]) == len(times)
        one = await client.json("/history?source=engine")
        assert one["batches"][0] is None  # JSON has no NaN
        assert one["blocks"][-1] == 1
        assert len(one["times"]) == len(one["blocks"]) >= 4
        status, text = await client.status("/history?source=%3Cb%3E")
        assert (status, "no source '<b>'" in text) == (404, True)
        assert (await client.status("/history"))[0] == 404
