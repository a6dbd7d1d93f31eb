"""`on_partial: reset`: an engine that is older than its own memory is asked to empty its cache, and kvbus is whole again.

The API is a real HTTP server beside a simulated engine, which really resets its cache and publishes AllBlocksCleared.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import pytest
from aiohttp import web

from kvbus.core.types import CacheReset, medium_key
from kvbus.daemon import cache_reset
from kvbus.daemon.daemon import Daemon
from kvbus.tools.sim.engine import EngineOptions, SimEngine
from kvbus.tools.sim.workload import synthetic
from kvbus.transport import engine_api
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles import replay_faults
from tests.ports import free_port, ports_in_a_row
from tests.system.bus import Bus, RouterOnASet, eventually, running_bus

BUFFER: Final = 50
OLD: Final = 400
"""Batches before kvbus comes."""

Handler = Callable[[web.Request], web.Response]


class Rank:
    """A simulated engine rank that has been up for longer than its replay buffer reaches back."""

    def __init__(self, live: int, replay: int, dialect: str, tiers: dict[str, int], rank: int) -> None:
        jobs = synthetic(1, rank, turn_tokens=24, output_tokens=24, system_tokens=32, max_tokens=256)
        options = EngineOptions(blocks=300, block_size=4, max_running=2, tiers=tiers)
        self.sim = SimEngine(dialect, jobs, rank=rank, options=options)
        at = (f"tcp://127.0.0.1:{port}" for port in (live, replay))
        self.publisher = EnginePublisher(*at, framing=self.sim.dialect.framing, bind=True, buffer_steps=BUFFER)
        self.ts = 0.0

    def publish(self, count: int) -> None:
        for _ in range(count):
            self.ts += 1
            payload = self.sim.step(self.ts)
            assert payload is not None
            self.publisher.publish(payload)

    def reset(self) -> None:
        """What is cached is gone, and the stream says so."""
        self.sim.clear()
        for payload in self.sim.flush(self.ts):
            self.publisher.publish(payload)

    def truth(self) -> set[Any]:
        for payload in self.sim.flush(self.ts):
            self.publisher.publish(payload)
        return {(str(medium_key(block["medium"])), block["hash"]) for block in self.sim.truth()}


class Engine:
    """Ranks, and the HTTP API in front of them."""

    def __init__(self, dialect: str = "vllm-0.33", tiers: dict[str, int] | None = None, ranks: int = 1) -> None:
        first = ports_in_a_row(2 * ranks)
        self.endpoints = [f"tcp://127.0.0.1:{port}" for port in (first, first + ranks)]
        self.ranks = [Rank(first + r, first + ranks + r, dialect, tiers or {}, r) for r in range(ranks)]
        self.asked: list[str] = []
        """The requests that might have changed something."""
        self.port = free_port()
        self.api = f"http://127.0.0.1:{self.port}"
        self.routes: dict[tuple[str, str], Handler] = {}

    def offers(self, method: str, path: str, handler: Handler | None = None) -> None:
        """One more path; what it does, or reset the cache."""

        def asked(request: web.Request) -> web.Response:
            self.asked.append(f"{request.method} {request.path}")
            if handler is not None:
                return handler(request)
            for rank in self.ranks:
                rank.reset()
            return web.Response(text="")

        self.routes[method, path] = asked

    @contextlib.asynccontextmanager
    async def running(self, *, serves: bool = True) -> AsyncIterator[Engine]:
        app = web.Application()
        for (method, path), handler in self.routes.items():

            async def handle(request: web.Request, handler: Handler = handler) -> web.Response:
                return handler(request)

            app.router.add_route(method, path, handle)
        runner = web.AppRunner(app)
        async with contextlib.AsyncExitStack() as stack:
            for rank in self.ranks:
                await stack.enter_async_context(rank.publisher)
                rank.publish(OLD)
            if serves:
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                await web.TCPSite(runner, "127.0.0.1", self.port).start()
            yield self

    @contextlib.asynccontextmanager
    async def bus(
        self, *, on_partial: str = "reset", starts_partial: bool = True, **settings: Any
    ) -> AsyncIterator[Bus]:
        live, replay = self.endpoints
        source = {
            "endpoint": live,
            "replay_endpoint": replay,
            "api": self.api,
            "data_parallel_size": len(self.ranks),
        }
        output = {"layout": "merged"}
        async with running_bus(source=source, output=output, on_partial=on_partial, **settings) as bus:
            for rank in self.ranks:
                await rank.publisher.wait_for_subscriber(30)
            if starts_partial:
                sources = bus.daemon.relay.sources
                await eventually(lambda: any(source.partial_since for source in sources), "partial")
            yield bus


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cache_reset, "PAUSES", (0.1,) * 5)
    caplog.set_level(logging.INFO)


def outcomes(bus: Bus, at: int = 0) -> dict[str, int]:
    return {str(outcome): n for outcome, n in bus.daemon.relay.sources[at].stats.cache_resets.items() if n}


async def is_whole(bus: Bus, engine: Engine) -> None:
    """Nothing is missing, and that is so: what is known, and what a router is told that comes now, is what is cached."""
    sources = bus.daemon.relay.sources
    await eventually(lambda: all(source.state == "live" and not source.partial for source in sources), "all known")
    for source, rank in zip(sources, engine.ranks, strict=True):
        rank.publish(100)
        truth, last = rank.truth(), rank.publisher.next_seq
        await eventually(lambda source=source, last=last: source.sequencer.next == last, "relayed")
        tables = source.normalizer.index.tables
        assert {(medium, block) for (_, medium), table in tables.items() for block in table.blocks} == truth, (
            source.stats
        )
    if len(engine.ranks) == 1:
        router = RouterOnASet(bus.out, bus.out_replay)
        with contextlib.closing(router):
            await router.replay()
        assert {(medium, block) for _, medium, block in router.view.blocks} == truth
        assert router.view.violations == []


@pytest.mark.parametrize("method", ["POST", "GET"])
@pytest.mark.parametrize(
    ("dialect", "path", "tiers"),
    [
        ("vllm-0.33", "/reset_prefix_cache", {}),
        ("sglang-0.5.23", "/flush_cache", {}),
        ("sglang-0.5.23", "/flush_cache", {"CPU": 500}),
    ],
)
async def test_the_engine_is_reset_and_everything_is_known(
    dialect: str, path: str, tiers: dict[str, int], method: str, caplog: pytest.LogCaptureFixture
):
    engine = Engine(dialect, tiers)
    engine.offers(method, path)
    async with engine.running(), engine.bus() as bus:
        await is_whole(bus, engine)
        assert engine.asked == [f"{method} {path}"]
        assert outcomes(bus) == {"accepted": 1}
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        (line,) = (line for line in said if "source engine" in line)
        trimmed = f"batches 0 to {OLD - BUFFER - 1} were trimmed from the engine's replay buffer"
        assert line.startswith(f"source engine is partial: {trimmed} before kvbus asked for them; until the engine")
        await eventually(lambda: "source engine is no longer partial" in caplog.text, "and that is said")


async def test_all_ranks_are_reset_at_once():
    engine = Engine(ranks=2)
    engine.offers("POST", "/reset_prefix_cache")
    async with engine.running(), engine.bus() as bus:
        await is_whole(bus, engine)
        assert engine.asked == ["POST /reset_prefix_cache"]


async def test_it_is_whole_after_a_restart_of_kvbus_too(tmp_path):
    engine = Engine()
    engine.offers("POST", "/reset_prefix_cache")
    async with engine.running():
        async with engine.bus(state_dir=str(tmp_path)) as bus:
            await is_whole(bus, engine)
            config = bus.daemon.config
        again = Daemon(config)
        assert again.restored
        assert not again.relay.sources[0].partial
        await again.start()
        try:
            ports = [int(at.rpartition(":")[2]) for at in (*engine.endpoints, bus.out, bus.out_replay)]
            await is_whole(Bus(again, ports), engine)
            assert engine.asked == ["POST /reset_prefix_cache"]
        finally:
            await again.close(drain=0)


async def test_keep_asks_nothing():
    engine = Engine()
    engine.offers("POST", "/reset_prefix_cache")
    async with engine.running(), engine.bus(on_partial="keep") as bus:
        engine.ranks[0].publish(1)
        await eventually(lambda: bus.caught_up(OLD), "some time later")
        assert engine.asked == []
        assert outcomes(bus) == {}
        engine.ranks[0].reset()  # whoever asks for it
        await is_whole(bus, engine)


async def test_an_engine_that_says_yes_and_is_too_busy_is_asked_again():
    engine = Engine()

    def third_time(_: web.Request) -> web.Response:
        engine.ranks[0].publish(1)
        if len(engine.asked) == 3:
            engine.ranks[0].reset()
        return web.Response(text="")

    engine.offers("POST", "/reset_prefix_cache", third_time)
    async with engine.running(), engine.bus() as bus:
        busy = asyncio.create_task(publishes(engine.ranks[0]))
        await eventually(lambda: not bus.source.partial, "nothing missing")
        busy.cancel()
        await eventually(lambda: outcomes(bus) == {"accepted": 3}, "the third answer")
        await is_whole(bus, engine)


async def publishes(rank: Rank) -> None:
    while True:
        rank.publish(1)
        await asyncio.sleep(0.02)


async def test_an_idle_engine_that_says_so_with_its_next_batch_is_asked_once():
    engine = Engine()
    engine.offers("POST", "/reset_prefix_cache", lambda _: web.Response(text=""))
    async with engine.running(), engine.bus() as bus:
        await eventually(lambda: outcomes(bus) == {"accepted": 1}, "asked")
        later = asyncio.get_running_loop().time() + 1.0
        await eventually(lambda: asyncio.get_running_loop().time() > later, "several pauses")
        assert engine.asked == ["POST /reset_prefix_cache"]
        engine.ranks[0].reset()
        await is_whole(bus, engine)
        assert engine.asked == ["POST /reset_prefix_cache"]


@pytest.mark.parametrize(
    ("path", "says", "told"),
    [
        (
            "/reset_prefix_cache",
            lambda _: web.json_response({"success": False}),
            'POST /reset_prefix_cache: 200 {"success"',
        ),
        ("/flush_cache", lambda _: web.Response(status=400, text="not\nidle"), "POST /flush_cache: 400 not idle"),
        ("/flush_cache", lambda _: web.Response(status=307, headers={"Location": "/"}), "POST /flush_cache: 307"),
        (
            "/health",
            lambda _: web.Response(),
            "neither /reset_prefix_cache nor /flush_cache is there (vLLM needs VLLM_SERVER_DEV",
        ),
    ],
)
async def test_an_engine_that_refuses_is_asked_a_few_times_and_then_no_more(
    path: str, says: Handler, told: str, caplog: pytest.LogCaptureFixture
):
    engine = Engine()
    engine.offers("POST", path, says)
    async with engine.running(), engine.bus() as bus:
        await eventually(lambda: "kvbus asks its engine no more" in caplog.text, "it gives up")
        assert outcomes(bus) == {"refused": len(cache_reset.PAUSES)}
        assert told in caplog.text
        assert bus.source.partial
        # the next episode is another one
        rank = engine.ranks[0]
        rank.publisher.restart()
        rank.sim.restart()
        rank.publish(10)
        await eventually(lambda: not bus.source.partial, "the next epoch is known from its beginning")
        await is_whole(bus, engine)
        assert outcomes(bus) == {"refused": len(cache_reset.PAUSES)}


async def test_an_api_that_is_not_there(caplog: pytest.LogCaptureFixture):
    engine = Engine()
    async with engine.running(serves=False), engine.bus() as bus:
        await eventually(lambda: "kvbus asks its engine no more" in caplog.text, "it gives up")
        assert outcomes(bus) == {"unreachable": len(cache_reset.PAUSES)}
        assert f"source engine is partial, and {engine.api} does not answer: " in caplog.text


async def test_an_api_that_hangs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_api, "TIMEOUT", 0.2)
    engine = Engine()
    accepted: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", engine.port)
    async with server, engine.running(serves=False), engine.bus() as bus:
        await eventually(lambda: "kvbus asks its engine no more" in caplog.text, "it gives up")
        assert outcomes(bus) == {"unreachable": len(cache_reset.PAUSES)}
        for writer in accepted:
            writer.close()


async def test_kvbus_ends_while_it_is_asking():
    engine = Engine()
    accepted: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", engine.port)
    async with server, engine.running(serves=False):
        async with asyncio.timeout(20), engine.bus():
            await eventually(lambda: accepted, "it asks")
        for writer in accepted:
            writer.close()


async def test_an_engine_whose_reset_leaves_other_tiers_unknown_is_left_alone(caplog: pytest.LogCaptureFixture):
    engine = Engine(tiers={"CPU": 500})
    engine.offers("POST", "/reset_prefix_cache")
    async with engine.running(), engine.bus() as bus:
        await eventually(lambda: outcomes(bus) == {"futile": 1}, "it sees that it is no use")
        assert "a reset would leave other tiers unknown" in caplog.text
        assert engine.asked == []
        engine.ranks[0].reset()
        engine.ranks[0].publish(10)
        await eventually(lambda: bus.caught_up(engine.ranks[0].publisher.next_seq - 1), "relayed")
        assert bus.source.partial


async def test_what_the_replay_may_still_have_is_waited_for():
    engine = Engine()
    engine.offers("POST", "/reset_prefix_cache")
    rank = engine.ranks[0]
    rank.publisher.replay_fault = replay_faults.silent
    async with engine.running(), engine.bus(replay_timeout=0.1, starts_partial=False) as bus:
        rank.publish(1)
        await eventually(lambda: bus.source.state == "live" and bus.source.partial_since is not None, "partial")
        asked = rank.publisher.replay_requests
        await eventually(lambda: rank.publisher.replay_requests > asked + 2, "the replay asked again and again")
        assert engine.asked == []
        rank.publisher.replay_fault = list
        await is_whole(bus, engine)
        assert engine.asked == ["POST /reset_prefix_cache"]


def test_every_outcome_is_provoked_here():
    assert set(CacheReset) == {"accepted", "refused", "unreachable", "futile"}
