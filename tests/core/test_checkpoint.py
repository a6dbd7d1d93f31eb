"""Tests by example for a checkpoint of the relay: the state that it restores, and the data that it refuses.

``tests/properties`` also kills a random relay and restores it from its checkpoint.
"""

import re

import pytest

from kvbus.core.checkpoint import CHUNKS_PER_RECORD, Loader, dump
from kvbus.core.commands import Publish
from kvbus.core.events import Tick
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.profiles import PROFILES
from kvbus.core.write_ahead_log import StateError, decode_records
from tests.core.dsl import Script, live
from tests.doubles.payloads import pack, payload, plain_all, removed, store


def restored(*batches, **rules):
    """Return a script whose relay was loaded from the checkpoint of a relay that applied these batches."""
    first, second = Script(**rules), Script(**rules)
    for events in batches:
        first.source.normalizer.apply(decode_batch(payload(*events)))
    loader = Loader(second.relay)
    for blob in dump(first.relay):
        loader.feed(blob)
    assert loader.complete
    assert second.source.normalizer.entries == first.source.normalizer.entries
    return second


@pytest.mark.parametrize(
    ("event", "reason"), [(store([9], 2, block_size=8), "tail"), (store([9], block_size=32), "coarse")]
)
def test_a_restored_relay_recognizes_removals_of_suppressed_blocks(event, reason):
    script = restored([store([1, 2])], [event, event], block_size=16)
    for left in (3, 2):
        assert script.source.normalizer.apply(decode_batch(payload(removed([9])))) == []
        assert script.source.normalizer.entries == left
    assert script.stats.filtered == {reason: 2}


def test_a_restored_relay_announces_a_tail_that_proves_to_be_a_block():
    """kvbus treated a small block as a tail block, and did not announce it.

    An event with two more blocks of this size proves that they are ordinary blocks. kvbus then announces the first one,
    too.
    """
    script = restored([store([9], block_size=32, group=0)], [store([1], group=0)])
    out = script.source.normalizer.apply(decode_batch(payload(store([2, 3], 1, group=0))))
    assert plain_all(out)[1:] == plain_all([store([1], group=0), store([2, 3], 1, group=0)])


def loaded(first, second):
    """Load the state of the first script's relay into the second script's, and return the second relay's normalizer."""
    loader = Loader(second.relay)
    for blob in dump(first.relay):
        loader.feed(blob)
    return second.source.normalizer


def announced(normalizer):
    return plain_all(normalizer.announce())


def test_a_checkpoint_omits_changes_made_while_it_is_written():
    """Changes that happen while a checkpoint is written are in the write-ahead log after the checkpoint, not in the
    checkpoint.
    """
    first, second = Script(), Script()
    first >> live(0, store([1, 2]))
    first.whatever()
    before = announced(first.source.normalizer)
    slices = dump(first.relay)
    first >> live(1, removed([2]), store([3], 1))
    first.whatever()
    loader = Loader(second.relay)
    for blob in slices:
        loader.feed(blob)
    assert announced(second.source.normalizer) == before != announced(first.source.normalizer)
    assert second.source.sequencer.next == second.relay.outputs[0].streams[0].next_seq == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"block_size": 8}, {"profiles": ("dynamo",)}, {"topic": b"kv"}],
    ids=["", "reblock", "dynamo", "topic"],
)
def test_a_restored_relay_announces_the_same_blocks(options):
    """A relay that was restored from a checkpoint announces the same blocks as before.

    The blocks do not fit into one record of the checkpoint. One store has a field that kvbus does not know, and one of
    its blocks is removed before the checkpoint.
    """
    first, second = Script(**options), Script(**options)
    first >> live(0, {**store([1, 2, 3]), "unheard_of": 7}, topic=b"engine")
    first.whatever()
    first >> live(1, *(store([n], n - 1) for n in range(4, CHUNKS_PER_RECORD + 10)), removed([3]), topic=b"engine")
    first.whatever()
    before, after = first.source.normalizer, loaded(first, second)
    assert announced(after) == announced(before) != []
    assert after.index.announced == before.index.announced
    assert [stream.topic for stream in second.relay.outputs[0].streams] == [options.get("topic", b"engine")]
    assert second.relay.outputs[0].streams[0].next_seq == 2


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Script(ranks=(0, 1)), "the saved state has the sources"),
        (Script(profiles=("vllm", "dynamo")), "the saved state has the outputs"),
    ],
)
def test_a_checkpoint_of_another_configuration_is_refused(other, said):
    head = next(iter(dump(Script().relay)))
    with pytest.raises(StateError, match=said):
        Loader(other.relay).feed(head)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (["pocket lint"], "unknown record 'pocket lint'"),
        ([], "unknown record None"),
        (["head", {}], "record 'head': 'sources'"),
        (["chunks", 0, None, 0, [None, "GPU"], [[1]]], "record 'chunks': not enough values"),
        (["table", 7, None, 0, [None, "GPU"], []], "record 'table': list index"),
        (["table", 0, 0, 0, [None, "GPU"], []], "output 0 has no view"),
    ],
)
def test_a_checkpoint_record_of_a_wrong_form_is_refused(record, said):
    loader = Loader(Script().relay)
    with pytest.raises(StateError, match=re.escape(said)):
        loader.feed(pack(record))
    assert not loader.complete


@pytest.mark.parametrize("blob", [b"", b"\x80", b"\x91"])
def test_a_checkpoint_that_is_not_an_array_is_refused(blob):
    with pytest.raises(StateError):
        Loader(Script().relay).feed(blob)


def test_a_restored_stream_keeps_its_publisher_id():
    made = [
        Relay([], [OutputSpec("out", PROFILES["vllm"], [None], merged=True, publisher_ids=[who * 16])])
        for who in (b"a", b"b")
    ]
    loader = Loader(made[1])
    for blob in dump(made[0]):
        loader.feed(blob)
    assert made[1].outputs[0].streams[0].publisher_id == b"a" * 16


def test_heartbeats_after_a_checkpoint_are_repeated_with_the_same_payload():
    """A replay must repeat every batch exactly, even if kvbus was killed after a checkpoint on an idle stream.

    A kvbus that reads this stream would take another payload for a restart, and clear its routers.
    """
    first, second = (Relay([], [OutputSpec("a", PROFILES["vllm"], [b"t"], merged=True)]) for _ in range(2))
    first.keep_records(keep=True)
    sent: dict[int, bytes] = {}
    loader = Loader(second)
    for now in range(10):
        sent |= {each.seq: each.payload for each in first.handle(Tick(1000.0 + now), now) if isinstance(each, Publish)}
        if now == 4:
            for blob in dump(first):
                loader.feed(blob)
            first.keep_records(keep=True)
    assert first.records is not None
    body, payloads = first.records.take()
    for record in decode_records(body, b"".join(payloads)) or []:
        second.apply_record(record, 0.0)
    entries = second.outputs[0].streams[0].journal.entries()
    repeated = {seq: entry.payload for entry in entries for seq in range(entry.seq, entry.seq + entry.batches)}
    assert len(repeated) == 5
    assert repeated == {seq: sent[seq] for seq in repeated}
