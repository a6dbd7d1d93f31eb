"""Tests that after a cache reset at the engine kvbus knows every block again, so the source is no longer `partial`.

It does not matter whether kvbus or another client requests the reset.
"""

from __future__ import annotations

import contextlib
import logging
import re

import pytest

from kvbus.daemon.daemon import Daemon
from tests.doubles.bus import Bus, eventually
from tests.doubles.engine import BUFFER, OLD, EngineWithApi
from tests.doubles.socket_routers import RouterOnASet


async def check_complete(bus: Bus, engine: EngineWithApi) -> None:
    """Check that no source is partial, and that kvbus and a newly subscribed router have exactly the engine's
    blocks.
    """
    sources = bus.daemon.relay.sources
    await eventually(lambda: all(source.state == "live" and not source.partial for source in sources), "all known")
    for source, rank in zip(sources, engine.ranks, strict=True):
        await rank.publish(100)
        truth, last = rank.settle(), rank.publisher.next_seq
        await eventually(lambda source=source, last=last: source.sequencer.next == last, "relayed")
        tables = source.normalizer.index.tables
        assert {(*key[:2], block) for key, table in tables.items() for block in table.blocks} == truth, source.stats
    if len(engine.ranks) == 1:
        router = RouterOnASet(bus.out, bus.out_replay)
        with contextlib.closing(router):
            await router.replay()
        assert set(router.view.blocks) == truth
        assert router.view.violations == []


@pytest.mark.parametrize(
    ("dialect", "tiers", "clears"),
    [("vllm-0.33", {}, "auto"), ("sglang-0.5.23", {}, "auto"), ("sglang-0.5.23", {"CPU": 500}, "all")],
)
async def test_kvbus_knows_every_block_after_a_cache_reset(
    dialect: str, tiers: dict[str, int], clears: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    engine = EngineWithApi(dialect, tiers)
    async with engine.running(), engine.bus(clears=clears) as bus:
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        (line,) = (line for line in said if "source engine" in line)
        trimmed = f"batches 0 to {OLD - BUFFER - 1} were trimmed from the engine's replay buffer"
        assert line.startswith(f"source engine: partial: {trimmed} before kvbus asked for them")
        engine.ranks[0].reset()
        await check_complete(bus, engine)
        await eventually(lambda: re.search("source engine: ended after .*: partial: ", caplog.text), "and that is said")


async def test_kvbus_knows_every_block_after_a_cache_reset_of_all_ranks():
    engine = EngineWithApi(ranks=2)
    async with engine.running(), engine.bus() as bus:
        for rank in engine.ranks:
            rank.reset()
        await check_complete(bus, engine)


async def test_kvbus_knows_every_block_after_a_cache_reset_and_a_restart(tmp_path):
    engine = EngineWithApi()
    async with engine.running():
        async with engine.bus(state_dir=str(tmp_path)) as bus:
            engine.ranks[0].reset()
            await check_complete(bus, engine)
            config = bus.daemon.config
        again = Daemon(config)
        assert again.restored
        assert not again.relay.sources[0].partial
        await again.start()
        try:
            ports = [int(at.rpartition(":")[2]) for at in (*engine.endpoints, bus.out, bus.out_replay)]
            await check_complete(Bus(again, ports), engine)
        finally:
            await again.close(drain=0)


async def test_a_cache_reset_does_not_end_partial_if_other_tiers_are_unknown():
    engine = EngineWithApi(tiers={"CPU": 500})
    async with engine.running(), engine.bus() as bus:
        engine.ranks[0].reset()
        await engine.ranks[0].publish(10)
        await eventually(lambda: bus.caught_up(engine.ranks[0].publisher.next_seq - 1), "relayed")
        assert bus.source.partial
