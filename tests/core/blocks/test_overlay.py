"""A dictionary with layers is a dictionary, and whoever holds it still sees no change."""

from __future__ import annotations

from collections.abc import MutableMapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.blocks.overlay import MAX_LAYERS, Layer, Overlay

KEYS = st.integers(0, 7)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, st.integers(0, 99)),
        st.tuples(st.just("remove"), KEYS, st.just(0)),
        st.tuples(st.just("hold"), st.just(0), st.just(0)),
        st.tuples(st.just("let go"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("settle"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


class Holder:
    pass


@given(STEPS)
def test_it_is_what_a_dictionary_would_be(steps):
    base: dict[int, int] = {}
    top: MutableMapping[int, int] = base
    stack, model = Overlay(base, copied_below=0), dict[int, int]()
    held = []
    for what, key, value in steps:
        if what == "set":
            top[key] = model[key] = value
        elif what == "remove":
            assert top.pop(key, None) == model.pop(key, None)
        elif what == "hold":
            holder = Holder()
            kept, top = stack.freeze(top, holder)
            held.append((holder, kept, dict(model)))
            del holder  # `held` alone keeps it
        elif what == "let go" and key < len(held):
            del held[key]
        elif what == "settle":
            top = stack.merge(top)
            if not held:
                assert top is base
        assert dict(top) == model
        assert len(top) == len(model)
        assert {key for key in range(8) if key in top} == set(model)
        assert top.keys().isdisjoint(range(4)) == model.keys().isdisjoint(range(4))
        assert [dict(kept) for _, kept, _ in held] == [then for *_, then in held]
        assert [len(kept) for _, kept, _ in held] == [len(then) for *_, then in held]


def test_what_is_small_is_copied():
    base = {1: 1}
    kept, top = Overlay(base, copied_below=2).freeze(base, Holder())
    assert top is base
    assert kept == base
    assert kept is not base


def test_layers_are_bounded():
    base = {n: n for n in range(5)}
    top: MutableMapping[int, int] = base
    stack, held = Overlay(base, copied_below=0), [Holder() for _ in range(MAX_LAYERS + 1)]
    for holder in held:
        kept, top = stack.freeze(top, holder)
        top[len(top)] = 0
    assert isinstance(kept, dict)
    assert len(top) == 5 + len(held)
    held.clear()
    del holder
    assert stack.merge(top) is base
    assert len(base) == 5 + MAX_LAYERS + 1


def test_removing_what_is_not_there():
    layer = Layer({1: 1})
    del layer[1]
    with pytest.raises(KeyError):
        del layer[1]
    with pytest.raises(KeyError):
        layer[1]
