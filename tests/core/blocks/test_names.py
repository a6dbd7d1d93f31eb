"""Names in several dictionaries are as names in one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.blocks.names import Names


@pytest.mark.parametrize("step", [1, 8, 64], ids=["", "some bits alike", "all bits alike"])
def test_a_large_part_is_divided_and_all_are_found(step):
    names: Names[int] = Names()
    blocks = [step * at for at in range(150_000)]
    for at, block in enumerate(blocks):
        names.put(block, at)
    assert names.size == len(blocks)
    assert [names.get(block) for block in blocks] == list(range(len(blocks)))
    assert names.get(-1) is None
    assert names.pop(step) == 1
    assert names.pop(step) is None
    names.put(step, 1)
    assert {names.pop_any() for _ in blocks} == set(range(len(blocks)))


NAME = st.one_of(st.integers(-5, 40), st.binary(max_size=1))


@given(
    st.lists(st.tuples(st.booleans(), NAME, st.integers())),
    st.lists(NAME),
    st.sampled_from([1, 32, 512]),
    st.booleans(),
)
def test_they_are_as_in_one_dictionary(changes, asked, slots, apart):
    names: Names[int] = Names(slots, apart=apart)
    known: dict[int | bytes, int] = {}
    for put, name, value in changes:
        if put:
            names.put(name, value)
            known[name] = value
        else:
            assert names.pop(name) == known.pop(name, None)
        assert names.size == len(known)
    assert [names.get(name) for name in asked] == [known.get(name) for name in asked]
    assert sorted(map(repr, (names.pop_any() for _ in range(len(known))))) == sorted(map(repr, known.values()))
    assert names.size == 0
