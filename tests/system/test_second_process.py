"""Tests that a second `kvbus run` ends with an error if the first one uses its port or directory.

The first process continues unchanged.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvbus.common.errors import BindError, InUseError
from kvbus.config import Config, load
from kvbus.core.events import BatchReceived
from kvbus.daemon.daemon import Daemon
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.engine import Engine
from tests.doubles.kvbus_process import Place, Program, run_async
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.doubles.socket_routers import StrictRouter, soon
from tests.ports import free_ports
from tests.state.left import rows

BUFFER = 50
"""Number of batches in the engine's replay buffer, far fewer than the engine has sent."""


@contextlib.asynccontextmanager
async def forgetful_engine(place: Place) -> AsyncIterator[Engine]:
    async with EnginePublisher(place.engine, place.engine_replay, bind=True, buffer_steps=BUFFER) as publisher:
        await publisher.wait_for_subscriber(30)
        yield Engine(publisher, blocks=300)


def refused(directory: Path, *args: str, name: str) -> str:
    """Run a `kvbus run` whose port or directory is in use, check that it is refused, and return its messages."""
    with Program(directory, "run", *args, name=name) as second:
        assert second.ended() == 69, second.said
        assert "Traceback" not in second.said
        return second.said


def test_a_second_process_is_refused_and_does_not_affect_the_first(tmp_path: Path) -> None:
    state = tmp_path / "state"
    place = Place(tmp_path, state_dir=str(state))
    file = str(tmp_path / "kvbus.yaml")
    elsewhere = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]

    async def main() -> None:
        router = StrictRouter(place.out, place.out_replay)
        with contextlib.closing(router), contextlib.ExitStack() as stack:
            first = stack.enter_context(place.kvbus())
            await place.ready(first)
            async with forgetful_engine(place) as engine:
                await place.subscribed()
                for _ in range(10):
                    await engine.publish(BUFFER)
                    await soon(router, lambda: router.newest_ts == engine.published, "relayed")
                for name, more in {"second": (), "third": ("--output", ",".join(elsewhere))}.items():
                    said = refused(tmp_path, "-c", file, *more, name=name)
                    assert f"state_dir {state} is in use by process {first.process.pid} on " in said
                    assert f"(kvbus run -c {file})" in said
                await engine.publish(BUFFER)
                await soon(router, lambda: router.newest_ts == engine.published, "relayed, as before")
                first.process.kill()
                first.process.wait(10)
                first = stack.enter_context(place.kvbus())
                await place.ready(first)
                there = 'kvbus_output_subscribers{output="routers"} 1.0'
                await soon(router, lambda: there in place.get("/metrics")[1], "the router's subscription")
                await engine.publish(BUFFER // 2)
                truth = engine.settle()
                await soon(router, lambda: router.blocks == truth, "the engine's blocks, no dead ones")
                assert engine.published == place.sources()[0]["last_seq"] + 1
                assert not place.sources()[0]["partial"]
                assert (router.went_back, router.holes, router.view.clears) == (0, 0, 0)
                assert router.view.violations == [], "nothing was told again"
                assert router.next <= engine.published
                assert "refused" not in " ".join(path.name for path in state.iterdir())

    run_async(main())


def config_of(tmp_path: Path, live: int, **settings: object) -> Config:
    output = {"endpoint": f"tcp://127.0.0.1:{live}", "heartbeat": 0}
    source = {"endpoint": f"tcp://127.0.0.1:{live + 1}"}
    return load(
        None,
        env={},
        overrides={
            "sources": [source],
            "outputs": [output],
            "http": None,
            "on_lost": "keep",
            "state_dir": str(tmp_path / "a"),
            **settings,
        },
    )


def fed(daemon: Daemon, *numbers: int) -> None:
    for n in numbers:
        daemon.feed(BatchReceived(0, [b"", n.to_bytes(8, "big"), batch(store([n]))]))


async def test_kvbus_locks_its_state_before_it_binds_and_writes_it_afterwards(tmp_path: Path) -> None:
    (live,) = free_ports(1)
    config = config_of(tmp_path, live)
    first = Daemon(config)
    await first.start()
    fed(first, *range(10))
    with pytest.raises(InUseError, match=f"process {os.getpid()} on"):
        Daemon(config)
    await first.close(drain=0)

    holder = Daemon(config_of(tmp_path, live, state_dir=str(tmp_path / "b")))
    await holder.start()
    before = rows(tmp_path / "a")
    second = Daemon(config)
    assert second.restored
    with pytest.raises(BindError, match=str(live)):
        await second.start()
    assert rows(tmp_path / "a") == before
    await holder.close(drain=0)

    # The failed start has released the state directory and its ports.
    third = Daemon(config)
    assert third.relay.outputs[0].streams[0].next_seq == 10
    await third.start()
    fed(third, 10)
    await third.close(drain=0)
    fourth = Daemon(config)
    assert fourth.relay.outputs[0].streams[0].next_seq == 11
    await fourth.close(drain=0)


async def test_a_state_of_other_sources_is_kept_until_all_endpoints_are_bound(tmp_path: Path) -> None:
    (live,) = free_ports(1)
    first = Daemon(config_of(tmp_path, live))
    await first.start()
    fed(first, 0)
    await first.close(drain=0)
    other = config_of(tmp_path, live, sources=[{"name": "another", "endpoint": f"tcp://127.0.0.1:{live + 1}"}])
    holder = Daemon(config_of(tmp_path, live, state_dir=str(tmp_path / "b")))
    await holder.start()
    before = rows(tmp_path / "a")
    second = Daemon(other)
    with pytest.raises(BindError):
        await second.start()
    assert rows(tmp_path / "a") == before
    await holder.close(drain=0)
    third = Daemon(other)
    await third.start()
    assert third.process.state_refused == 1
    await third.close(drain=0)
