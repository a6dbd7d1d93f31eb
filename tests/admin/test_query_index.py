"""The tree behind ``/query``: built beside the stream, kept up with it, and dropped when nobody asks."""

import asyncio
import itertools
import random
import time

import pytest

from kvbus.admin import query_index as module
from kvbus.admin.pace import Pace, client
from kvbus.admin.query_index import QueryIndex
from kvbus.core.blocks.announce import announce
from kvbus.core.blocks.prefix_index import PrefixIndex, medium_of
from kvbus.core.blocks.prefix_paths import NamedBlocks
from kvbus.core.events import BatchReceived, SourceDown, SourceRemoved, SourceUp, Tick
from kvbus.core.stats import ProcessStats
from tests.core.dsl import Script
from tests.doubles.payloads import batch, cleared, removed, store
from tests.system.bus import eventually

SOURCES = (0, 1, 2)
SIZE = 4


class Engines:
    """Engines behind a relay, with caches that change at random."""

    def __init__(self, seed, **rules):
        self.relay = Script(ranks=SOURCES, **rules).relay
        self.random = random.Random(seed)
        self._seqs = dict.fromkeys(SOURCES, 0)
        self._held: dict[int, dict[str, list[tuple[int, ...]]]] = {source: {} for source in SOURCES}
        for source in SOURCES:
            self.relay.handle(SourceUp(source), 0.0)

    def say(self, source, *events):
        self.relay.handle(BatchReceived(source, batch(self._seqs[source], *events, rank=source)), 0.0)
        self._seqs[source] += 1

    def store(self, source, chain, medium="GPU", **more):
        names = [chain[: at + 1] for at in range(len(chain))]
        hashes = [hash(name) for name in names]
        tokens = [block * 100 + at for block in chain for at in range(SIZE)]
        self.say(source, store(hashes, tokens=tokens, block_size=SIZE, medium=medium, **more))

    def step(self):
        source, held = self.random.choice(SOURCES), self.random.choice(("GPU", "CPU"))
        blocks = self._held[source].setdefault(held, [])
        if self.random.random() < 0.02:
            self.say(source, cleared(), cleared())
            self._held[source] = {}
        elif blocks and self.random.random() < 0.5:
            gone = blocks.pop(self.random.randrange(len(blocks)))
            self.say(source, removed([hash(gone)], medium=held))
        else:
            chain = tuple(self.random.choices((1, 2, 3), k=self.random.randint(1, 6)))
            blocks += [chain[: at + 1] for at in range(len(chain)) if chain[: at + 1] not in blocks]
            self.store(source, chain, held)

    def fresh(self):
        """A tree of what the sources hold now."""
        index: PrefixIndex[int] = PrefixIndex()
        for slot, source in enumerate(self.relay.sources):
            for event in announce(source.normalizer.index):
                index.apply(slot, event)
        return index


def same(index, fresh):
    """Whether two trees answer alike."""
    prompts = [(a, b, c, d) for a in (1, 2, 3) for b in (1, 2, 3) for c in (1, 2, 3) for d in (1, 2, 3)]
    asked = [[block * 100 + at for block in chain for at in range(SIZE)] for chain in prompts]
    assert len(index) == len(fresh)
    assert [index.matches(tokens) for tokens in asked] == [fresh.matches(tokens) for tokens in asked]
    hashes = [[hash(chain[: at + 1]) for at in range(len(chain))] for chain in prompts]
    assert [by_name(index, names) for names in hashes] == [by_name(fresh, names) for names in hashes]


def by_name(index, names):
    prompt = [NamedBlocks(names)]
    matches, others = index.named(prompt)
    of_their_own = {slot: index.named_by(slot, prompt) for slot in others}
    return matches | {slot: match for slot, match in of_their_own.items() if match}


async def whole(index):
    found = await index.ask(60)
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(8))
async def test_it_is_what_the_sources_hold_however_they_change_while_it_is_built(seed, monkeypatch):
    monkeypatch.setattr(module, "SLICE", 0)
    monkeypatch.setattr(module, "FEW", 3)
    engines = Engines(seed, duplicates="ignore")
    for _ in range(400):
        engines.step()
    live = QueryIndex(engines.relay, ProcessStats(), Pace())
    asking = asyncio.create_task(live.ask(60))
    steps = 0
    while not asking.done():
        engines.step()
        steps += 1
        await asyncio.sleep(0)
    assert steps > 10
    index = await whole(live)
    same(index, engines.fresh())
    for _ in range(50):
        engines.step()
    same(index, engines.fresh())
    await live.close()


async def test_a_block_that_goes_before_it_is_read_is_not_held_and_one_that_is_back_is(monkeypatch):
    monkeypatch.setattr(module, "SLICE", 0)
    monkeypatch.setattr(module, "FEW", 1)
    engines = Engines(0, duplicates="ignore")
    for n in range(40):
        engines.store(0, (n, n))
    live = QueryIndex(engines.relay, ProcessStats(), Pace())
    asking = asyncio.create_task(live.ask(60))
    while live.reading is None:  # noqa: ASYNC110 - it is one turn of the loop
        await asyncio.sleep(0)
    for n in (38, 39):
        engines.say(0, removed([hash((n,))]))
    engines.store(0, (39,))
    await asking
    index = await whole(live)
    assert [index.longest_prefix([n * 100 + at for _ in range(2) for at in range(SIZE)]) for n in (38, 39)] == [
        {},
        {0: 2},
    ]
    await live.close()


