import pytest

from kvbus.core.normalizing.removal_order import leaf_first


@pytest.mark.parametrize(
    ("gone", "order"),
    [
        ([], []),
        ([(1, None)], [1]),
        ([(1, None), (2, 1), (3, 2)], [3, 2, 1]),
        ([(3, 2), (2, 1), (1, None)], [3, 2, 1]),
        ([(2, 1), (3, 2), (1, None)], [3, 2, 1]),
        ([(1, None), (2, 1), (3, 1)], [2, 3, 1]),
        ([(1, None), (5, 4)], [1, 5]),
        ([(1, 9), (2, 8), (3, 1)], [3, 1, 2]),
        ([(b"a", None), (b"b", b"a")], [b"b", b"a"]),
    ],
    ids=["none", "one", "chain", "in-order", "shuffled", "siblings", "strangers", "unknown-parents", "bytes"],
)
def test_children_go_before_parents_and_else_in_the_order_they_came(gone, order):
    assert leaf_first(gone) == order


@pytest.mark.parametrize(
    "gone", [[(1, 1)], [(1, 2), (2, 1)], [(1, 3), (2, 1), (3, 2)], [(9, 1), (1, 2), (2, 1), (8, 9)]]
)
def test_a_cycle_of_parents_ends_and_loses_nobody(gone):
    assert sorted(leaf_first(gone)) == sorted(block for block, _ in gone)


def test_a_chain_of_a_hundred_thousand_blocks_is_no_recursion():
    gone = [(i, i - 1 if i else None) for i in range(100_000)]
    assert leaf_first(gone) == list(range(99_999, -1, -1))
