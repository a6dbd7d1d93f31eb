"""Tests that kvbus's snapshots give Kafka's guarantees of a compacted log, for every history and every snapshot.

A reader that starts at the beginning sees at least the final state of every live block. Within a state, parents come
before children, and blocks of one medium and group stay together. A batch never changes its seq. A reader that keeps up
with the stream misses no batch. A late router ends with the same blocks as an early router, even if it begins with old
blocks. This holds for routers that keep a plain set, and for routers that count stores and removals. Live batches are
published between the messages of an answer.
"""

from itertools import groupby
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvbus.core.events import ReplayAsked
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.types import medium_key
from kvbus.core.wire.frames import END_SEQ
from kvbus.core.wire.profiles import PROFILES, fold
from tests.doubles.payloads import cleared, unpack
from tests.doubles.router import Block, PlainSetRouter
from tests.doubles.stage import Counting, cut_states, keys_of
from tests.properties.test_normalize import EVENTS, KINDS
from tests.properties.test_state_on_subscription import Modelled, specs

SCRIPTS = st.lists(st.tuples(st.integers(0, 2), st.lists(EVENTS, max_size=6)), min_size=1, max_size=15)
"""Scripts of batches. A step has the index of the source that publishes, and the changes of its cache."""

SOURCES = st.integers(1, 3)
STORE = ("store", None, "GPU", [0])
JOURNALS = st.sampled_from([1, 2, 5, 10_000])


class Routers(Counting):
    """A router that applies batches, and fails at a gap between their seqs."""

    def take_next(self, seq, payload):
        assert seq == self.next, "contiguous, and every batch at its seq"
        self.apply(seq, payload)

    def believe(self, rank, block):
        """Add a block that no engine holds to the router's view, as if it had been stored twice."""
        self.views.setdefault(rank, PlainSetRouter()).blocks[None, "GPU", block] = Block(None, ())
        self.counts[rank, None, "GPU", block] += 2


class Stage(Modelled):
    """A relay with simple engine models, and a router that has been connected from the start."""

    def __init__(self, sources, journal, kind, profile="vllm", *, first=0, block_size=None):
        self.first = first
        self.batches = []
        self.there = Routers(first)
        output = OutputSpec(
            "out",
            PROFILES[profile],
            [None],
            merged=sources > 1,
            heartbeat=0.0,
            journal_batches=journal,
            first_seqs=[first],
        )
        super().__init__([replace(spec, block_size=block_size) for spec in specs(sources)], [output], kind)

    def published(self, command):
        assert command.seq == self.end
        self.batches.append(command.payload)
        self.there.take_next(command.seq, command.payload)

    @property
    def end(self):
        """The seq after the newest seq of the stream."""
        return self.first + len(self.batches)


class Reader:
    """A client that requests a replay from the next seq of ``router``.

    The router keeps the blocks that it already has.
    """

    def __init__(self, stage, router=None):
        self.stage = stage
        self.router = router or Routers()
        self.start = self.router.next
        (self.answer,) = stage.handle(ReplayAsked(0, 0, [b"id", b"", self.start.to_bytes(8, "big")]))
        self.payloads = {}
        self.over = False

    def pull(self, messages=1):
        for _ in range(messages):
            while (message := self.answer.next_message()) == []:
                pass
            if message is None or message[-2] == END_SEQ:
                self.over = True
                return
            seq = int.from_bytes(message[-2], "big")
            if self.answer.outcome == "late" and not self.payloads:
                assert self.router.next <= seq
                assert unpack(message[-1])[1][0] in (cleared(), ["AllBlocksCleared"]), (
                    "whoever believes something is told to forget it"
                )
                self.router.next = seq
            self.payloads[seq] = message[-1]
            self.router.take_next(seq, message[-1])

    def finish(self):
        """Read the rest of the answer, then the live batches that follow the answer."""
        while not self.over:
            self.pull()
        assert self.answer.next_message() is None
        stage = self.stage
        assert self.router.next <= stage.end
        for seq in range(self.router.next, stage.end):
            self.router.take_next(seq, stage.batches[seq - stage.first])
        return self.router

    @property
    def answered_batches(self):
        """The decoded batches of the answer, for tests in which nothing is published after the request."""
        return [unpack(self.payloads[seq]) for seq in sorted(self.payloads)]


