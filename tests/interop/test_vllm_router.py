"""Tests for the unmodified vLLM router behind kvbus, started by the command in docs/routers/vllm-router.md."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import running_bus

from .cache import Cache
from .kinds import VLLM_ROUTER, vllm_router
from .routers import Stream
from .test_interpose import wait_until_exact
from .vllm_router import VllmRouter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class WithoutFlags(VllmRouter):
    """A vLLM router that asks its worker for the event endpoints. The worker answers as a real `vllm serve` does."""

    def _flags(self, _streams: Sequence[Stream]) -> list[str]:
        return ["--policy", "kv_aware", "--worker-urls", self.worker]


@pytest.mark.slow
async def test_the_documented_flags_credit_every_cached_prefix(tmp_path: Path) -> None:
    """With the flags in docs/routers/vllm-router.md, the router credits each worker with the prefixes that it has
    cached.

    The router's worker has no `/get_server_info`, like a real `vllm serve`. Without the flags the router credits no
    prefix.
    """
    if lacking := VLLM_ROUTER():
        pytest.skip(lacking)
    async with running_bus(output={"profile": "vllm-router"}) as bus, contextlib.AsyncExitStack() as stack:
        cache = Cache(seed=0)
        engine = await stack.enter_async_context(EnginePublisher(bus.engine, bus.engine_replay, bind=True))
        await engine.wait_for_subscriber(60)
        for _ in range(150):
            engine.publish(cache.batch())
        live, replay = (int(endpoint.rpartition(":")[2]) for endpoint in (bus.out, bus.out_replay))
        routers = [vllm_router(tmp_path, kind.__name__, replays=True, kind=kind) for kind in (VllmRouter, WithoutFlags)]
        for router in routers:
            await router.start([Stream("127.0.0.1", live, replay)])
            stack.push_async_callback(router.stop)
        await wait_until_exact(routers[0], cache, "as documented")
        assert cache.live
        assert await routers[1].held(cache.known) == set()
