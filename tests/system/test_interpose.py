"""One port for an engine and its routers, which both dial: real sockets of libzmq on both sides."""

import contextlib

from kvbus.transport.engine.publisher import EnginePublisher
from tests.system.actors import Engine
from tests.system.bus import eventually, running_bus
from tests.system.test_state_on_subscription import Deaf


@contextlib.asynccontextmanager
async def engine_at(bus, *, replay=True, **options):
    """An engine that dials the port."""
    async with EnginePublisher(bus.out, bus.engine_replay if replay else None, bind=False, **options) as publisher:
        engine = Engine(publisher, blocks=60)
        await publisher.wait_for_subscriber(60)
        yield engine


@contextlib.contextmanager
def router_at(endpoint, **options):
    """A router that dials the port, applies whatever comes and asks for nothing."""
    router = Deaf(endpoint, **options)
    try:
        yield router
    finally:
        router.close()


async def test_an_engine_and_a_router_meet_at_one_port():
    async with running_bus(interpose=True) as bus:
        with router_at(bus.out) as first:
            async with engine_at(bus) as engine:
                await engine.publish(200)
                truth = engine.settle()
                await eventually(lambda: first.read() == truth, "what the engine holds")
                with router_at(bus.out) as late:
                    await eventually(lambda: late.read() == truth, "the same for a router that comes late")
                assert str(bus.daemon.source_sockets.dialled_in(0)).startswith("['127.0.0.1:")
            await eventually(lambda: bus.source.state == "connecting", "the end of the connection")
            assert not bus.daemon.source_sockets.dialled_in(0)
