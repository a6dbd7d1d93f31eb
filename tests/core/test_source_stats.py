"""What is counted of one source."""

from kvbus.core.source_stats import COUNTERS, SourceStats


def test_a_source_begins_at_zero():
    stats = SourceStats()
    assert (stats.missing, stats.recovered, stats.lost) == (0, 0, 0)
    assert not stats.rejected
    assert not stats.filtered


def test_counters_are_not_shared():
    one, other = SourceStats(), SourceStats()
    one.rejected["x"] += 1
    assert other.rejected["x"] == 0


def test_a_copy_has_every_counter_and_shares_none():
    stats = SourceStats()
    assert set(COUNTERS) == {name for name in dir(stats) if not name.startswith("_")} - {"copy"}
    stats.lost, stats.last_batch = 7, 1.5
    stats.rejected["x"] += 1
    copied = stats.copy()
    stats.lost += 1
    stats.rejected["x"] += 1
    assert (copied.lost, copied.last_batch, copied.rejected) == (7, 1.5, {"x": 1})
