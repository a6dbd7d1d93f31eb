"""The ring alone: positions stay, the oldest entries go, and the newest one is always kept."""

import pytest

from kvbus.transport.live.ring import Entry, Ring


def ring_of(count, *, max_batches=100, max_bytes=10**6, size=10):
    ring = Ring(max_batches, max_bytes)
    for i in range(count):
        ring.append(Entry(b"%d" % i + bytes(size - len(b"%d" % i)), i, float(i)))
    return ring


def test_positions_stay_while_the_oldest_entries_go():
    ring = ring_of(5)
    assert (ring.first, ring.end, ring.bytes) == (0, 5, 50)
    ring.trim(3)
    assert (ring.first, ring.end, ring.bytes) == (3, 5, 20)
    assert (ring.published(3), ring.published(4), ring.published(5)) == (3.0, 4.0, None)
    ring.trim(2)
    assert (ring.first, ring.end) == (3, 5)
    ring.trim(100)
    assert (ring.first, ring.end, ring.bytes) == (5, 5, 0)


def test_what_nobody_needs_is_not_kept_and_has_its_positions_all_the_same():
    ring = ring_of(5)
    ring.skip(7)
    assert (ring.first, ring.end, ring.bytes) == (12, 12, 0)
    ring.append(Entry(b"x", 1, 9.0))
    assert ring.read(12, 100) == (b"x", 13)


def test_positions_pass_while_nothing_is_kept():
    ring = ring_of(0)
    ring.skip(3)
    ring.skip(2)
    assert (ring.first, ring.end, ring.bytes) == (5, 5, 0)


@pytest.mark.parametrize("limit", [{"max_batches": 3}, {"max_bytes": 30}])
def test_beyond_a_limit_the_oldest_entries_go_one_by_one(limit):
    ring = ring_of(5, **limit)
    assert [ring.overflow().events for _ in range(2)] == [0, 1]
    assert ring.overflow() is None
    assert (ring.first, ring.end, ring.bytes) == (2, 5, 30)


def test_the_newest_entry_is_kept_whatever_its_size():
    ring = ring_of(2, max_bytes=1)
    assert ring.overflow().events == 0
    assert ring.overflow() is None
    assert ring.read(1, 0)[1] == 2
    assert Ring(1, 1).overflow() is None


@pytest.mark.parametrize(("max_bytes", "count"), [(0, 1), (10, 1), (19, 1), (20, 2), (1000, 3)])
def test_a_piece_is_whole_messages_and_one_at_least(max_bytes, count):
    ring = ring_of(5)
    data, position = ring.read(2, max_bytes)
    assert (len(data), position) == (10 * count, 2 + count)
    assert data.startswith(b"2\0")


def test_events_from_a_position_on():
    ring = ring_of(5)
    ring.trim(1)
    assert [ring.events_from(position) for position in (1, 4, 5)] == [10, 4, 0]
