"""Tests for real routers that connect to the address to which the engine connects.

kvbus listens at this address, and distinguishes engine and routers. dynamo.vllm and dynamo.sglang have Dynamo's
KvEventPublisher in each worker. The vLLM router gets addresses as flags. In these tests each gets the engine's own
endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import running_bus

from .cache import Cache, Score, score
from .kinds import KINDS, installed, smg_relay
from .routers import PATIENCE, Kind, Stream

if TYPE_CHECKING:
    from pathlib import Path

    from .routers import Router

NAMES: Final = (
    "Dynamo 1.6.1, KvRouter",
    "vLLM router 0.1.17",
    "vLLM router, no replay",
    "SMG relay 0.14.1",
    "never asks (double)",
)
SMG: Final = tuple(
    Kind(f"SMG {name}, no replay", smg_relay("--no-replay", *options), installed("smg/bin/smg"), {"profile": "smg"})
    for name, options in {"relay 0.14.1": (), "Rust relay 1.13.0": ("--rust",)}.items()
)
"""SMG's relays, started as `docs/routers/smg.md` says."""


async def wait_until_exact(router: Router, cache: Cache, what: str) -> None:
    """Wait until the router holds exactly the blocks of the cache."""
    end = asyncio.get_running_loop().time() + PATIENCE
    while (found := score(await router.held(cache.known), cache.live)) != Score(0, 0):
        assert asyncio.get_running_loop().time() < end, f"{what}: missing {found.missing}, dead {found.dead}"
        await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind.name in NAMES), *SMG], ids=lambda kind: kind.name)
async def test_a_router_at_the_engines_address_ends_with_the_engines_blocks(kind: Kind, tmp_path: Path) -> None:
    """The router ends with the engine's blocks although it connects late, the engine restarts, and both are
    disconnected.
    """
    if lacking := kind.lacking():
        pytest.skip(lacking)
    output = {"profile": "dynamo"} if kind.name.startswith("Dynamo") else dict(kind.output)
    async with running_bus(one_port=True, output=output) as bus, contextlib.AsyncExitStack() as stack:
        cache = Cache(seed=0)
        engine = EnginePublisher(bus.out, bus.engine_replay, topic=kind.topic.encode(), bind=False)
        await stack.enter_async_context(engine)
        await engine.wait_for_subscriber(60)

        def publish(count: int) -> None:
            for _ in range(count):
                engine.publish(cache.batch())

        publish(150)
        live, replay = (int(endpoint.rpartition(":")[2]) for endpoint in (bus.out, bus.out_replay))
        router = kind.make(tmp_path, "router")
        stack.push_async_callback(router.stop)
        await router.start([Stream("127.0.0.1", live, replay)])
        await wait_until_exact(router, cache, "late")
        publish(20)
        await wait_until_exact(router, cache, "later")
        for peer in bus.daemon.outputs.interposed[bus.out].peers:
            peer.close("test")
        publish(20)
        await wait_until_exact(router, cache, "disconnected")
        engine.restart()
        cache.restart(seed=1000)
        await engine.wait_for_subscriber(60)
        publish(60)
        await wait_until_exact(router, cache, "after a restart of the engine")
        stats = bus.daemon.output_stats[0]
        assert (stats.publishers, stats.routers) == (1, 1)
