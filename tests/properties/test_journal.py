"""Tests that an output's journal returns the same batches as a plain list of every appended batch."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.outputs.journal import Journal
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.wire.frames import parse_replay_request, replay_request
from kvbus.core.wire.profiles import PROFILES
from tests.core.dsl import seqs_of
from tests.doubles.answers import AnswerReader, answer_of
from tests.typed import there

BATCHES = st.lists(st.one_of(st.just(None), st.integers(0, 20)), max_size=60)
"""Sizes of batches in bytes. None stands for a batch without events."""


def body(seq, size):
    return b"e" if size is None else bytes([seq % 251]) * size


def entries_of(journal):
    first = journal.position(0)
    return [journal.at(first + i) for i in range(len(journal))]


@given(batches=BATCHES, max_batches=st.integers(1, 10), max_bytes=st.integers(1, 60))
def test_a_journal_holds_the_newest_batches_within_its_limits(batches, max_batches, max_bytes):
    journal = Journal(max_batches, max_bytes)
    for seq, size in enumerate(batches):
        journal.append(seq, body(seq, size), empty=size is None)
        entries = entries_of(journal)
        assert journal.bytes == sum(len(entry.payload) for entry in entries)
        assert len(entries) == 1 or (len(entries) <= max_batches and journal.bytes <= max_bytes)
        held = [(entry.seq + i, entry.payload) for entry in entries for i in range(entry.batches)]
        assert [number for number, _ in held] == list(range(there(journal.first_seq), seq + 1))
        assert all(payload == body(number, batches[number]) for number, payload in held)
        assert all(entry.empty for entry in entries if entry.batches > 1)
        assert not any(a.empty and b.empty for a, b in pairwise(entries))


@given(batches=BATCHES, max_batches=st.integers(1, 10), max_bytes=st.integers(1, 60))
def test_a_journal_drops_no_more_batches_than_necessary(batches, max_batches, max_bytes):
    journal, everything = Journal(max_batches, max_bytes), Journal(10**9, 10**9)
    for seq, size in enumerate(batches):
        journal.append(seq, body(seq, size), empty=size is None)
        everything.append(seq, body(seq, size), empty=size is None)
    kept, whole = entries_of(journal), entries_of(everything)
    if len(kept) < len(whole):
        one_more = [whole[-len(kept) - 1], *kept]
        assert len(one_more) > max_batches or sum(len(entry.payload) for entry in one_more) > max_bytes


@given(batches=BATCHES, max_batches=st.integers(1, 10), start=st.integers(0, 70))
def test_an_answer_from_the_journal_is_contiguous_and_has_an_end(batches, max_batches, start):
    stream = OutputStream(b"", PROFILES["vllm"], Journal(max_batches, 10**6), heartbeat=0.0, rank=0)
    for seq, size in enumerate(batches):
        stream.append(body(seq, size) or b" ", 0.0, empty=size is None)
    start = max(start, stream.journal.first_seq or 0)

    def never(_):
        raise AssertionError(start)

    answer = answer_of(stream, there(parse_replay_request([b"id", *replay_request(start)])), never)
    assert seqs_of(AnswerReader(answer)) == [*range(start, len(batches)), "END"]


@given(batches=BATCHES, max_batches=st.integers(1, 10), seq=st.integers(0, 70))
def test_the_position_of_a_seq_is_its_entry_or_the_nearest(batches, max_batches, seq):
    journal = Journal(max_batches, 10**6)
    for number, size in enumerate(batches):
        journal.append(number, body(number, size), empty=size is None)
    entry = journal.at(journal.position(seq))
    if not batches:
        assert entry is None
        return
    assert entry is not None
    first = there(journal.first_seq)
    if seq < first:
        assert entry.seq == first
    else:
        assert entry.seq <= seq
        assert seq < entry.seq + entry.batches or entry == entries_of(journal)[-1]
