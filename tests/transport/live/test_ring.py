"""The ring alone: positions stay, the oldest entries go, and the newest one is always kept."""

import pytest

from kvbus.transport.live.ring import OVERHEAD, Entry, Ring, Share


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


def shared(share, count, size=10):
    ring = Ring(100, 1, share)

    def give_up():
        dropped.append(ring.pop())

    dropped: list[Entry] = []
    ring.give_up = give_up
    for i in range(count):
        ring.append(Entry(bytes(size), i, float(i)))
    return ring, dropped


def test_rings_that_share_their_bytes_let_go_of_the_oldest_entry_of_all():
    share = Share(4 * (10 + OVERHEAD))
    one, from_one = shared(share, 3)
    two, from_two = shared(share, 3)
    assert one.overflow() is two.overflow() is None
    assert (share.entries, share.bytes) == (6, 6 * (10 + OVERHEAD))
    share.make_room()
    assert (one.first, two.first, len(from_one), len(from_two)) == (2, 0, 2, 0)
    one.trim(3)
    two.append(Entry(bytes(10), 0, 0.0))
    two.append(Entry(bytes(10), 0, 0.0))
    share.make_room()
    assert (two.first, two.end, len(from_two), share.entries) == (1, 5, 1, 4)


def test_one_entry_is_kept_whatever_its_size():
    share = Share(1)
    one, _ = shared(share, 1, 1000)
    two, _ = shared(share, 1, 1000)
    share.make_room()
    assert (one.first, two.first, share.entries) == (1, 0, 1)


def test_what_is_gone_is_not_remembered_for_long():
    share = Share(10**9)
    ring, _ = shared(share, 1)
    other, _ = shared(share, 0)
    for _ in range(10_000):
        other.append(Entry(b"x", 0, 0.0))
        other.trim(other.end)
    assert len(share._order) < 300  # noqa: SLF001 - memory that nothing else shows
    assert (ring.first, share.entries) == (0, 1)
