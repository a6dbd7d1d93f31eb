"""Every block is followed: the numbers are those of an exact model, which reads what the engine says and nothing that leaves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_analytics import Followed
from tests.doubles.payloads import cleared, removed, store

BLOCKS = st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True)
EVENTS: st.SearchStrategy = st.one_of(
    st.tuples(st.just("store"), st.sampled_from(["GPU", "GPU", "CPU"]), BLOCKS),
    st.tuples(st.just("remove"), st.none(), BLOCKS),
    st.tuples(st.just("clear"), st.none(), st.just([])),
)
BATCHES = st.lists(
    st.tuples(st.floats(-1.0, 100.0), st.sampled_from(["GPU", "CPU"]), st.lists(EVENTS, min_size=1, max_size=6)),
    max_size=20,
)
"""How much later each comes, from which tier it evicts, and what it says."""


class Model:
    """All copies on both tiers, and the whole history."""

    def __init__(self, *, clears_all: bool) -> None:
        self.clears_all = clears_all
        self.copies = Counter[tuple[str, int]]()
        self.born: dict[int, float] = {}
        self.evicted: list[int] = []
        self.stored = self.removed = self.again = 0
        self.spans: list[float] = []

    @property
    def live(self) -> set[int]:
        return {block for _, block in +self.copies}

    def batch(self, ts: float, evicts: str, events: list) -> None:
        leaving: dict[int, float] = {}
        """Blocks that no tier holds, and since when they had been there."""
        clears = 0
        for what, medium, blocks in events:
            for block in blocks:
                held = block in self.live
                if what == "store":
                    self.copies[medium, block] += 1
                    if not held:
                        self._appeared(block, ts, leaving)
                elif self.copies[evicts, block]:
                    self.copies[evicts, block] -= 1
                    if block not in self.live:
                        leaving[block] = self.born.pop(block)
            if what == "clear":
                kept = {"GPU"} if clears else {"CPU"}
                clears += 1
                self.copies = Counter(
                    {key: n for key, n in (+self.copies).items() if key[0] in kept and not self.clears_all}
                )
                leaving |= {block: at for block, at in self.born.items() if block not in self.live}
                self.born = {block: at for block, at in self.born.items() if block in self.live}
                if not self.copies:
                    self.evicted.clear()
                    leaving.clear()
        if not clears:
            self.removed += len(leaving)
            self.spans += [max(0.0, ts - at) for at in leaving.values()]
            self.evicted += leaving
        self.evicted = self.evicted[max(0, len(self.evicted) - len(self.live)) :]

    def _appeared(self, block: int, ts: float, leaving: dict[int, float]) -> None:
        if block in leaving:
            self.born[block] = leaving.pop(block)
            return
        self.born[block] = ts
        self.stored += 1
        if block in self.evicted:
            self.evicted.remove(block)
            self.again += 1


@pytest.mark.parametrize("clears", ["all", "device"])
@given(batches=BATCHES)
def test_following_all_blocks_is_exact(clears, batches):
    followed, model = Followed(clears=clears), Model(clears_all=clears == "all")
    ts = 1000.0
    for after, evicts, events in batches:
        ts += after
        said = []
        for what, medium, blocks in events:
            if what == "store":
                said += [store([block], medium=medium) for block in blocks]
            else:
                said.append(cleared() if what == "clear" else removed(blocks, medium=evicts))
        followed.at(ts, *said)
        model.batch(ts, evicts, events)
        assert set(followed.analytics.sample(1)) == model.live
        assert followed.counts[0] == (len(model.live), model.stored, model.removed, model.again)
        count, total = followed.counts[1]
        assert (count, total) == (len(model.spans), pytest.approx(sum(model.spans)))
