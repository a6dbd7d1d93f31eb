"""Fingerprints of the newest batches: what is known by them, and what is not."""

import pytest

from kvbus.core.sequencing.fingerprints import RING, Fingerprints, fingerprint, length


def of(count, first=0):
    known = Fingerprints()
    for seq in range(first, first + count):
        known.add(seq, b"batch %d" % seq)
    return known


def test_the_same_batch_again():
    known = of(10)
    assert all(known.matches(seq, b"batch %d" % seq, 10) is True for seq in range(10))


def test_another_batch_under_the_same_number():
    assert of(10).matches(5, b"other", 10) is False


@pytest.mark.parametrize("seq", [10, 11, 10**12])
def test_what_was_not_delivered_is_not_known(seq):
    assert of(10).matches(seq, b"batch %d" % seq, 10) is None


def test_the_newest_are_kept_and_the_first_for_ever():
    count = 3 * RING
    known = of(count)
    assert known.matches(count - RING, b"batch %d" % (count - RING), count) is True
    assert known.matches(count - RING - 1, b"batch %d" % (count - RING - 1), count) is None
    assert known.matches(0, b"batch 0", count) is True
    assert known.matches(0, b"other", count) is False


def test_one_that_joined_late_does_not_know_the_first():
    assert of(10, first=50).matches(0, b"batch 0", 60) is None
    assert of(10, first=RING - 5).matches(0, b"batch 0", RING + 5) is None


def test_what_was_lost_is_not_known():
    known = of(10)
    known.skip(10, 15)
    known.add(15, b"batch 15")
    assert [known.matches(seq, b"x", 16) for seq in range(10, 15)] == [None] * 5
    assert known.matches(9, b"batch 9", 16) is True


def test_what_was_there_a_ring_ago_is_not_taken_for_what_was_lost():
    known = of(RING)
    known.skip(RING, RING + 20)
    assert known.matches(RING + 10, b"batch 10", RING + 20) is None


def test_a_loss_of_any_size_is_forgotten_in_no_time():
    known = of(10)
    known.skip(10, 2**63 - 2)
    known.add(2**63 - 2, b"newest")
    assert known.matches(2**63 - 2, b"newest", 2**63 - 1) is True
    assert known.matches(9, b"batch 9", 2**63 - 1) is None


def test_a_fingerprint_tells_the_length():
    assert length(fingerprint(b"seven b")) == 7


def test_one_that_was_lost_and_is_seen_after_all_is_learned():
    known = of(10)
    known.skip(10, 12)
    known.learn(10, b"batch 10", 12)
    known.learn(9, b"other", 12)  # known already
    known.learn(12, b"batch 12", 12)  # not delivered
    assert [known.matches(seq, b"batch %d" % seq, 12) for seq in (9, 10, 11, 12)] == [True, True, None, None]


def test_the_newest_known_one():
    known = of(10)
    assert known.newest(10) == 9
    known.skip(10, 12)
    assert known.newest(12) == 9
    known.skip(12, 9 + RING)
    assert known.newest(9 + RING) == 9
    known.skip(9 + RING, 10 + RING)
    assert known.newest(10 + RING) == -1
    assert Fingerprints().newest(0) == -1


@pytest.mark.parametrize(("last", "most", "start"), [(9, 4, 6), (9, 1, 9), (9, 100, 5), (4, 2, 4), (2, 100, 0)])
def test_a_run_ends_at_a_hole_at_the_beginning_or_when_it_is_long_enough(last, most, start):
    known = of(10)
    known.skip(3, 5)
    assert known.run_to(last, most) == start


def test_a_dump_is_plain_and_loads():
    known, loaded = of(RING + 5), Fingerprints()
    loaded.load(known.dump())
    assert loaded.dump() == known.dump()
    assert loaded.matches(0, b"batch 0", RING + 5) is True
    assert loaded.newest(RING + 5) == RING + 4
