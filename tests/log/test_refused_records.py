"""Tests for a log that accepts a writer but refuses its records, as a broker with a small ``max.message.bytes``
does.
"""

import asyncio
import itertools

from kvbus.parts.log.contract import UnavailableError
from tests.doubles.bus import eventually
from tests.log.fleet import fleet
from tests.log.kinds import Memory
from tests.log.memory import MemoryLog, MemoryWriter


async def test_a_writer_waits_longer_after_each_refusal(monkeypatch):
    claims, claim = [], MemoryLog.claim

    async def claimed(self, key):
        claims.append(asyncio.get_running_loop().time())
        return await claim(self, key)

    async def refused(self, records):
        raise UnavailableError("the record is too large")

    monkeypatch.setattr(MemoryLog, "claim", claimed)
    with monkeypatch.context() as small:
        small.setattr(MemoryWriter, "append", refused)
        async with fleet(Memory()) as log:
            leaf = log.leaf()
            leaf.store(3)
            await eventually(lambda: len(claims) >= 4, "a fourth claim")
            pauses = [later - earlier for earlier, later in itertools.pairwise(claims[:4])]
            assert all(pause >= least for pause, least in zip(pauses, (0.2, 0.4, 0.8), strict=True))
            small.undo()
            await leaf.written()
            await (await log.reading()).holds(leaf)