async def test_a_block_that_came_and_went_while_others_were_read_is_not_held(monkeypatch):
    monkeypatch.setattr(module, "SLICE", 0)
    monkeypatch.setattr(module, "FEW", 1)
    engines = Engines(0, duplicates="ignore")
    for source in SOURCES:
        for n in range(10):
            engines.store(source, (n,))
    live = QueryIndex(engines.relay, ProcessStats(), Pace())
    asking = asyncio.create_task(live.ask(60))
    while live.reading is None:  # noqa: ASYNC110 - it is one turn of the loop
        await asyncio.sleep(0)
    last = next(source for source in SOURCES if source != live.reading)
    engines.store(last, (99,))  # the tree has it from the stream, and from the copy that is made later
    while live.reading != last:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)
    engines.say(last, removed([hash((99,))]))
    await asking
    index = await whole(live)
    assert index.longest_prefix([99 * 100 + at for at in range(SIZE)]) == {}
    same(index, engines.fresh())
    await live.close()


async def test_it_is_dropped_when_nobody_asks_and_built_again():
    engines = Engines(1)
    engines.store(0, (1, 2))
    stats = ProcessStats()
    live = QueryIndex(engines.relay, stats, Pace(), idle=0.05)
    assert (live.index, stats.query_index_blocks) == (None, 0)
    assert len(await whole(live)) == 2
    assert stats.query_index_blocks == 2
    assert list(live.texts.in_pieces(b'{"tokens": [1]}', 1)) == []
    assert stats.query_text_bytes
    index = live.index
    assert index is not None
    index.matches([100, 101, 102, 103])
    await eventually(lambda: stats.query_path_bytes == index.paths_size > 0, "its size counted")
    await eventually(lambda: live.index is None, "the tree dropped")
    await eventually(lambda: index.paths_size == 0, "prompts forgotten")
    assert list(live.texts.in_pieces(b'{"tokens": [2]}', 1)) == []
    assert (stats.query_index_blocks, stats.query_text_bytes, stats.query_path_bytes) == (0, 0, 0)
    engines.store(1, (1,))  # nobody takes it in
    assert (await whole(live)).longest_prefix([100, 101, 102, 103]) == {0: 1, 1: 1}
    await live.close()


async def test_it_is_not_there_before_it_is_whole(monkeypatch):
    monkeypatch.setattr(module, "SLICE", 0)
    monkeypatch.setattr(module, "slices", lambda *_: itertools.repeat([]))
    engines = Engines(2)
    engines.store(0, (1,))
    live = QueryIndex(engines.relay, ProcessStats(), Pace())
    assert await live.ask(0.01) is None
    assert live.unread == 3
    await live.close()


async def test_sources_that_are_gone_or_away_hold_nothing():
    engines = Engines(3)
    live = QueryIndex(engines.relay, ProcessStats(), Pace())
    for source in SOURCES:
        engines.store(source, (1,))
    engines.relay.handle(SourceDown(0), 0.0)
    engines.relay.handle(Tick(0.0), 31.0)  # expired before anybody asked
    index = await whole(live)
    tokens = [100, 101, 102, 103]
    assert index.longest_prefix(tokens) == {1: 1, 2: 1}
    engines.relay.handle(SourceRemoved(1), 31.0)
    assert index.longest_prefix(tokens) == {2: 1}
    engines.store(2, (1, 2))
    assert index.longest_prefix([*tokens, 200, 201, 202, 203]) == {2: 2}
    await live.close()


async def test_only_the_first_group_counts():
    engines = Engines(4)
    engines.store(0, (1, 2), group_idx=0, kv_cache_spec_kind="full_attention")
    engines.store(0, (1, 2, 3), group_idx=1, kv_cache_spec_kind="full_attention")
    live = QueryIndex(engines.relay, ProcessStats(), Pace())
    index = await whole(live)
    engines.store(0, (1, 4), group_idx=1, kv_cache_spec_kind="full_attention")
    assert len(index) == 2
    await live.close()


async def test_it_is_built_in_turns_with_those_who_ask(monkeypatch):
    monkeypatch.setattr(module, "SLICE", 0)
    monkeypatch.setattr(module, "FEW", 1)
    clock = itertools.count(time.perf_counter(), 0.0001)  # a piece of the tree takes three looks at it, an answer one
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    engines, pace, order = Engines(5), Pace(), []
    for n in range(20):
        engines.store(0, (n, n))
    live = QueryIndex(engines.relay, ProcessStats(), pace)

    def read(event):
        order.append("built")
        return medium_of(event)

    monkeypatch.setattr(module, "medium_of", read)

    async def crowd():
        client.set("crowd")
        while live.index is None:
            async with pace.piece():
                order.append("asked")

    asking = [asyncio.create_task(crowd()) for _ in range(10)]
    await whole(live)
    await asyncio.gather(*asking)
    assert order.count("built") >= 20
    assert ("built", "built") not in itertools.pairwise(order)
    await live.close()
