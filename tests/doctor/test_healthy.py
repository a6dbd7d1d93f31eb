"""Test that a kvbus has no finding while it reads healthy engines of every dialect."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack

import pytest

from kvbus.config import load
from kvbus.core.findings.source import source_findings
from kvbus.daemon.daemon import Daemon
from kvbus.tools.doctor.examine import examine_bus
from kvbus.tools.sim.dialects import DIALECTS
from kvbus.tools.sim.engine import EngineOptions, SimEngine, run
from kvbus.tools.sim.workload import synthetic
from kvbus.transport.engine.publisher import EnginePublisher
from tests.ports import free_ports

SECONDS = float(os.environ.get("TEST_HEALTHY_SECONDS", "60"))
"""Seconds for which the test runs. A developer starts longer runs, such as an hour, by hand."""


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 240)
async def test_kvbus_has_no_finding_about_healthy_engines_of_every_dialect(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ports = iter(free_ports(2 * len(DIALECTS) + 1))
    places = [(name, *(f"tcp://127.0.0.1:{next(ports)}" for _ in range(2))) for name in DIALECTS]
    over = {
        "sources": [{"name": name, "endpoint": live, "replay_endpoint": replay} for name, live, replay in places],
        "outputs": [{"name": "routers", "layout": "merged", "endpoint": f"tcp://127.0.0.1:{next(ports)}"}],
        "http": "127.0.0.1:0",
        "state_dir": None,
    }
    options = EngineOptions(blocks=2000)
    async with AsyncExitStack() as stack:
        daemon = Daemon(load(None, env={}, overrides=over))
        await daemon.start()
        stack.push_async_callback(daemon.close, drain=0)
        stop = asyncio.Event()
        running = []
        for seed, (name, live, replay) in enumerate(places):
            publisher = EnginePublisher(live, replay, framing=DIALECTS[name].framing, bind=True)
            await stack.enter_async_context(publisher)
            engine = SimEngine(name, synthetic(seed, 0, max_tokens=4096), options=options)
            running.append(asyncio.ensure_future(run(engine, publisher, stop, rate=5.0)))
        await asyncio.wait(running, timeout=SECONDS)
        stop.set()
        await asyncio.gather(*running)
        sources = daemon.relay.sources
        assert all(source.stats.batches > SECONDS and source.state == "live" for source in sources)
        assert daemon.http_address is not None
        report = await examine_bus("http://{}:{}".format(*daemon.http_address), timeout=30)
        assert [str(each) for source in sources for each in source_findings(source)] == []
    assert report.findings == []
    assert [record.getMessage() for record in caplog.records if "reason" in vars(record)] == []
