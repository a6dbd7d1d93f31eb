"""Tests with a model of vLLM's block pool with partial hits: it announces the last tokens of a prompt as a tail block.

The tail block ends with the prompt and has its own hash. Hashes exist for every ``FINE`` tokens. The parent of a tail
block is the hash ``FINE`` tokens before its end, even if the engine never announced that hash. When the block becomes
full, it loses these hashes and gets the hash of the complete block.
"""

from collections import Counter
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from tests.core.dsl import Bench
from tests.doubles.payloads import cleared, removed, store

FINE, WHOLE = 2, 8

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=30)
TURNS = st.lists(
    st.lists(
        st.one_of(
            st.tuples(st.just("prompt"), PROMPTS, st.booleans()),
            st.tuples(st.just("prompt"), PROMPTS, st.booleans()),
            st.tuples(st.just("grow"), st.integers(0, 30), st.lists(st.integers(0, 1), min_size=1, max_size=12)),
            st.tuples(st.just("evict"), st.integers(0, 30), st.integers(1, 5)),
            st.tuples(st.just("reset"), st.none(), st.none()),
        ),
        max_size=6,
    ),
    min_size=1,
    max_size=12,
)


def name_of(prompt, end):
    """Return the hash of the prefix of ``prompt`` that ends at ``end``; None for an empty prefix.

    A complete block and a tail block that end there have this same hash.
    """
    return int.from_bytes(blake2b(bytes(prompt[:end]), digest_size=8).digest(), "big") if end else None


class Pool:
    """The block pool of the model of vLLM: its blocks in memory, and the events that it sends for them.

    A block in memory has the hash of a complete block, or the hashes of prefixes that end inside it.
    """

    def __init__(self):
        self.memory = []
        """For each memory block, the prompt up to the block's end, and the block's hashes."""
        self.events = []

    def take_events(self):
        events, self.events = self.events, []
        return events

    @property
    def names(self):
        return Counter(name for _, names in self.memory for name in names)

    @property
    def complete_blocks(self):
        """Hashes of the complete blocks in the model's memory, that is, without tail blocks."""
        return {names[0] for prompt, names in self.memory if names and len(prompt) % WHOLE == 0}

    def forget(self, block):
        self.events += [removed([name], group=0) for name in block[1]]

    def prompt(self, tokens, reuse):
        """Add a prompt. Send its new complete blocks in one event, then its tail block."""
        ends = range(WHOLE, len(tokens) + 1, WHOLE)
        new = [end for end in ends if not (reuse and name_of(tokens, end) in self.complete_blocks)]
        if new:
            self.fill(tokens, new[0] - WHOLE, ends[-1])
        self.tail(tokens, [])

    def fill(self, tokens, start, end):
        ends = range(start + WHOLE, end + 1, WHOLE)
        names = [name_of(tokens, at) for at in ends]
        self.memory += [(tokens[:at], [name]) for at, name in zip(ends, names, strict=True)]
        self.events.append(store(names, name_of(tokens, start), tokens=tokens[start:end], block_size=WHOLE, group=0))

    def tail(self, tokens, names):
        end = len(tokens) // FINE * FINE
        if end % WHOLE and name_of(tokens, end) not in names:
            name = name_of(tokens, end)
            self.memory.append((tokens[:end], [*names, name]))
            parent = name_of(tokens, end - FINE)
            self.events.append(store([name], parent, tokens=tokens[end - FINE : end], block_size=FINE, group=0))

    def grow(self, at, tokens):
        """Extend a prompt whose last block is not full.

        The last block keeps its hash until the added tokens complete another piece of :data:`FINE` tokens.
        """
        unfinished = [block for block in self.memory if len(block[0]) % WHOLE]
        if not unfinished:
            return
        block = unfinished[at % len(unfinished)]
        grown = [*block[0], *tokens]
        if len(grown) // FINE == len(block[0]) // FINE:
            return
        self.forget(block)
        self.memory.remove(block)
        start = len(block[0]) // WHOLE * WHOLE
        if len(grown) - start >= WHOLE:
            self.fill(grown, start, len(grown) // WHOLE * WHOLE)
        self.tail(grown, [])

    def evict(self, at, count):
        for _ in range(min(count, len(self.memory))):
            self.forget(self.memory.pop(at % len(self.memory)))

    def reset(self, *_):
        self.memory.clear()
        self.events.append(cleared())


@given(TURNS, st.sampled_from([None, WHOLE, FINE]), st.booleans())
def test_routers_hold_exactly_the_complete_blocks_without_tails(turns, pinned, proven):
    """Routers hold the engine's complete blocks, and no tail blocks.

    If ``block_size`` is not configured, kvbus may announce a tail block as a block before it gets the first complete
    block. So the test checks the routers only after that block.
    """
    bench, pool = Bench(block_size=pinned), Pool()
    if proven:
        pool.fill([2] * (2 * WHOLE), 0, 2 * WHOLE)
    seen = proven
    for turn in turns:
        for what, *detail in turn:
            if what != "reset" or not any(event == cleared() for event in pool.events):
                getattr(pool, what)(*detail)
        events = pool.take_events()
        bench.feed(*events)
        seen |= any(event.get("block_size") == WHOLE for event in events)
        assert bench.router.violations == []
        assert bench.rejected == {}
        assert bench.filtered.get("unknown_block", 0) == 0
        assert bench.normalizer.entries == len(pool.names)
        if not seen and pinned != WHOLE:
            continue
        assert {
            block for table in bench.normalizer.index.tables.values() for block in table.blocks
        } == pool.complete_blocks
        if pinned == FINE:
            assert len(bench.live) == len(set(prefixes(pool)))
        else:
            assert bench.live == pool.complete_blocks
        assert bench.announced().blocks == bench.router.blocks
    pool.evict(0, len(pool.memory))
    bench.feed(*pool.take_events())
    assert bench.normalizer.entries == 0
    assert bench.live == set()


def prefixes(pool):
    """Yield, for each complete block in memory, the prefixes that end after every ``FINE`` tokens of the block."""
    for prompt, _ in pool.memory:
        if len(prompt) % WHOLE == 0:
            yield from (tuple(prompt[:end]) for end in range(len(prompt) - WHOLE + FINE, len(prompt) + 1, FINE))
