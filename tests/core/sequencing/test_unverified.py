"""Live batches without a place: kept within bounds, counted when they are dropped, and judged by what follows."""

from kvbus.core.sequencing.unverified import MAX_STALE, PAUSE, RUN, UnverifiedBatches
from kvbus.core.source_stats import SourceStats


def made(max_bytes=10**6):
    stats = SourceStats()
    return UnverifiedBatches(max_bytes, stats), stats


def test_the_same_one_twice_is_a_copy():
    batches, stats = made()
    batches.keep_stale(5, b"x")
    batches.keep_stale(5, b"y")
    assert stats.duplicates == 1
    assert batches.take_stale() == [(5, b"x")]


def test_by_number_the_lowest_are_let_go_and_counted():
    batches, stats = made()
    for seq in range(MAX_STALE + 3):
        batches.keep_stale(seq, b"")
    assert [seq for seq, _ in batches.take_stale()] == list(range(3, MAX_STALE + 3))
    assert stats.duplicates == 3


def test_by_size_as_many_as_need_be():
    batches, stats = made(max_bytes=10)
    for seq in range(4):
        batches.keep_stale(seq, b"xxx")
    batches.keep_stale(9, b"x" * 7)
    assert [seq for seq, _ in batches.take_stale()] == [3, 9]
    assert stats.duplicates == 3


def test_a_new_epoch_is_a_run():
    batches, _ = made()
    assert not batches.consecutive
    for seq in (1, 3, 4):
        batches.keep_stale(seq, b"")
        assert not batches.consecutive
    batches.keep_stale(5, b"")
    assert batches.consecutive


def test_what_is_taken_is_kept_no_longer_and_is_no_copy():
    batches, stats = made()
    batches.keep_stale(2, b"b")
    batches.keep_stale(1, b"a")
    assert batches.take_stale() == [(1, b"a"), (2, b"b")]
    assert batches.take_stale() == []
    assert stats.duplicates == 0


def test_far_ahead_one_is_odd_and_a_run_is_another_numbering():
    batches, _ = made()
    assert batches.ahead(100, b"a") is None
    assert batches.ahead(200, b"b") is None
    assert batches.ahead(201, b"c") is None
    assert batches.ahead(202, b"d") == [(200, b"b"), (201, b"c"), (202, b"d")]
    assert RUN == 3


def test_a_lost_connection_ends_the_run_and_counts_the_stale():
    batches, stats = made()
    batches.keep_stale(1, b"")
    batches.ahead(100, b"a")
    batches.ahead(101, b"b")
    batches.disconnected()
    assert stats.duplicates == 1
    assert batches.ahead(102, b"c") is None


def test_once_the_publisher_has_shown_its_epoch_it_is_left_in_peace():
    batches, stats = made()
    batches.epoch_confirmed(10.0)  # nothing was stale: nothing to be sure of
    assert batches.may_ask(10.0)
    batches.keep_stale(1, b"")
    batches.epoch_confirmed(10.0)
    assert stats.duplicates == 1
    assert not batches.may_ask(10.0 + PAUSE / 2)
    assert batches.may_ask(10.0 + PAUSE)
