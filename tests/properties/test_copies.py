"""Tests for engines that send a removal for each copy of a block, and for engines that send one removal for all copies.

With the matching `duplicates` rule, kvbus is exact for each.
"""

from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.dsl import Bench
from tests.doubles.payloads import cleared, removed, store
from tests.properties.test_normalize import Naming, named, tokens

WHERE = st.sampled_from([(0, "GPU"), (0, "GPU"), (0, "CPU"), (1, "GPU")])
NODES = 5
"""Number of blocks in the engine's tree. It is small, so that most blocks are stored more than once."""


@st.composite
def paths(draw):
    """Draw the indices of consecutive blocks of a chain."""
    first = draw(st.integers(0, NODES - 1))
    return list(range(first, draw(st.integers(first, NODES - 1)) + 1))


PICKS = st.lists(st.integers(0, NODES - 1), min_size=1, max_size=3)
EVENTS = st.one_of(
    st.tuples(st.just("store"), WHERE, paths()),
    st.tuples(st.just("evict"), WHERE, PICKS),
    st.tuples(st.just("store"), WHERE, paths()),
    st.tuples(st.just("evict"), WHERE, PICKS),
    st.tuples(st.just("store"), WHERE, paths()),
    st.tuples(st.just("evict"), WHERE, PICKS),
    st.tuples(st.just("evict"), WHERE, PICKS),
    st.tuples(st.just("clear"), st.just((0, "GPU")), st.none()),
)
HISTORIES = st.lists(st.lists(EVENTS, max_size=5), min_size=1, max_size=20)


class Pool:
    """A model of an engine's physical blocks, and the events that the engine sends for them."""

    def __init__(self, *, each: bool, says: bool = False) -> None:
        self.copies = Counter[Any]()
        self.each = each
        """Whether the engine sends a removal for every copy of a block. Otherwise it sends one for the last copy."""
        self.says = says
        """Whether the engine's removals contain the number of remaining copies."""

    @property
    def live(self):
        return {key for key, copies in self.copies.items() if copies}

    def events(self, name, batch):
        """Apply a batch of changes, and return the events that the engine sends for it."""
        sent = []
        for what, (group, medium), detail in batch:
            if what == "clear":
                again = cleared() in sent
                for key in list(self.copies):
                    if (key[1] == "GPU") != again:
                        del self.copies[key]
                sent.append(cleared())
            elif what == "store":
                body = [token for node in detail for token in tokens(node)]
                hashes, parent = [name(node) for node in detail], name(detail[0] - 1 if detail[0] else None)
                sent.append(store(hashes, parent, tokens=body, block_size=4, medium=medium, group=group))
                self.copies.update((group, medium, node) for node in detail)
            else:
                sent += self._evicted(name, group, medium, detail)
        return sent

    def _evicted(self, name, group, medium, picks):
        gone, left = [], []
        for pick in picks:
            blocks = [key for key, copies in self.copies.items() if copies and key[:2] == (group, medium)]
            if not blocks:
                break
            key = blocks[pick % len(blocks)]
            self.copies[key] -= 1
            if self.each or not self.copies[key]:
                gone.append(name(key[2]))
                left.append(self.copies[key])
        said = {"remaining_copy_counts": left} if self.says else {}
        return [removed(gone, medium=medium, group=group, **said)] if gone else []


class Lru:
    """A model of vLLM's block pool.

    It reuses the block that was free for the longest time, and evicts this block's hash.

    Requests that run at the same time do not share blocks. The last block of each request is not full and has no hash.
    """

    def __init__(self, size, *, each):
        self.free = dict.fromkeys(range(size))
        self.named = {}
        self.each = each
        self.sent = []

    @property
    def live(self):
        return set(self.named.values())

    def run(self, *prompts):
        held = [self._found(prompt) for prompt in prompts]
        for each in held:
            for at in each:
                self.free.pop(at, None)
        for prompt, mine in zip(prompts, held, strict=True):
            new = prompt[len(mine) :]
            mine.extend([self._taken() for _ in range(len(new) + 1)])
            if new:
                self.sent.append(("stored", *new))
            self.named.update(zip(mine[len(prompt) - len(new) :], new, strict=False))
        for mine in held:
            self.free.update(dict.fromkeys(reversed(mine)))

    def _found(self, prompt):
        found = []
        for block in prompt:
            at = next((at for at, named in self.named.items() if named == block), None)
            if at is None:
                break
            found.append(at)
        return found

    def _taken(self):
        at = next(iter(self.free))
        del self.free[at]
        block = self.named.pop(at, None)
        if block is not None and (self.each or block not in self.live):
            self.sent.append(("removed", block))
        return at


WORKLOADS = list(product([([1], [1]), ([1],), ([],), ([2],)], repeat=4))
"""Sequences of four workloads.

A workload is one block in two simultaneous requests, that block in one request, a request without a full block, or
another block.
"""


def test_equal_streams_of_two_pools_may_leave_different_blocks():
    """Two LRU pools of the same size send the same bytes, but one holds a block that the other does not hold.

    Therefore no rule for copies of a block that sees only the stream is correct for both pools. This holds for the
    values ``count`` and ``last`` of kvbus's setting ``duplicates``, and for any other rule.
    """
    held: list[dict[Any, list[set[int]]]] = [{}, {}]
    for each, workload in product([False, True], WORKLOADS):
        pool = Lru(4, each=each)
        for prompts in workload:
            pool.run(*prompts)
        held[each].setdefault(tuple(pool.sent), []).append(pool.live)
    sent = (("stored", 1), ("stored", 1), ("removed", 1), ("stored", 2))
    assert {2} in held[False][sent]
    assert {1, 2} in held[True][sent]
    assert not [live for live in held[True][sent] if 1 not in live]


@pytest.mark.parametrize("rule", ["count", "last", "ignore"])
@given(history=HISTORIES, each=st.booleans())
def test_kvbus_is_exact_for_an_engine_with_remaining_copy_counts(rule, history, each):
    bench, pool, name = Bench(duplicates=rule), Pool(each=each, says=True), Naming("signed")
    for batch in history:
        bench.feed(*pool.events(name, batch))
        assert set(bench.router.blocks) == named(pool, name)


@pytest.mark.parametrize("rule", ["last", "ignore"])
@given(history=HISTORIES)
def test_kvbus_is_exact_with_duplicates_last_if_one_removal_deletes_all_copies(rule, history):
    bench, pool, name = Bench(duplicates=rule), Pool(each=False), Naming("signed")
    for batch in history:
        bench.feed(*pool.events(name, batch))
        assert set(bench.router.blocks) == named(pool, name)


@given(HISTORIES, st.sets(st.integers(0, 20)))
def test_kvbus_is_exact_with_duplicates_count_if_each_copy_is_removed(history, restarts):
    bench, pool, name = Bench(), Pool(each=True), Naming("signed")
    for at, batch in enumerate(history):
        if at in restarts:
            bench.restart()
        bench.feed(*pool.events(name, batch))
        assert set(bench.router.blocks) == named(pool, name)
        assert bench.router.violations == []