def stale(stage, upto):
    """Return a router that got no batch from seq ``upto`` on. It may hold blocks that the engine has removed since."""
    router = Routers()
    for seq in range(min(upto, len(stage.batches))):
        router.take_next(seq, stage.batches[seq])
    return router


def with_junk(router, sources):
    """Return the router after adding one dead block for each source to its view."""
    for rank in range(sources):
        router.believe(rank, f"long gone {rank}")
    return router


@given(SCRIPTS, SOURCES, KINDS)
@example([(0, [STORE, ("evict", None, "GPU", 1)]), (0, [STORE] * 4), (0, [])], 2, "signed")
def test_every_snapshot_is_the_state_of_its_moment(script, sources, kind):
    stage = Stage(sources, 1, kind)
    for at, (source, wanted) in enumerate(script):
        stage.say(source, wanted)
        stage.there.holds(stage.truth)
        ask_at_once(stage, Routers() if at % 2 else stale(stage, len(stage.batches) // 2), sources)


def ask_at_once(stage, router, sources):
    stage.relay.outputs[0].snapshots.clear()  # do not share an earlier snapshot: other tests cover sharing
    behind = router.next < len(stage.batches) - 1
    # An earlier answer to a router may have broken off at this seq, inside a state.
    torn = router.next in stage.relay.outputs[0].streams[0].incomplete
    reader = Reader(stage, with_junk(router, sources) if behind else router)
    reader.finish().holds(stage.truth)
    assert (reader.answer.outcome != "complete") == (behind or torn)


@given(SCRIPTS, SOURCES, KINDS)
def test_a_state_in_an_answer_has_the_required_order(script, sources, kind):
    stage = Stage(sources, 1, kind)
    for source, wanted in script:
        stage.say(source, wanted)
    for _ in range(2):  # at least two batches, so that a journal of one does not reach back to 0
        stage.say(0, [("store", None, "GPU", [0]), ("clear", None, None, None)])
        for at in range(sources):
            stage.say(at, script[-1][1])
    reader = Reader(stage)
    reader.finish()
    events = [(rank, event) for _, events, rank in reader.answered_batches for event in events]
    by_rank = [(rank, [event for _, event in run]) for rank, run in groupby(events, key=lambda pair: pair[0])]
    assert [rank for rank, _ in by_rank] == list(range(sources)), "one source after the other, each under its own rank"
    for rank, (first, *stores) in by_rank:
        assert first["type"] == "AllBlocksCleared"
        assert {event["type"] for event in stores} <= {"BlockStored"}
        tables = [
            key for key, _ in groupby((medium_key(event.get("medium")), event.get("group_idx")) for event in stores)
        ]
        assert len(tables) == len(set(tables)), "a group on a medium is told in one go"
        media = [medium for medium, _ in groupby(medium for medium, _ in tables)]
        assert len(media) == len(set(media)), "one medium at a time"
        assert "GPU" not in media[1:], "the device first"
        known: set[Any] = set()
        for event in stores:
            parent = event["parent_block_hash"]
            for where in (medium_key(event.get("medium")), "GPU"):
                key = (rank, event.get("group_idx"), where, parent)
                assert key in known or key not in stage.truth, "a live parent before its child"
            keys = keys_of(event, rank)
            assert known.isdisjoint(keys), "every block once"
            known.update(keys)


@given(SCRIPTS, SCRIPTS, SOURCES, JOURNALS, KINDS, st.data())
def test_routers_are_exact_with_live_batches_between_messages_of_an_answer(
    before, during, sources, journal, kind, data
):
    stage = Stage(sources, journal, kind)
    readers = []
    for source, wanted in before:
        stage.say(source, wanted)
    for source, wanted in during:
        if data.draw(st.booleans()):
            start = data.draw(st.integers(0, len(stage.batches)))
            readers.append(Reader(stage, stale(stage, start)))
        for reader in readers:
            reader.pull(data.draw(st.integers(0, 2)))
        stage.say(source, wanted)
    readers.append(Reader(stage))
    for reader in readers:
        reader.finish().holds(stage.truth)
    stage.there.holds(stage.truth)


@given(SCRIPTS, SCRIPTS, SOURCES, JOURNALS, KINDS, st.data())
def test_a_router_continues_an_interrupted_answer_from_its_next_seq(before, during, sources, journal, kind, data):
    """The router keeps the received part of a broken answer and requests the rest, as llm-d does.

    Other batches are published in between.
    """
    stage = Stage(sources, journal, kind)
    for source, wanted in before:
        stage.say(source, wanted)
    readers = [Reader(stage, stale(stage, data.draw(st.integers(0, len(stage.batches))))) for _ in range(2)]
    for source, wanted in during:
        at = data.draw(st.integers(0, 1))
        readers[at].pull(data.draw(st.integers(0, 4)))
        if data.draw(st.booleans()):
            stage.say(source, wanted)
        if data.draw(st.booleans()):
            readers[at] = Reader(stage, readers[at].router)
    for reader in readers:
        if reader.router.next <= len(stage.batches):
            Reader(stage, reader.router).finish().holds(stage.truth)


@pytest.mark.parametrize("blocks", [1, 512])
@pytest.mark.parametrize("journal", [1, 3, 6])
def test_a_router_is_exact_wherever_its_answer_is_interrupted(monkeypatch, journal, blocks):
    """A replay answer breaks off inside a state of many batches, so the router's next request begins at a seq of
    this state.
    """
    cut_states(monkeypatch, blocks)
    for start in range(12):
        for messages in range(1, 13 - start):
            stage = Stage(1, journal, "unsigned")
            for node in range(12):
                stage.say(0, [("store", None, "GPU", [node])])
            reader = Reader(stage, stale(stage, start))
            reader.pull(messages)
            Reader(stage, reader.router).finish().holds(stage.truth)


@given(SCRIPTS, SCRIPTS, SOURCES, KINDS, st.data())
def test_answers_share_the_bytes_of_a_snapshot(before, during, sources, kind, data):
    stage = Stage(sources, 2, kind)
    for node in range(3):  # so that a journal of two batches never reaches back to the first
        stage.say(0, [("store", None, "GPU", [node])])
    for source, wanted in before:
        stage.say(source, wanted)
    one = Reader(stage)
    one.pull()
    newest = len(stage.batches)
    while len(stage.batches) == newest:
        stage.say(0, [("store", None, "CPU", [data.draw(st.integers(0, 30))])])
    other = Reader(stage)
    other.pull()
    for source, wanted in during:
        for reader in data.draw(st.permutations([one, other])):
            reader.pull(data.draw(st.integers(0, 2)))
        stage.say(source, wanted)
    for reader in (one, other):
        reader.finish().holds(stage.truth)
    state = [seq for seq in one.payloads if seq < newest]
    assert state
    assert [one.payloads[seq] for seq in state] == [other.payloads[seq] for seq in state]


@given(SCRIPTS, SOURCES)
def test_a_state_for_dynamo_has_the_folded_hashes_of_the_live_batches(script, sources):
    stage = Stage(sources, 1, "bytes", profile="dynamo")
    for source, wanted in script:
        stage.say(source, wanted)
    live = {(rank, group, medium, fold(block)) for rank, group, medium, block in stage.truth}
    stage.there.holds(live)
    Reader(stage).finish().holds(live)


@pytest.mark.parametrize("sources", [2, 3])
@pytest.mark.parametrize("start", range(12))
def test_a_shared_snapshot_with_few_seqs_before_it_contains_every_source(sources, start):
    stage = Stage(sources, 4, "unsigned")
    for node in range(12):
        stage.say(node, [("store", None, "GPU", [node])])
    one = Reader(stage)
    one.pull()  # this answer keeps the snapshot alive
    for node in range(12, 15):
        stage.say(node, [("store", None, "GPU", [node])])
    other = Reader(stage, stale(stage, start))
    other.finish().holds(stage.truth)
    one.finish().holds(stage.truth)


FIELDS = {
    "BlockStored": ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"],
    "BlockRemoved": ["block_hashes", "medium"],
    "AllBlocksCleared": [],
}


class Heard(Routers):
    """A router that reads events as maps and as arrays of positional fields."""

    def take_next(self, seq, payload):
        ts, events, rank = unpack(payload)
        for at, event in enumerate(events):
            if isinstance(event, list):
                name, *values = event
                events[at] = {"type": name, **dict(zip(FIELDS[name], values, strict=False))}
        super().take_next(seq, msgspec.msgpack.encode([ts, events, rank]))


def long_stage(profile, number):
    """Return a stream of three sources whose first seq is ``number``, as after a long uptime.

    Its state has three blocks, one of each source.
    """
    stage = Stage(3, 4, "unsigned", profile=profile, first=number)
    stage.there = Heard(number)
    for node in range(12):
        stage.say(node, [("store", None, "GPU", [node % 3])])
    return stage


@pytest.mark.parametrize("profile", [name for name, profile in PROFILES.items() if profile.late_replay])
def test_the_answer_to_a_new_router_does_not_grow_with_the_uptime(profile):
    """A new router gets the state and then the journal. This takes as many messages at high seqs as at low ones."""
    sent = set()
    for number in (10**4, 10**6, 10**8):
        stage = long_stage(profile, number)
        reader = Reader(stage, Heard())
        assert reader.finish().blocks == stage.there.blocks
        assert reader.answer.outcome == "late"
        sent.add(len(reader.payloads))
    assert len(sent) == 1
    assert sent.pop() <= 5


@pytest.mark.parametrize("profile", ["llm-d", "llm-d-sglang"])
def test_llm_d_gets_a_batch_for_every_requested_seq(profile):
    """If llm-d has not got a state on subscription, the answer to its request has a batch for every requested seq.

    llm-d refuses an answer that begins later than the requested seq.
    """
    stage = long_stage(profile, 10**4)
    reader = Reader(stage, Heard())
    assert reader.finish().blocks == stage.there.blocks
    assert len(reader.payloads) == stage.end


@pytest.mark.parametrize("number", [10**4, 10**6, 10**8])
@pytest.mark.parametrize("profile", ["llm-d", "llm-d-sglang"])
def test_llm_d_gets_only_end_if_its_subscription_brings_the_state(profile, number):
    stage = long_stage(profile, number)
    frames = [b"id", b"", bytes(8)]
    (answer,) = stage.handle(ReplayAsked(0, 0, frames, routers=(1,)))
    assert answer.next_message()[-2:] == [END_SEQ, b""]
    assert answer.done


def test_a_router_that_lacks_a_few_batches_gets_them_from_the_journal():
    """A router that lacks a few batches gets only these batches from the journal.

    Only a request that begins inside a state gets the complete state, even if the journal has the seq.
    """
    stage = long_stage("vllm", 10**6)
    Reader(stage).finish()
    there = Routers(stage.first)
    for seq in range(stage.first, stage.end - 3):
        there.take_next(seq, stage.batches[seq - stage.first])
    reader = Reader(stage, there)
    reader.finish().holds(stage.truth)
    assert (reader.answer.outcome, len(reader.payloads)) == ("complete", 3)
