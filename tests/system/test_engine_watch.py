"""Tests for what kvbus reads from an engine's HTTP API, because events do not show it.

An example is vLLM's sleep mode: the engine's blocks are gone, so kvbus clears them.
"""

from __future__ import annotations

import contextlib

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from kvbus.daemon import engine_watch
from kvbus.transport import engine_api
from tests.doubles.bus import eventually
from tests.doubles.engine import EngineWithApi
from tests.doubles.socket_routers import RouterOnASet
from tests.ports import free_port


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "INTERVAL", 0.02)


class Metrics:
    """vLLM's gauge of the sleep state with its labels, written by the Prometheus library that vLLM uses."""

    def __init__(self, engines: int = 1) -> None:
        self.registry = CollectorRegistry()
        labels = ["model_name", "engine", "sleep_state"]
        self.gauge = Gauge("vllm:engine_sleep_state", "EngineWithApi sleep state", labels, registry=self.registry)
        Gauge("vllm:num_requests_running", "x", ["engine"], registry=self.registry).labels("0").set(0)
        self.engines = range(engines)
        self.asked = 0
        self.set(level=0)

    def set(self, level: int) -> None:
        for engine in self.engines:
            for state, at in (("awake", 0), ("weights_offloaded", 1), ("discard_all", 2)):
                self.gauge.labels("Qwen/Qwen3-32B", str(engine), state).set(level == at)

    def answer(self, _request: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(body=generate_latest(self.registry))


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
async def test_kvbus_clears_a_sleeping_engine_before_the_engine_sends_a_clear(level: int, ranks: int):
    engine, metrics = EngineWithApi(ranks=ranks), Metrics(ranks)
    engine.offers("GET", "/metrics", metrics.answer)
    async with engine.running(), engine.bus(starts_partial=False) as bus:
        sources = bus.daemon.relay.sources
        for source, rank in zip(sources, engine.ranks, strict=True):
            await eventually(lambda s=source, r=rank: s.sequencer.next == r.publisher.next_seq, "caught up")
        assert all(len(source.normalizer.index) for source in sources)
        asked = metrics.asked
        await eventually(lambda: metrics.asked > asked + 2, "asked while it is awake")
        assert all(len(source.normalizer.index) for source in sources)
        with contextlib.closing(RouterOnASet(bus.out, bus.out_replay)) as router:
            router.subscribe()
            await eventually(lambda: bus.daemon.outputs.stats[0].subscribers, "the router's subscription")
            for rank in engine.ranks:
                await rank.publish(50)
            for source, rank in zip(sources, engine.ranks, strict=True):
                await eventually(lambda s=source, r=rank: s.sequencer.next == r.publisher.next_seq, "relayed")
            stream = bus.daemon.relay.outputs[0].streams[0]
            await eventually(lambda: router.read() == stream.next_seq and router.view.blocks, "the router has blocks")
            metrics.set(level)
            await eventually(lambda: router.read() and not router.view.blocks, "the router is cleared")
            await eventually(
                lambda: not any(len(source.normalizer.index) for source in sources), "every rank is cleared"
            )
            metrics.set(0)
            for source, rank in zip(sources, engine.ranks, strict=True):
                rank.reset()  # the engine's event for its sleep
                await rank.publish(50)
                truth, last = rank.settle(), rank.publisher.next_seq
                await eventually(lambda s=source, n=last: s.sequencer.next == n, "relayed")
                tables = source.normalizer.index.tables
                assert {(*key[:2], block) for key, table in tables.items() for block in table.blocks} == truth


@pytest.mark.parametrize(
    ("body", "status", "asleep"),
    [
        (b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n', 200, True),
        (b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n', 503, None),
        (
            b'vllm:engine_sleep_state{sleep_state="awake"} 0.0\nvllm:engine_sleep_state{sleep_state="awake"} 1.0\n',
            200,
            False,
        ),
        (b'vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 0.0\n', 200, None),
        (b'# vllm:engine_sleep_state{sleep_state="awake"} 0.0\n', 200, None),
        (b"\xff\xfe", 200, None),
        (b"", 200, None),
        (b'vllm:engine_sleep_state{sleep_state="awake"} 0.0\n' + b"x" * engine_api.MAX_METRICS, 200, None),
    ],
)
async def test_only_valid_metrics_show_whether_an_engine_sleeps(body: bytes, status: int, asleep: bool | None):
    engine = EngineWithApi()
    engine.routes["GET", "/metrics"] = lambda _: web.Response(body=body, status=status)
    async with engine.running(), engine_api.session() as client:
        assert await engine_api.is_asleep(client, engine.api) is asleep


async def test_kvbus_relays_an_engine_whose_api_does_not_answer():
    engine = EngineWithApi()
    engine.api = f"http://127.0.0.1:{free_port()}"
    async with engine.running(serves=False), engine.bus(starts_partial=False) as bus:
        rank = engine.ranks[0]
        await rank.publish(50)
        await eventually(lambda: bus.source.sequencer.next == rank.publisher.next_seq, "relayed")
        assert len(bus.source.normalizer.index)
