"""Five minutes of samples: rates from counters, levels as they stand, bounded, and gone with their source."""

from __future__ import annotations

import itertools
import math

import pytest

from kvbus.admin.history import KEPT, Course, History
from tests.admin.test_http import relayed, web_and_engine
from tests.doubles.payloads import payload, store
from tests.system.bus import eventually


def test_a_rate_is_known_from_the_second_sample_on_and_never_negative() -> None:
    course = Course(("batches",), ("blocks",))
    course.add(0, 0.0, (100,), {"blocks": 7})
    assert math.isnan(course.latest["batches"])
    assert course.latest["blocks"] == 7
    course.add(1, 2.0, (150,), {"blocks": 8})
    assert course.latest == {"batches": 25.0, "blocks": 8}
    course.add(2, 1.0, (3,), {"blocks": 0})  # a source of the same name in its place: its counters begin anew
    assert course.latest["batches"] == 0.0
    samples = course.samples([0, 1, 2])
    assert samples["batches"][1:] == [25.0, 0.0]
    assert samples["blocks"] == [7.0, 8.0, 0.0]


async def test_the_newest_five_minutes_are_kept_and_no_more() -> None:
    async with web_and_engine() as (client, engine):
        await engine.wait_for_subscriber(60)
        engine.publish(payload(store([1, 2, 3])))
        await relayed(client, 1)
        daemon, history = client.bus.daemon, History()
        for n in range(KEPT + 10):
            history.sample(daemon.relay, daemon.drivers, daemon.output_stats, float(n), 1000.0 + n)
        assert history.times() == [1010.0 + n for n in range(KEPT)]
        source = history.samples(history.sources["engine"])
        assert source["blocks"] == [3.0] * KEPT
        assert set(source["batches"]) == {0.0}
        assert history.newest["all"]["blocks"] == 3
        assert history.newest["at"] == 1000.0 + KEPT + 9
        assert set(history.outputs) == {"routers"}
        engine.publish(payload(store([4])))
        await relayed(client, 2)
        history.sample(daemon.relay, daemon.drivers, daemon.output_stats, KEPT + 12.0, 2000.0)
        assert history.newest["sources"]["engine"]["batches"] == pytest.approx(1 / 3)
        assert history.newest["all"]["batches"] == pytest.approx(1 / 3)
        assert history.newest["outputs"]["routers"]["batches"] == pytest.approx(1 / 3)
        daemon.relay.sources[0].gone = True
        history.sample(daemon.relay, daemon.drivers, daemon.output_stats, KEPT + 13.0, 2001.0)
        assert history.sources == {}
        daemon.relay.sources[0].gone = False


async def test_the_daemon_samples_once_a_second_and_shows_it() -> None:
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
        assert one["batches"][0] is None  # NaN is no JSON
        assert one["blocks"][-1] == 1
        assert len(one["times"]) == len(one["blocks"]) >= 4
        status, text = await client.status("/history?source=%3Cb%3E")
        assert (status, "no source '<b>'" in text) == (404, True)
        assert (await client.status("/history"))[0] == 404
