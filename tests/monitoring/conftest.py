"""Run a real Prometheus against kvbus processes with real faults, once for all tests that read its results."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from tests import budget
from tests.log.redis_server import RedisServer
from tests.monitoring.faults import Scene, scene, scrape_config
from tests.monitoring.prometheus import Prometheus, rules_in_a_hurry, running_prometheus


@dataclass
class BusState:
    """The Prometheus that has scraped some kvbus processes with faults, and the results of the run.

    Prometheus is still running, so tests can query it. ``at`` is the time at which all faults were active.
    """

    server: Prometheus
    at: float = 0.0
    lag: float = 0.0
    """Maximum delay of a timer in the test's own process, in seconds."""
    lasted: float = 0.0
    """Seconds from the first fault to the last expected alert."""
    alerts: list[dict[str, Any]] = field(default_factory=list)
    """The alerts as Prometheus sends them to a receiver of notifications."""
    metrics: dict[str, str] = field(default_factory=dict)
    """The text of `/metrics` of each kvbus process, by the process's name."""


@pytest.fixture(scope="session")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool (.ci/run installs it with Prometheus)")
    return found


@pytest.fixture(scope="session")
def prometheus_is_there() -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus (.ci/run installs it)")


@pytest.fixture(scope="session")
def observed(
    prometheus_is_there: None, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BusState]:
    directory = tmp_path_factory.mktemp("prometheus")
    rules = directory / "rules.json"
    rules.write_text(rules_in_a_hurry())
    (directory / "scene").mkdir()
    with contextlib.ExitStack() as servers:
        runner = servers.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        player = scene(directory / "scene", redis.address)
        played: Scene = runner.run(player.__aenter__())
        servers.callback(lambda: runner.run(player.__aexit__(None, None, None)))
        server = servers.enter_context(running_prometheus(directory, scrape_config(rules, list(played.buses.values()))))
        seen = BusState(server)

        async def play() -> None:
            await played.until_watched(server)
            began = time.monotonic()
            played.go_wrong(server)
            await played.until_all_fire(server)
            seen.lasted = time.monotonic() - began

        runner.run(play())
        seen.at, seen.lag = time.time(), played.lag
        seen.alerts = server.get("/api/v1/alerts")["alerts"]
        for name in ("healthy", "faulty"):
            with urllib.request.urlopen(f"http://{played.buses[name].http}/metrics", timeout=30) as answer:
                seen.metrics[name] = answer.read().decode()
        yield seen
        with budget.ends_servers():
            servers.close()
