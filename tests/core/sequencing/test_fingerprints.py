import pytest

from kvbus.core.sequencing.fingerprints import RING, Fingerprints


def of(count, first=0):
    marks = Fingerprints()
    for seq in range(first, first + count):
        marks.add(seq, b"batch %d" % seq)
    return marks


def test_the_same_batch_again():
    marks = of(10)
    assert all(marks.matches(seq, b"batch %d" % seq, 10) is True for seq in range(10))


def test_another_batch_under_the_same_number():
    assert of(10).matches(5, b"other", 10) is False


@pytest.mark.parametrize("seq", [10, 11, 10**12])
def test_what_was_not_delivered_is_not_known(seq):
    assert of(10).matches(seq, b"batch %d" % seq, 10) is None


def test_the_newest_are_kept_and_the_first_for_ever():
    count = 3 * RING
    marks = of(count)
    assert marks.matches(count - RING, b"batch %d" % (count - RING), count) is True
    assert marks.matches(count - RING - 1, b"batch %d" % (count - RING - 1), count) is None
    assert marks.matches(0, b"batch 0", count) is True
    assert marks.matches(0, b"other", count) is False


def test_one_that_joined_late_does_not_know_the_first():
    assert of(10, first=50).matches(0, b"batch 0", 60) is None
    assert of(10, first=RING - 5).matches(0, b"batch 0", RING + 5) is None


def test_what_was_lost_is_not_known():
    marks = of(10)
    marks.skip(10, 15)
    marks.add(15, b"batch 15")
    assert [marks.matches(seq, b"x", 16) for seq in range(10, 15)] == [None] * 5
    assert marks.matches(9, b"batch 9", 16) is True


def test_what_was_there_a_ring_ago_is_not_taken_for_what_was_lost():
    marks = of(RING)
    marks.skip(RING, RING + 20)
    assert marks.matches(RING + 10, b"batch 10", RING + 20) is None


def test_a_loss_of_any_size_is_forgotten_in_no_time():
    marks = of(10)
    marks.skip(10, 2**63 - 2)
    marks.add(2**63 - 2, b"newest")
    assert marks.matches(2**63 - 2, b"newest", 2**63 - 1) is True
    assert marks.matches(9, b"batch 9", 2**63 - 1) is None
