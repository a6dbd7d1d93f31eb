"""Tests that a running bus logs findings about itself and its routers: a line when a finding begins, and a line when it
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvbus.config import load
from kvbus.core import source
from kvbus.core.wire.frames import ASKS_REPLAY
from kvbus.daemon import bus_log
from kvbus.daemon.daemon import Daemon
from kvbus.state.contract import StoreError
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import Bus, eventually, running_bus
from tests.doubles.payloads import payload, store
from tests.ports import free_port


async def asked(daemon: Daemon, path: str) -> Any:
    return json.loads(await text_of(daemon, path))


async def text_of(daemon: Daemon, path: str) -> str:
    assert daemon.http_address is not None
    url = "http://{}:{}{}".format(*daemon.http_address, path)

    def read() -> str:
        with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - http, as made above
            text: str = answer.read().decode()
            return text

    return await asyncio.to_thread(read)


@contextlib.contextmanager
def subscriber(bus: Bus, topic: str, **options: int) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = context.socket(zmq.SUB)
    for name, value in options.items():
        setattr(made, name, value)
    made.subscribe(topic)
    made.connect(bus.out)
    try:
        yield made
    finally:
        made.close(0)
        context.term()


async def test_a_router_that_subscribes_to_another_topic_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with running_bus(output={"topic": "events"}) as bus:
        with subscriber(bus, "kv@"):
            said = (
                "subscribes to 'kv@', but the stream's topic is 'events': the router gets nothing [outputs[0].topic]: "
            )
            await eventually(lambda: said in caplog.text, "the log line")
            (finding,) = await asked(bus.daemon, "/findings")
            (router,) = await asked(bus.daemon, "/routers")
            labels = 'id="router_topic",kind="router",name="routers",severity="problem"'
            assert f"kvbus_finding{{{labels}}} 1.0" in await text_of(bus.daemon, "/metrics")
    assert (finding["kind"], finding["output"], finding["peer"]) == ("router", "routers", router["peer"])
    assert (finding["id"], finding["key"], finding["severity"]) == ("router_topic", "outputs[0].topic", "problem")
    assert abs(finding["since"] - time.time()) < 100


async def test_a_subscription_that_only_announces_replays_causes_no_finding() -> None:
    async with running_bus(output={"topic": "events"}) as bus:
        with subscriber(bus, ASKS_REPLAY.decode()):
            await eventually(lambda: any(router.topics for router in bus.daemon.drivers[0].routers), "its subscription")
            (router,) = await asked(bus.daemon, "/routers")
            found = await asked(bus.daemon, "/findings")
    assert (router["topics"], found) == ([ASKS_REPLAY.decode()], [])


async def test_a_router_that_loses_batches_and_is_exact_again_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with (
        running_bus(output={"send_hwm": 4}) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        with subscriber(bus, "", rcvhwm=1, rcvbuf=4096) as router:
            await engine.wait_for_subscriber(60)
            await eventually(lambda: bus.daemon.output_stats[0].subscribers, "the router is there")
            n = 0

            def stalled() -> bool:
                nonlocal n
                n += 1
                engine.publish(payload(store([n], tokens=[2**20 + n] * 20_000, block_size=20_000), ts=time.time()))
                return "reads nothing and was cut off from the live stream" in caplog.text

            await eventually(stalled, "the router is cut off")

            def live() -> bool:
                while router.poll(0):
                    router.recv_multipart()
                return [each.state for each in bus.daemon.drivers[0].routers] == ["live"]

            await eventually(lambda: live() and "ended after" in caplog.text, "the end of it")
            await eventually(lambda: live() and "it got the state again at" in caplog.text, "what it has lost")
            (entry,) = await asked(bus.daemon, "/routers")
            (finding,) = await asked(bus.daemon, "/findings")
    assert (finding["id"], finding["severity"]) == ("router_lost_batches", "note")
    assert f"lost {entry['dropped']['batches']:,} batches" in finding["text"]


async def test_a_finding_about_refused_messages_ends_after_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(source, "RECENT_S", 0.5)
    async with (
        running_bus(block_size=24) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await engine.wait_for_subscriber(60)
        engine.publish(payload(store([1, 2]), ts=time.time()))
        text = "block_size is 24, but the engine has blocks of 16 tokens"
        await eventually(lambda: f"{text} [block_size]: set block_size" in caplog.text, "the finding")
        ended = re.compile(rf"source engine: ended after \d+ s: events refused \(1\): {text}")
        await eventually(lambda: ended.search(caplog.text), "the end of it")
        found = await asked(bus.daemon, "/findings")
    assert "block_size" not in [each["id"] for each in found]


async def test_a_discovery_without_engines_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bus_log, "FIRST_ANSWER_S", 0.1)
    file = tmp_path / "engines.json"
    file.write_text("[]")
    out = {"name": "routers", "layout": "merged", "endpoint": f"tcp://127.0.0.1:{free_port()}"}
    sources = [{"name": "workers", "discover": {"file": {"path": str(file)}}}]
    over = {"sources": sources, "outputs": [out], "http": "127.0.0.1:0", "state_dir": None}
    daemon = Daemon(load(None, env={}, overrides=over))
    await daemon.start()
    try:
        said = 'bus: no engine is found: the discovery "workers" lists no engine [sources[0].discover]: start an engine'
        await eventually(lambda: said in caplog.text, "the log line")
        found = await asked(daemon, "/findings")
    finally:
        await daemon.close(drain=0)
    assert [(each["kind"], each["id"]) for each in found] == [("bus", "no_engine_found")]


async def test_a_state_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_bus(state_dir=str(tmp_path)) as bus:
        assert bus.daemon.state is not None
        bus.daemon.state.fail(StoreError("No space left on device"))
        said = f"bus: kvbus cannot write its state to {tmp_path}: No space left on device [state_dir]: free disk space"
        await eventually(lambda: said in caplog.text, "the log line")
