"""Tests that llm-d with replay is exact after kvbus has lost its saved state, so that the seqs jump."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbus.state.database import NAME, VERSION
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually
from tests.doubles.engine import Engine
from tests.doubles.kvbus_process import Process, run_async
from tests.doubles.llmd import LlmdWithReplay


def damage(directory: Path) -> None:
    with (directory / NAME).open("r+b") as file:
        file.write(os.urandom(200))


def delete(directory: Path) -> None:
    for path in directory.glob(f"{NAME}*"):
        path.unlink()


def delete_all(directory: Path) -> None:
    """Delete the database, and empty the lock file, which shows how high the seqs were."""
    delete(directory)
    (directory / "lock").write_bytes(b"")


def write_with_another_version(directory: Path) -> None:
    """Change the database to the format of an older release."""
    with sqlite3.connect(directory / NAME) as database:
        database.execute(f"PRAGMA user_version = {VERSION - 1}")
    database.close()


@pytest.mark.parametrize("lose", [damage, delete, delete_all, write_with_another_version])
def test_llm_d_is_exact_after_a_lost_state_and_after_its_own_restart(
    lose: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlmdWithReplay, "cooldown", 0.5)
    bus = Process(tmp_path, keeps_state=True)
    bus.config["outputs"][0] |= {"profile": "llm-d", "topic": "kv@pod@model", "journal_batches": 50}

    async def relayed(engine: Engine) -> None:
        def is_there() -> bool:
            (source,) = bus.sources() or [{}]
            return bool(source.get("last_seq") == engine.publisher.next_seq - 1)

        await eventually(is_there, "every batch relayed")

    async def exact(engine: Engine, router: LlmdWithReplay) -> None:
        truth = {block for _, _, block in engine.settle()}

        async def same() -> bool:
            return await router.read_on() == truth

        await relayed(engine)
        await eventually(same, "the engine's blocks")

    async def test() -> None:
        async with EnginePublisher(bus.engine, bus.engine_replay, bind=True) as publisher:
            engine = Engine(publisher)
            with bus:
                await publisher.wait_for_subscriber(60)
                await engine.publish(300)
                router = LlmdWithReplay(bus.out, bus.out_replay)
                await exact(engine, router)
                bus.terminate()
                lose(tmp_path / "state")
                bus.start()
                await eventually(bus.ready, "kvbus is ready")
                for _ in range(3):
                    await engine.publish(30)
                    await exact(engine, router)
                router.close()
                router = LlmdWithReplay(bus.out, bus.out_replay)
                await exact(engine, router)
                await engine.publish(30)
                await exact(engine, router)
                assert router.refused == 0
                router.close()
                await asyncio.sleep(0)
                assert bus.terminate() == 0

    run_async(test())
