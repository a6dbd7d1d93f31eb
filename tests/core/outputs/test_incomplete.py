import random

import pytest

from kvbus.core.outputs.incomplete import MAX_RANGES, IncompleteSeqs


def seqs_in(ranges, end):
    return {seq for seq in range(end) if seq in ranges}


@pytest.mark.parametrize(
    ("added", "kept"),
    [
        ([(3, 5)], 1),
        ([(3, 5), (5, 7)], 1),
        ([(5, 7), (3, 5)], 1),
        ([(3, 5), (6, 7)], 2),
        ([(3, 9), (4, 5)], 1),
        ([(1, 2), (4, 5), (7, 8), (2, 7)], 1),
        ([(4, 4), (5, 3)], 0),
        ([], 0),
    ],
)
def test_ranges_that_touch_become_one(added, kept):
    ranges = IncompleteSeqs()
    for first, end in added:
        ranges.add(first, end)
    assert len(ranges) == kept
    assert seqs_in(ranges, 12) == {seq for first, end in added for seq in range(first, end)}


def test_like_a_set_of_numbers():
    chance = random.Random(7)
    ranges = IncompleteSeqs()
    numbers: set[int] = set()
    for _ in range(300):
        first = chance.randrange(2000)
        end = first + chance.randrange(12)
        ranges.add(first, end)
        numbers.update(range(first, end))
        assert seqs_in(ranges, 2100) == numbers
    runs = sum(seq - 1 not in numbers for seq in numbers)
    assert len(ranges) == runs


def test_of_too_many_the_oldest_two_become_one():
    ranges = IncompleteSeqs()
    for i in range(MAX_RANGES + 1):
        ranges.add(10 * i, 10 * i + 2)
    assert len(ranges) == MAX_RANGES
    assert seqs_in(ranges, 22) == {*range(12), 20, 21}, "more seqs are no cursor, none of them is one by mistake"
