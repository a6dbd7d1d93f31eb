"""What a scrape of an ordinary bus costs, in calls of kvbus's own functions, and how values are read."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

import kvbus
from kvbus.telemetry.metrics import Exposition, Readings
from tests.doubles.bus import running_bus

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


async def test_what_is_no_number_is_1_if_it_is_true() -> None:
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
