"""Tests for late routers of a stream whose blocks kvbus divides: they get the complete state in batches of limited
size.

One block of an engine may be many blocks of the router. The limit must count the router's blocks. The engines and the
relay are the ``Stage`` of ``test_compaction``. The tests compare the state with a router that was connected from the
start, and with the model.
"""

from collections import Counter
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.answering import MAX_FILLER
from kvbus.core.blocks.announce import MOST_BLOCKS
from tests.doubles.payloads import store, unpack
from tests.doubles.stage import cut_states
from tests.properties.test_compaction import Reader, Routers, Stage, with_junk
from tests.properties.test_normalize import EVENTS, SIZE, TURNS, Radix


class Blocks(Stage):
    """Engines with one coarse block size. kvbus divides their blocks into blocks of the size that is configured."""

    def __init__(self, sources, first, base):
        super().__init__(sources, 1, "unsigned", first=first, block_size=base)

    def turn(self, source, wanted):
        self.say(source, wanted)

    def expected(self, i, base):
        return len(self.models[i].live) * SIZE // base


class Nodes(Stage):
    """Engines that announce each node of a radix tree as one block, of any number of pages.

    Several nodes may contain pages with the same tokens.
    """

    def __init__(self, sources, first, base):
        super().__init__(sources, 1, "unsigned", first=first, block_size=base)
        self.trees = [Radix() for _ in range(sources)]

    def turn(self, source, wanted):
        i = source % len(self.trees)
        events = []
        for what in wanted:
            events += self.trees[i].insert(what) if isinstance(what, list) else self.trees[i].evict(what)
        self.send(i, *events)

    def expected(self, i, base):
        return len(self.trees[i].prefixes(base))


SCRIPTS = st.one_of(
    st.tuples(
        st.just(Blocks),
        st.sampled_from([1, 2, 4]),
        st.lists(st.tuples(st.integers(0, 1), st.lists(EVENTS, max_size=6)), min_size=1, max_size=12),
    ),
    st.tuples(
        st.just(Nodes),
        st.sampled_from([None, 1, 2, 4]),
        st.lists(st.tuples(st.integers(0, 1), TURNS.map(lambda turns: turns[0])), min_size=1, max_size=12),
    ),
)
FILLER = 40
FIRSTS = st.sampled_from([0, 1, FILLER - 1, FILLER, FILLER + 1, MAX_FILLER - 1, MAX_FILLER + 7, 10**12])
SLICE, MOST = 2, 8


def blocks_of(events):
    return sum(len(event.get("block_hashes", ())) for event in events)


def state_of(reader):
    """Return the number of blocks in each batch of the state that a reader got.

    The batches of the state are those that differ from the live batch of the same seq.
    """
    stage = reader.stage
    sent = dict(enumerate(stage.batches, stage.first))
    return [blocks_of(unpack(body)[1]) for seq, body in reader.payloads.items() if sent.get(seq) != body]


def reader_of(stage, start):
    """Return a reader that requests a replay from ``start``, and has applied all earlier batches.

    If the answer must be a state, the reader also holds dead blocks.
    """
    router = Routers(min(start, stage.first))
    for seq in range(stage.first, start):
        router.take_next(seq, stage.batches[seq - stage.first])
    router.next = start
    return Reader(stage, with_junk(router, 1) if start < stage.end - 1 else router)


@given(SCRIPTS, st.integers(1, 2), FIRSTS, st.data())
def test_an_answer_and_the_live_batches_after_it_are_the_complete_state(script, sources, first, data):
    kind, pinned, turns = script
    with pytest.MonkeyPatch.context() as patch:
        cut_states(patch, SLICE, MOST)
        patch.setattr("kvbus.core.answering.MAX_FILLER", FILLER)
        stage = kind(sources, first, pinned)
        readers: list[Any] = []
        for source, wanted in turns:
            stage.turn(source, wanted)
            for reader in readers:
                reader.pull(data.draw(st.integers(0, 2)))
            if data.draw(st.booleans()):
                back = data.draw(st.integers(0, min(stage.end, FILLER + 20)))
                readers.append(reader_of(stage, stage.end - back))
        readers.append(reader_of(stage, 0))
        for reader in readers:
            router = reader.finish()
            assert router.blocks == stage.there.blocks
            assert router.counts == +router.counts == stage.there.counts == Counter(dict.fromkeys(router.blocks, 1))
            assert max(state_of(reader), default=0) <= MOST
    for i, source in enumerate(stage.relay.sources):
        base = source.normalizer.block_size
        if base is not None:
            assert sum(key[0] == i for key in stage.there.blocks) == stage.expected(i, base)


ENGINE, ROUTER = 1024, 16


EVENT = 8


def coarse_stage(batches, events, first=0):
    """Return a stage with a journal of one batch, where kvbus divides blocks of 1,024 tokens into blocks of 16.

    Each event has eight blocks of the engine.
    """
    stage = Stage(1, 1, "unsigned", first=first, block_size=ROUTER)
    names = count(1)
    for _ in range(batches):
        stage.send(0, *[store([next(names) for _ in range(EVENT)], block_size=ENGINE) for _ in range(events)])
    return stage


@pytest.mark.parametrize(("batches", "events", "first"), [(100, 3, 0), (25, 6, 1000)], ids=["few numbers", "many"])
def test_an_answer_has_all_sub_blocks_of_blocks_of_1024_tokens(batches, events, first):
    stage = coarse_stage(batches, events, first)
    reader = Reader(stage)
    router = reader.finish()
    assert len(stage.there.blocks) == batches * events * EVENT * ENGINE // ROUTER
    assert len(router.blocks) == len(stage.there.blocks)
    assert router.blocks == stage.there.blocks
    assert reader.answer.outcome == "late"
    assert max(state_of(reader)) <= MOST_BLOCKS


@pytest.mark.parametrize("back", [1, 2, 3])
def test_a_state_with_more_batches_than_seqs_gets_additional_seqs(back):
    """A router requests a replay from one of the newest seqs, and gets a state.

    The state has more batches than there are seqs from there to the newest one, so kvbus first publishes empty batches.
    """
    stage = coarse_stage(6, 6)
    Reader(stage).pull()  # this reader gets a state, so the journal no longer answers for its seqs
    newest = stage.end
    reader = reader_of(stage, newest - back)
    router = reader.finish()
    assert router.blocks == stage.there.blocks
    assert stage.end > newest
    assert max(state_of(reader)) <= MOST_BLOCKS


def test_a_state_that_fits_into_the_seqs_adds_no_empty_batch():
    stage = coarse_stage(6, 6)
    newest = stage.end
    assert Reader(stage).finish().blocks == stage.there.blocks
    assert stage.end == newest
