"""Tests for an aggregator that reads so slowly that retention deletes records before it has read them.

The lost records are counted, and the routers become exact again.
"""

from tests.doubles.bus import eventually
from tests.log.fleet import fleet
from tests.log.test_aggregator import TOPIC, Two, hold_back

BEHIND = 150
"""Number of batches that are appended while the aggregator does not read: more than a client prefetches."""


def lost(aggregator):
    """Return the number of records that the aggregator has counted as lost."""
    return aggregator.daemon.discovery_stats[0].records["lost"]


async def test_an_aggregator_overtaken_by_retention_recovers_with_the_next_state(kind, tmp_path, monkeypatch):
    held = hold_back(kind, monkeypatch)
    async with fleet(kind) as log, Two(kind, tmp_path, monkeypatch) as two:
        leaf = log.leaf()
        leaf.store(300)
        await two.level(leaf)
        held.set()
        for _ in range(BEHIND):
            leaf.store(3, gone=2)
            await leaf.written()
        await kind.squeeze(log.key, 5)  # the state is deleted too
        stood = two.router.blocks(TOPIC)
        held.clear()
        assert stood != leaf.blocks
        await eventually(lambda: leaf.stats.states_sent["trimmed"], "the writer to notice")
        leaf.store(3, gone=2)
        await two.level(leaf)
        assert min(lost(two.one), lost(two.other)) > 0
        await eventually(lambda: two.one.next == two.other.next, "equal numbers")
        assert dict(leaf.stats.states_sent) == {"subscribed": 1, "trimmed": 1}
