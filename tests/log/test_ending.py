"""Test that an aggregator ends although its search for streams ignores the cancellation of its task.

nats-py's clients sometimes lose a cancellation.
"""

import asyncio
import contextlib

import pytest

from kvbus.common import tasks
from kvbus.parts.discovery import streams
from tests.doubles.bus import eventually
from tests.log.fleet import fleet
from tests.log.kinds import Memory
from tests.log.memory import MemoryLog
from tests.log.test_aggregator import Aggregator


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(tasks, "AGAIN", 0.5)
    monkeypatch.setattr(streams, "LIST_SECONDS", 0.05)


async def test_a_closing_aggregator_closes_its_log_and_ends_its_search(tmp_path, monkeypatch):
    kind = Memory()
    looking, ended = asyncio.Event(), []
    opened: list[object] = []

    async def pointers(self, key=None, look=MemoryLog.pointers):
        if opened:
            looking.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append(True)
        return await look(self, key)

    async def read(self, starts, read=MemoryLog.read):
        reader = await read(self, starts)

        async def close():
            opened.remove(reader)

        monkeypatch.setattr(reader, "close", close)
        opened.append(reader)
        return reader

    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(30)
        await leaf.written()
        monkeypatch.setattr(MemoryLog, "read", read)
        monkeypatch.setattr(MemoryLog, "pointers", pointers)
        aggregator = Aggregator(kind, tmp_path / "one", monkeypatch)
        await aggregator.daemon.start()
        await eventually(lambda: set(aggregator.held.values()) == {30}, "its blocks")
        await looking.wait()
        assert len(opened) == 1
        await aggregator.daemon.close(0)
        assert ended == [True]
        assert opened == []
