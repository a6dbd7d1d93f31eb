"""Tests that llm-d is exact after kvbus has lost its saved state, so that the seqs jump, and after a restart of llm-d."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.doubles.bus import eventually
from tests.doubles.llmd import LlmdWithReplay
from tests.ports import ports_in_a_row
from tests.system.test_lost_state import damage, delete, delete_all, write_with_another_version

from .cache import score
from .kinds import KINDS
from .routers import Stream
from .scene import Rank
from .support import Kvbus

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .routers import Kind, Router

LLMD = [kind for kind in KINDS if kind.name.startswith("llm-d")]
LOSSES = [damage, delete, delete_all, write_with_another_version]


@pytest.mark.slow
@pytest.mark.parametrize("lose", LOSSES)
@pytest.mark.parametrize("kind", LLMD, ids=lambda kind: kind.name)
async def test_llm_d_is_exact_after_a_lost_state(
    kind: Kind, lose: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking := kind.lacking():
        pytest.skip(lacking)
    monkeypatch.setattr(LlmdWithReplay, "cooldown", 3.0)
    rank, state = Rank(0, ports_in_a_row(8), kind), tmp_path / "state"
    (tmp_path / "bus").mkdir()
    bus = Kvbus(rank.publisher, tmp_path / "bus", {"heartbeat": 1, **kind.output}, state_dir=str(state))
    ports = [int(each.rpartition(":")[2]) for each in (bus.endpoint, bus.replay_endpoint)]

    async def exact(router: Router, batches: int = 30) -> None:
        for _ in range(batches):
            rank.publisher.publish(rank.cache.batch())

        async def same() -> bool:
            return not any(score(await router.held(rank.cache.known), rank.cache.live))

        await eventually(same, "the engine's blocks")

    async with rank.publisher:
        with bus:
            await rank.publisher.wait_for_subscriber(60)
            router = kind.make(tmp_path, "router")
            await router.start([Stream("127.0.0.1", *ports)])
            await exact(router, 300)
            assert bus.terminate() == 0
            lose(state)
            bus.start()
            await eventually(bus.ready, "kvbus is ready")
            await exact(router)
            await exact(router)
            await router.stop()
            router = kind.make(tmp_path, "restarted")
            await router.start([Stream("127.0.0.1", *ports)])
            await exact(router, 0)
            await exact(router)
            await router.stop()
