"""Tests for scrapes of kvbus's metrics: how many calls of kvbus's functions one scrape makes, and single values."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

import kvbus
from kvbus.telemetry.metrics import Exposition, Readings
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import Bus, eventually, running_bus
from tests.doubles.payloads import payload, store

PACKAGE = str(Path(kvbus.__file__).parent)

MAX_CALLS = 300


def readings_of(exposition: Exposition) -> Readings:
    work = exposition.read()
    while True:
        try:
            next(work)
        except StopIteration as end:
            readings: Readings = end.value
            return readings


async def test_a_scrape_of_an_ordinary_bus_makes_few_calls() -> None:
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    async with running_bus() as bus:
        exposition = Exposition(bus.daemon)
        sys.setprofile(count)
        try:
            text = exposition.render(readings_of(exposition))
        finally:
            sys.setprofile(None)
    assert b"kvbus_source_batches_total{" in text
    assert 0 < calls < MAX_CALLS


def read(bus: Bus) -> str:
    exposition = Exposition(bus.daemon)
    return exposition.render(readings_of(exposition)).decode()


async def test_metrics_of_parts_that_are_not_configured_are_absent() -> None:
    async with running_bus(output={"replay_endpoint": None}) as bus:
        text = read(bus)
    for absent in (
        "replay_",
        "output_publishers",
        "output_streams_",
        "output_records_gone",
        "output_views",
        "router_queue_",
    ):
        assert f"kvbus_{absent}" not in text, absent
    assert "kvbus_output_queue_depth{" in text
    async with running_bus() as bus:
        assert "kvbus_replay_sessions{" in read(bus)


async def test_the_age_of_a_batch_is_based_on_the_engine_clock() -> None:
    # without a probe, whose answer could deliver a batch before the live stream does
    async with (
        running_bus(probe_interval=3600.0) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await engine.wait_for_subscriber(60)
        await eventually(lambda: bus.source.state == "live", "the end of the first replay")
        for seq, seconds in enumerate((20, 20, -3600)):
            engine.publish(payload(store([1]), ts=time.time() - seconds))
            await eventually(lambda seq=seq: bus.caught_up(seq), "the batch")
        assert bus.daemon.process.batch_age.counts[-1] == 0
        text = read(bus)
    assert 'kvbus_batch_age_seconds_bucket{le="10.0"} 1.0' in text, "an engine whose clock is ahead has an age of 0"
    assert 'kvbus_batch_age_seconds_bucket{le="30.0"} 3.0' in text


async def test_boolean_values_are_exported_as_1_or_0() -> None:
    async with running_bus() as bus:
        exposition = Exposition(bus.daemon)

        def values() -> dict[str, float]:
            text = exposition.render(readings_of(exposition)).decode()
            found = [family for family in text_string_to_metric_families(text) if len(family.samples) == 1]
            return {family.name: family.samples[0].value for family in found}

        assert (values()["kvbus_state_writing"], values()["kvbus_config_refused"]) == (0, 0)
        bus.daemon.process.state_writing = True
        bus.daemon.process.config_refused = ["worker"]
        assert (values()["kvbus_state_writing"], values()["kvbus_config_refused"]) == (1, 1)
