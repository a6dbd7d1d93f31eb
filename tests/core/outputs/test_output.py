"""An output's streams: as many as sources, or one for all."""

from kvbus.core.normalizing.rules import Rules
from kvbus.core.outputs.output import Output
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.sequencing.settings import Settings
from kvbus.core.source import Source
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.profiles import PROFILES


def made(*topics, ranks=(4, 7), **options):
    return Output(OutputSpec("out", PROFILES["vllm"], topics, **options), ranks)


SOURCE = Source(SourceSpec("engine", 7, Settings(), Rules()))


def test_a_stream_for_each_source():
    output = made(b"a", None)
    assert [(stream.topic, stream.keeps_topic, stream.rank) for stream in output.streams] == [
        (b"a", False, 4),
        (b"", True, 7),
    ]
    assert output.rank_of(1, SOURCE) == 7


def test_one_stream_for_all_names_sources_by_their_place():
    output = made(b"all", merged=True)
    assert [stream.rank for stream in output.streams] == [0]
    assert [output.rank_of(i, SOURCE) for i in (0, 1)] == [0, 1]


def test_each_numbering_begins_where_it_is_to():
    output = made(b"a", b"b", first_seqs=[10, 20], publisher_ids=[b"p" * 16, b"q" * 16])
    assert [stream.next_seq for stream in output.streams] == [10, 20]
    assert [stream.publisher_id for stream in output.streams] == [b"p" * 16, b"q" * 16]
    assert [stream.next_seq for stream in made(b"a", b"b").streams] == [0, 0]


def test_a_stream_more_is_behind_the_others_and_keeps_as_many_batches():
    output = made(b"a", b"b", journal_batches=2)
    stream = output.add_stream(b"c", 9, 30, b"")
    assert output.streams[2] is stream
    for number in range(30, 35):
        assert stream.append(b"x", 0.0) == number
    assert stream.journal.first_seq == 33


def test_what_is_closed_keeps_its_place():
    output = made(b"a", b"b")
    output.streams[0].closed = True
    assert output.open_streams == {1: output.streams[1]}


def test_other_bounds_hold_for_the_streams_there_are_and_for_those_that_come():
    output = made(b"a", b"b")
    for number in range(5):
        output.streams[0].append(bytes([number]), 0.0)
    output.tune(3.0, 2, 100)
    output.add_stream(b"c", 9, 0, b"")
    for stream in output.streams:
        assert (stream.heartbeat, stream.journal.max_batches, stream.journal.max_bytes) == (3.0, 2, 100)
    output.streams[0].append(b"y" * 60, 1.0)
    assert output.streams[0].journal.first_seq == 4
    output.streams[0].append(b"z" * 60, 1.0)
    assert output.streams[0].journal.first_seq == 6
