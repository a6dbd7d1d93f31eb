"""Tests for the metrics of a kvbus that writes to a log.

They show whether another writer has taken over a stream, and whether a stream's next state is overdue.
"""

from kvbus.parts.log.contract import UnavailableError
from kvbus.parts.outputs import appending
from tests.doubles.bus import eventually
from tests.log.fleet import KEY, fleet


class UnavailableLog:
    """A log that refuses writers until a test sets ``away`` to False."""

    def __init__(self, log):
        self._log = log
        self.away = True

    def __getattr__(self, name):
        return getattr(self._log, name)

    async def claim(self, key):
        if self.away:
            raise UnavailableError("away")
        return await self._log.claim(key)


async def test_a_fenced_stream_is_counted_until_it_is_closed(kind):
    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(5)
        await leaf.written()
        assert (leaf.stats.streams_written, leaf.stats.streams_fenced) == (1, 0)
        await (await kind.open().claim(KEY)).close()
        leaf.store(1)
        await eventually(lambda: leaf.stats.streams_fenced, "the leaf to notice")
        assert (leaf.stats.streams_written, leaf.stats.streams_fenced) == (0, 1)
        await leaf.close()
        assert (leaf.stats.streams_written, leaf.stats.streams_fenced) == (0, 0)


async def test_an_overdue_state_is_counted_until_it_is_written(kind, monkeypatch):
    monkeypatch.setattr(appending, "OVERDUE", 0.5)
    async with fleet(kind) as log:
        place = UnavailableLog(kind.open())
        leaf = log.leaf(place, kafka={"cluster": "eu", "state_every": 1})
        leaf.store(5)
        assert leaf.stats.states_overdue == 0
        await eventually(lambda: leaf.stats.states_overdue == 1, "somebody to hear of it")
        monkeypatch.setattr(appending, "OVERDUE", 60.0)
        place.away = False
        await leaf.written()
        await eventually(lambda: leaf.stats.states_overdue == 0, "the state to count")
        assert leaf.stats.streams_written == 1
