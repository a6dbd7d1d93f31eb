"""Removals in leaf-first order, against the definition."""

from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.normalizing.removal_order import leaf_first

BLOCKS = st.integers(0, 12)


@st.composite
def forests(draw):
    """Blocks of a forest in any order, some of them: each parent is a smaller number, None, or a stranger."""
    count = draw(st.integers(0, 20))
    parents = {
        b: draw(st.one_of(st.none(), st.integers(0, b - 1) if b else st.none(), st.just(999))) for b in range(count)
    }
    gone = draw(st.permutations(range(count)))
    return [(block, parents[block]) for block in gone[: draw(st.integers(0, count))]]


@st.composite
def graphs(draw):
    """Any parents at all, cycles and self-loops among them."""
    blocks = draw(st.lists(BLOCKS, unique=True))
    return [(block, draw(st.one_of(st.none(), BLOCKS))) for block in blocks]


@given(st.one_of(forests(), graphs()))
def test_it_is_a_permutation(gone):
    assert sorted(leaf_first(gone)) == sorted(block for block, _ in gone)


@given(forests())
def test_children_before_parents(gone):
    order = leaf_first(gone)
    where = {block: at for at, block in enumerate(order)}
    assert all(parent not in where or where[block] < where[parent] for block, parent in gone)


@given(forests())
def test_what_is_in_order_stays_as_it_is(gone):
    parents = dict(gone)
    ordered = leaf_first(gone)
    assert leaf_first([(block, parents[block]) for block in ordered]) == ordered


@given(graphs())
def test_outside_of_cycles_children_go_first_too(gone):
    order = leaf_first(gone)
    where = {block: at for at, block in enumerate(order)}
    parents = dict(gone)
    for block, parent in gone:
        if parent not in where or where[block] < where[parent]:
            continue
        seen, walk = set(), parent
        while walk in parents and walk not in seen:
            seen.add(walk)
            walk = parents[walk]
        assert block in seen or walk == block, f"{parent} went before its child {block}, and there is no cycle"
