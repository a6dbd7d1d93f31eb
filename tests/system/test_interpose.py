"""Tests for interposing: an engine and its routers connect to one port of kvbus, with real sockets of libzmq."""

import contextlib
import json
from typing import Any

import aiohttp

from kvbus.core.findings.finding import Severity
from kvbus.tools.doctor.examine import examine
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import change_sources, eventually, running_bus
from tests.doubles.engine import Engine
from tests.doubles.socket_routers import Deaf
from tests.ports import ports_in_a_row
from tests.typed import there


@contextlib.asynccontextmanager
async def engine_at(endpoint, replay=None, *, rank=0, **options):
    """Yield an engine that connects to the port of kvbus."""
    async with EnginePublisher(endpoint, replay, bind=False, **options) as publisher:
        engine = Engine(publisher, blocks=60, rank=rank, seed=1 + rank)
        await publisher.wait_for_subscriber(60)
        yield engine


@contextlib.contextmanager
def router_at(endpoint):
    """Yield a router that connects to the port of kvbus.

    Like a worker of Dynamo, it applies every batch and requests no replay.
    """
    router = Deaf(endpoint)
    try:
        yield router
    finally:
        router.close()


async def shown(bus, path):
    host, port = bus.daemon.http_address
    async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}{path}") as response:
        return await response.text()


async def test_an_engine_and_its_routers_connect_to_the_same_port():
    async with running_bus(one_port=True) as bus, contextlib.AsyncExitStack() as stack:
        first = stack.enter_context(router_at(bus.out))
        async with engine_at(bus.out, bus.engine_replay) as engine:
            await engine.publish(200)
            truth = engine.settle()
            await eventually(lambda: first.read() == truth, "what the engine holds")
            late = stack.enter_context(router_at(bus.out))
            await eventually(lambda: late.read() == truth, "the same for a router that comes late")

            (address,) = json.loads(await shown(bus, "/sources"))[0]["dialled_in"]
            assert address.startswith("127.0.0.1:")
            metrics = await shown(bus, "/metrics")
            for line in ("publishers 1.0", "publishers_limit 16.0", "publishers_accepted_total 1.0", "routers 2.0"):
                name, value = line.split()
                assert f'kvbus_output_{name}{{output="routers"}} {value}' in metrics

            engine.restart()
            await engine.publish(50)
            truth = engine.settle()
            await eventually(lambda: first.read() == late.read() == truth, "what the restarted engine holds")
            assert bus.source.sequencer.epoch > 0
        await eventually(lambda: bus.source.state == "connecting", "the end of the connection")
        assert json.loads(await shown(bus, "/sources"))[0]["dialled_in"] == []


async def test_each_rank_of_an_interposed_engine_has_its_port():
    """Rank r of the engine connects to the first port + r. A router of this rank connects to the same port."""
    first, replay, out_replay = (ports_in_a_row(2) for _ in range(3))
    settings: dict[str, Any] = {
        "sources": [],
        "outputs": [],
        "interpose": {
            "endpoint": f"tcp://127.0.0.1:{first}",
            "data_parallel_size": 2,
            "engine_replay_endpoint": f"tcp://127.0.0.1:{replay}",
            "replay_endpoint": f"tcp://127.0.0.1:{out_replay}",
        },
    }
    async with running_bus(**settings) as bus, contextlib.AsyncExitStack() as stack:
        engines, routers = [], []
        for rank in range(2):
            where = f"tcp://127.0.0.1:{first + rank}"
            routers.append(stack.enter_context(router_at(where)))
            replay_endpoint = f"tcp://127.0.0.1:{replay + rank}"
            engines.append(await stack.enter_async_context(engine_at(where, replay_endpoint, rank=rank)))
        for engine in engines:
            await engine.publish(100)
        truths = [engine.settle() for engine in engines]
        assert truths[0] != truths[1]
        await eventually(lambda: [router.read() for router in routers] == truths, "each rank's blocks")
        assert [source.spec.label for source in bus.daemon.relay.sources] == ["engine/0", "engine/1"]


async def test_kvbus_restarts_between_an_engine_and_its_routers(tmp_path):
    """The engine and the routers connect again to the new kvbus process.

    The new process continues with the saved state: it counts no restart of the engine and no lost batch.
    """
    ports: dict[str, Any] = {}
    async with contextlib.AsyncExitStack() as stack:
        async with running_bus(one_port=True, state_dir=str(tmp_path)) as bus:
            ports = {"source": {"endpoint": bus.out, "replay_endpoint": bus.engine_replay}}
            ports |= {"output": {"endpoint": bus.out, "replay_endpoint": bus.out_replay}}
            endpoint = bus.out
            router = stack.enter_context(router_at(endpoint))
            engine = await stack.enter_async_context(engine_at(endpoint, bus.engine_replay))
            await engine.publish(100)
            truth = engine.settle()
            await eventually(lambda: router.read() == truth, "what the engine holds")
        await engine.publish(30)  # kvbus does not run, so these batches only reach the engine's buffer
        async with running_bus(one_port=True, state_dir=str(tmp_path), **ports) as bus:
            assert bus.daemon.restored
            truth = engine.settle()
            await eventually(lambda: router.read() == truth, "what the engine holds by now")
            await eventually(lambda: bus.source.state == "live", "the end of the catch-up")
            assert (bus.source.stats.restarts, bus.source.stats.lost) == (0, 0)


async def test_routers_stay_connected_when_another_source_gets_the_port():
    """A source replaces another source at the port: kvbus disconnects the engine, which then connects again.

    The routers stay connected and get the blocks of the new source.
    """
    async with running_bus(one_port=True) as bus, contextlib.AsyncExitStack() as stack:
        router = stack.enter_context(router_at(bus.out))
        engine = await stack.enter_async_context(engine_at(bus.out, bus.engine_replay))
        await engine.publish(100)
        truth = engine.settle()
        await eventually(lambda: router.read() == truth, "what the engine holds")
        before = bus.daemon.config
        source = before.sources[0].model_copy(update={"clears": "all"})
        changed = before.model_copy(update={"sources": (source,)})
        await change_sources(bus.daemon, changed)
        await eventually(lambda: bus.daemon.output_stats[0].publishers_accepted == 2, "the engine again")
        await engine.publish(20)
        truth = engine.settle()
        await eventually(lambda: router.read() == truth, "what the engine holds by now")
        assert not router.disconnected()


async def test_the_doctor_accepts_a_port_shared_by_engine_and_routers():
    """The doctor reports no problem at the port that the engine and the routers share.

    While a kvbus runs, the doctor connects to the port as a router. Without a kvbus, it listens at the port itself.
    """

    async def problems():
        report = await examine(config, timeout=10.0)
        assert any("engine" in seen.name for seen in report.seen)
        return [finding for finding in report.findings if finding.severity is Severity.PROBLEM]

    async with contextlib.AsyncExitStack() as stack:
        async with running_bus(one_port=True) as bus:
            stack.enter_context(router_at(bus.out))
            engine = await stack.enter_async_context(engine_at(bus.out, bus.engine_replay))
            await engine.publish(5)
            await eventually(lambda: bus.source.state == "live", "the engine")
            host, port = there(bus.daemon.http_address)
            http = f"{host}:{port}"
            config = bus.daemon.config.model_copy(update={"http": http})
            assert await problems() == []
        assert await problems() == []
