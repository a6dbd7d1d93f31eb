"""What an engine's HTTP API says and its stream does not: kvbus clears a vLLM that sleeps, and knows its copies."""

from __future__ import annotations

import contextlib

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from kvbus.daemon import engine_watch
from kvbus.daemon.engine_watch import removes_each_copy
from kvbus.transport import engine_api
from tests.doubles.payloads import payload, removed, store
from tests.ports import free_port
from tests.system.bus import RouterOnASet, eventually, running_bus
from tests.system.old_engine import Engine


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "INTERVAL", 0.02)


class Metrics:
    """vLLM's gauge, with its labels, written by the library that writes vLLM's."""

    def __init__(self, engines: int = 1) -> None:
        self.registry = CollectorRegistry()
        labels = ["model_name", "engine", "sleep_state"]
        self.gauge = Gauge("vllm:engine_sleep_state", "Engine sleep state", labels, registry=self.registry)
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
async def test_an_engine_that_sleeps_is_cleared_before_it_says_so(level: int, ranks: int):
    engine, metrics = Engine(ranks=ranks), Metrics(ranks)
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
                rank.publish(50)
            stream = bus.daemon.relay.outputs[0].streams[0]
            await eventually(lambda: router.read() == stream.next_seq and router.view.blocks, "the router has blocks")
            metrics.set(level)
            await eventually(lambda: router.read() and not router.view.blocks, "the router is cleared")
            assert not any(len(source.normalizer.index) for source in sources)
            metrics.set(0)
            for source, rank in zip(sources, engine.ranks, strict=True):
                rank.reset()  # what it has to say of its sleep
                rank.publish(50)
                truth, last = rank.truth(), rank.publisher.next_seq
                await eventually(lambda s=source, n=last: s.sequencer.next == n, "relayed")
                tables = source.normalizer.index.tables
                assert {(key[1], block) for key, table in tables.items() for block in table.blocks} == truth


async def test_a_known_version_says_what_a_removal_means():
    engine = Engine()
    engine.offers("GET", "/version", lambda _: web.json_response({"version": "0.33.0"}))
    async with engine.running(), engine.bus(starts_partial=False) as bus:
        source = bus.source
        await eventually(lambda: len(engine.asked) > 0, "asked")
        rank = engine.ranks[0]
        await eventually(lambda: source.sequencer.next == rank.publisher.next_seq, "caught up")
        await eventually(lambda: "NVME" in source.normalizer.dump()["each"], "known, of tiers that never were, too")
        for event in (store([1], block_size=4), store([1], block_size=4), removed([1])):
            rank.publisher.publish(payload(event, ts=1e6))
        await eventually(lambda: source.sequencer.next == rank.publisher.next_seq, "relayed")
        assert source.state == "live"
        assert 1 in source.normalizer.index.tables[None, "GPU"].blocks
        assert engine.asked.count("GET /version") == 1


@pytest.mark.parametrize("removals", [1, 2])
async def test_of_any_other_version_no_block_is_dead_and_its_stream_may_show_what_a_removal_means(removals: int):
    """One removal is the last copy's or one of two: the block goes. Two are each copy's: a third one was stored."""
    engine = Engine()
    engine.offers("GET", "/version", lambda _: web.json_response({"version": "0.34.0"}))
    async with engine.running(), engine.bus(starts_partial=False) as bus:
        source, rank = bus.source, engine.ranks[0]
        await eventually(lambda: len(engine.asked) > 0, "asked")
        stores = (store([1], block_size=4, medium="CPU") for _ in range(3))
        for event in (*stores, *(removed([1], medium="CPU") for _ in range(removals))):
            rank.publisher.publish(payload(event, ts=1e6))
        await eventually(lambda: source.sequencer.next == rank.publisher.next_seq, "relayed")
        assert (1 in source.normalizer.index.tables[None, "CPU"].blocks) == (removals == 2)
        assert source.normalizer.unsure == (removals == 1)


@pytest.mark.parametrize("version", [b"{", b"[" * 60_000])
async def test_whoever_answers_nonsense_is_asked_on(version: bytes):
    engine, metrics = Engine(), Metrics()
    engine.offers("GET", "/metrics", metrics.answer)
    engine.offers("GET", "/version", lambda _: web.Response(body=version))
    async with engine.running(), engine.bus(starts_partial=False):
        await eventually(lambda: "GET /version" in engine.asked, "asked for its version")
        asked = metrics.asked
        await eventually(lambda: metrics.asked > asked + 2, "asked again whether it sleeps", 30)


async def test_where_nobody_can_be_asked_copies_count():
    async with running_bus() as bus:
        assert bus.source.spec.rules.duplicates == "count"


@pytest.mark.parametrize(
    ("version", "each"),
    [
        ("0.9.0", True),
        ("0.33.0", True),
        ("0.33.2.post1", True),
        ("0.33.0+cu130", True),
        ("0.33.1rc2.dev7+gabcdef", False),
        ("0.34.0", False),
        ("1.0.0", False),
        ("", False),
        ("dev", False),
        ("0.", False),
    ],
)
def test_only_releases_that_are_known_do(version: str, each: bool):
    assert removes_each_copy(version) == each


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
async def test_only_what_is_said_plainly_counts(body: bytes, status: int, asleep: bool | None):
    engine = Engine()
    engine.routes["GET", "/metrics"] = lambda _: web.Response(body=body, status=status)
    engine.routes["GET", "/version"] = lambda _: web.Response(body=body, status=status)
    async with engine.running(), engine_api.session() as client:
        assert await engine_api.is_asleep(client, engine.api) is asleep
        assert await engine_api.version(client, engine.api) == ""


@pytest.mark.parametrize("said", [b'{"version": 5}', b"[]", b"null", b"{"])
async def test_a_version_is_a_text(said: bytes):
    engine = Engine()
    engine.routes["GET", "/version"] = lambda _: web.Response(body=said)
    async with engine.running(), engine_api.session() as client:
        assert await engine_api.version(client, engine.api) == ""


async def test_an_api_that_does_not_answer_costs_nothing():
    engine = Engine()
    engine.api = f"http://127.0.0.1:{free_port()}"
    async with engine.running(serves=False), engine.bus(starts_partial=False) as bus:
        rank = engine.ranks[0]
        rank.publish(50)
        await eventually(lambda: bus.source.sequencer.next == rank.publisher.next_seq, "relayed")
        assert len(bus.source.normalizer.index)
