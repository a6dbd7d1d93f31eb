"""Test kvbus between peers on go-zeromq, which lose their connections if they get ZMTP heartbeats.

The test lasts longer than such connections would survive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any, Final

import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually
from tests.doubles.engine import Engine
from tests.doubles.router import PlainSetRouter
from tests.doubles.socket_routers import RouterOnASet
from tests.ports import ports_in_a_row
from tests.wire.captures import Key

from .go_peers import SECONDS_ENV, publisher, subscriber
from .support import Kvbus

SECONDS: Final = float(os.environ.get(SECONDS_ENV, "30"))
PAUSE: Final = 0.05
"""Seconds between two batches of an engine."""

TALKS: Final = 3.0
"""Seconds at the beginning and at the end of the test in which the engine that is otherwise silent publishes."""

ANY: Final = "tcp://127.0.0.1:*"


def endpoint_of(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


def difference_text(view: PlainSetRouter, truth: set[Key]) -> str:
    held = set(view.blocks)
    return f"{len(truth - held)} of {len(truth)} blocks missing, {len(held - truth)} dead"


@pytest.mark.gozmq
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
async def test_peers_on_go_zeromq_keep_their_connections(gozmq: Path, tmp_path: Path) -> None:
    """No connection between kvbus and a peer on go-zeromq is lost.

    The peers are a router, which reads an engine on libzmq, an engine that binds, and an engine that connects to kvbus.
    """
    out, bound, dialled = ports_in_a_row(8), ports_in_a_row(2), ports_in_a_row(2)
    output = {
        "endpoint": endpoint_of(out),
        "replay_endpoint": endpoint_of(out + 4),
        "profile": "llm-d",
        "topic": "kv@{source}@m",
    }
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        plain = await enter(EnginePublisher(ANY, ANY, bind=True))
        binds = await enter(publisher(gozmq, tmp_path, "bind", endpoint_of(bound), endpoint_of(bound + 1)))
        sources: list[dict[str, Any]] = [
            {"name": "plain", "endpoint": plain.endpoint, "replay_endpoint": plain.replay_endpoint},
            {"name": "binds", "endpoint": endpoint_of(bound), "replay_endpoint": endpoint_of(bound + 1)},
            {
                "name": "dials",
                "endpoint": endpoint_of(dialled),
                "replay_endpoint": endpoint_of(dialled + 1),
                "bind": True,
            },
        ]
        bus = stack.enter_context(Kvbus(plain, tmp_path, output, sources=sources))
        dials = await enter(publisher(gozmq, tmp_path, "dial", endpoint_of(dialled), endpoint_of(dialled + 1)))
        router = await enter(subscriber(gozmq, tmp_path, endpoint_of(out), endpoint_of(out + 4)))
        readers = [RouterOnASet(endpoint_of(out + i), endpoint_of(out + 4 + i)) for i in (1, 2)]
        for reader in readers:
            stack.callback(reader.close)
            reader.subscribe()
        await plain.wait_for_subscriber(60)
        await binds.subscribed()
        await dials.subscribed()
        subscribers = 'kvbus_output_subscribers{output="routers"}'
        await eventually(lambda: bus.metric(subscribers) == len(sources), "a router of each source")

        publishers: tuple[Any, ...] = (plain, binds, dials)  # the engines are alike: the same calls work for all
        engines = [Engine(to, seed=seed) for seed, to in enumerate(publishers)]
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while (second := loop.time() - begin) < SECONDS:
            for engine in engines:
                # One engine is silent most of the time: kvbus probes only the connections of silent engines.
                if engine.publisher is not binds or not TALKS < second < SECONDS - TALKS:
                    await engine.publish(1)
            for reader in readers:
                reader.read()
            await asyncio.sleep(PAUSE)

        truths = [engine.settle() for engine in engines]
        views = {"router, live": (router.live, truths[0]), "router, replay": (router.replayed, truths[0])}
        views |= {f"engine that {name}": (readers[i].view, truths[i + 1]) for i, name in enumerate(("binds", "dials"))}

        def exact() -> bool:
            for reader in readers:
                reader.read()
            return all(set(view.blocks) == truth for view, truth in views.values())

        with contextlib.suppress(AssertionError):  # the assertion below names what is wrong
            await eventually(exact, "exact views")
        log = (tmp_path / "kvbus.log").read_text()
        found = [f"{name}: {difference_text(view, truth)}" for name, (view, truth) in views.items()]
        found += [f"{router.said['lost']} connections lost by the router", f"{len(router.odd)} messages that are none"]
        found += [f"{log.count(': connection lost')} connections lost by kvbus"]
        assert found == [
            *(f"{name}: 0 of {len(truth)} blocks missing, 0 dead" for name, (_, truth) in views.items()),
            "0 connections lost by the router",
            "0 messages that are none",
            "0 connections lost by kvbus",
        ]
        assert [view.violations for view, _ in views.values()] == [[]] * len(views)
        assert router.said["connected"] == 2
        assert log.count(": connected") == bus.metric(subscribers) == len(sources)
        for source in sources:
            # No batch is lost. A batch counts as missing for a moment if a replay answer brings it before the live socket
            # does.
            for name in ("lost_batches", "restarts"):
                assert bus.metric(f'kvbus_source_{name}_total{{source="{source["name"]}"}}') == 0
