"""Tests for sources that are added and removed while kvbus runs: their slots and their seqs.

The routers of other sources see no change.
"""

from msgspec import structs

from kvbus.core.commands import Publish
from kvbus.core.events import BatchReceived, RecordReceived, SourcePlaced, SourceRemoved, Started, Tick
from kvbus.core.outputs.spec import NewStream, OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.profiles import PROFILES
from tests.doubles.payloads import batch, payload, store


def source(label):
    return SourceSpec(label, 0, replay=False)


def relay(*labels, merged=False, **more):
    sources = [SourceSpec() if label is None else source(label) for label in labels]
    topics = [None] if merged else [None] * len(labels)
    return Relay(sources, [OutputSpec("out", PROFILES["vllm"], topics, merged, heartbeat=0.0, **more)])


def sent(commands):
    return [(command.stream, command.seq) for command in commands if isinstance(command, Publish)]


def feed(bus, slot, seq, block):
    return sent(bus.handle(BatchReceived(slot, batch(seq, store([block]))), 1.0))


def test_the_seqs_of_a_slot_continue_with_another_source():
    bus = relay("a", "b")
    feed(bus, 1, 0, 2)
    bus.handle(SourceRemoved(1), 2.0)
    assert sent(bus.handle(SourcePlaced(1, source("c"), [NewStream(first_seq=4096)]), 3.0)) == [(1, 2)]
    assert feed(bus, 1, 0, 9) == [(1, 3)]


def test_a_source_in_a_high_slot_leaves_the_slots_before_it_free():
    bus = relay("a")
    assert sent(bus.handle(SourcePlaced(5, source("f"), [NewStream(first_seq=100)]), 3.0)) == [(5, 100)]
    assert feed(bus, 5, 0, 9) == [(5, 101)]
    assert [source.spec.label for source in bus.present] == ["a", "f"]
    assert list(bus.outputs[0].open_streams) == [0, 5]


def test_a_merged_stream_continues_when_a_source_is_replaced():
    bus = relay("a", "b", merged=True)
    feed(bus, 0, 0, 1)
    feed(bus, 1, 0, 2)
    assert sent(bus.handle(SourceRemoved(0), 2.0)) == [(0, 2)]
    assert sent(bus.handle(SourcePlaced(0, source("c"), [NewStream()]), 3.0)) == []
    assert feed(bus, 1, 1, 3) == [(0, 3)]
    assert bus.outputs[0].rank_of(1, bus.sources[1]) == 1


def test_adding_or_removing_a_source_of_a_log_uses_no_seq():
    spec = structs.replace(source("a"), numbered=True)
    output = OutputSpec("out", PROFILES["vllm"], [b"kv@a"], by_topic=True, numbered=True)
    bus = Relay([spec], [output])
    came = SourcePlaced(0, spec, [NewStream(b"kv@a")])
    state = payload({"type": "AllBlocksCleared"}, store([1]), rank=3)
    assert sent(bus.handle(RecordReceived(0, 7, state, begins=True, ends=True), 1.0)) == [(0, 7)]
    assert sent(bus.handle(SourceRemoved(0), 2.0)) == []
    assert sent(bus.handle(came, 3.0)) == []
    assert bus.sources[0].rank == 3
    assert sent(bus.handle(SourcePlaced(0, spec, [NewStream(b"kv@b")]), 4.0)) == []
    assert bus.sources[0].rank == 0


def test_free_slots_send_no_batches():
    """The stream of a free slot sends no heartbeat and no first batch, and has no timeout."""
    bus = Relay(
        [source("a"), SourceSpec(), source("c")],
        [OutputSpec("out", PROFILES["vllm"], [None] * 3, heartbeat=1.0, first_seqs=[7, 7, 7])],
    )
    assert sent(bus.handle(Started(), 0.0)) == [(0, 7), (2, 7)]
    assert sent(bus.handle(Tick(1.0), 50.0)) == [(0, 8), (2, 8)]
