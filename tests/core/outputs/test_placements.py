"""SGLang's snapshots, at the relay: a barrier on the live stream, and the state as of it as records of hashes."""

import msgspec
import pytest

from kvbus.core.checkpoint import Loader, dump
from kvbus.core.commands import AnswerSnapshot, Publish
from kvbus.core.events import BatchReceived, ReplayAsked, SnapshotAsked, Started, Subscribed
from kvbus.core.normalizing.rules import Rules
from kvbus.core.outputs.placements import EPOCH_MARK, RECORDS, epoch_mark, marked
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.sequencing.settings import Settings
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.profiles import PROFILES
from tests.doubles.answers import reading
from tests.doubles.payloads import batch, cleared, removed, store, unpack
from tests.typed import there

PUBLISHER = bytes(range(16))
EPOCH = PUBLISHER.hex()
LIVE = b"kv" + EPOCH_MARK + EPOCH.encode()
REQUEST = [b"id", b"", b"snapshot-v1"]


def relay_of(*events, topic=b"kv", engine_topic=b"", publisher=PUBLISHER, rank=0, begun=()):
    spec = OutputSpec("out", PROFILES["sglang"], [topic], heartbeat=0.0, publisher_ids=[publisher], first_seqs=begun)
    relay = Relay([SourceSpec("engine", rank, Settings(replay=False), Rules())], [spec])
    sent = relay.handle(Started(), 0.0)
    for seq, event in enumerate(events):
        sent += relay.handle(BatchReceived(0, batch(seq, event, rank=rank, topic=engine_topic)), 0.0)
    return relay, sent


def asked(relay, frames=REQUEST):
    """The barriers that leave, and the messages of the answer."""
    (command,) = relay.handle(SnapshotAsked(0, 0, frames), 0.0)
    assert isinstance(command, AnswerSnapshot)
    barriers: list[Publish] = []

    def handle(event):
        commands = relay.handle(event, 0.0)
        barriers.extend(each for each in commands if isinstance(each, Publish))
        return commands

    reader = reading(handle, command)
    messages = []
    while (message := reader.next_message()) is not None:
        messages += [message] if message else []
    assert reader.done
    return barriers, messages, reader.outcome


def records_of(messages):
    """The header as it is, and each record as its parent and its block."""
    (*envelope, kind, header), *chunks, end = messages
    assert (kind, end) == (b"header", [*envelope, b"end", b""])
    assert {(*each[:-1],) for each in chunks} <= {(*envelope, b"chunk")}
    found = [record for each in chunks for record in msgspec.msgpack.decode(each[-1])]
    assert all(len(hashes) == 1 for _, hashes in found)
    return unpack(header), [(parent, block) for parent, (block,) in found]


def test_the_state_and_the_barrier_behind_it():
    relay, sent = relay_of(store([1, 2]), store([3], 2), removed([3]), store([-4], 2))
    assert [(each.topic, each.seq, each.publisher_id) for each in sent] == [(LIVE, seq, b"") for seq in range(4)]
    (barrier,), messages, outcome = asked(relay)
    header, records = records_of(messages)
    version, epoch, rank, resume, seq, barrier_id, count = header
    assert (version, epoch, rank, resume, seq, count) == (1, EPOCH, 0, 5, 4, 3)
    assert records == [(None, 1), (1, 2), (2, -4)]
    assert (barrier.seq, barrier.topic) == (4, LIVE + b"\0sgl-kv-snapshot=" + barrier_id.encode())
    assert unpack(barrier.payload)[1:] == [[], 0]
    assert outcome == "compacted"
    (next_one,) = relay.handle(BatchReceived(0, batch(4, store([5], 2))), 0.0)
    assert (next_one.seq, next_one.topic) == (5, LIVE)


def test_each_request_has_a_barrier_of_its_own():
    relay, _ = relay_of(store([1]))
    first, again = asked(relay), asked(relay)
    assert [barriers[0].seq for barriers, _, _ in (first, again)] == [1, 2]
    assert records_of(first[1])[1] == records_of(again[1])[1] == [(None, 1)]
    assert records_of(first[1])[0][5] != records_of(again[1])[0][5]


def test_a_stream_that_said_nothing_begins_with_the_barrier():
    relay, _ = relay_of()
    (barrier,), messages, _ = asked(relay)
    assert records_of(messages) == ([1, EPOCH, 0, 1, 0, f"{EPOCH}-0", 0], [])
    assert barrier.seq == 0


def test_the_rank_is_the_engines():
    relay, _ = relay_of(store([1]), rank=3)
    assert records_of(asked(relay)[1])[0][2] == 3


def test_chunks_are_no_longer_than_readers_take():
    count = 2 * RECORDS + 1
    relay, _ = relay_of(*[store(list(range(first, min(first + 1000, count)))) for first in range(0, count, 1000)])
    _, messages, _ = asked(relay)
    header, records = records_of(messages)
    assert [len(unpack(each[-1])) for each in messages[1:-1]] == [RECORDS, RECORDS, 1]
    assert header[6] == len(records) == count
    assert sorted(block for _, block in records) == list(range(count))


def test_blocks_of_other_tiers_are_none_of_the_devices():
    relay, _ = relay_of(store([1, 2]), store([1], medium="CPU_PINNED"), store([9], medium="DISK"), removed([2]))
    header, records = records_of(asked(relay)[1])
    assert (header[6], records) == (1, [(None, 1)])


def test_a_block_of_two_groups_is_one_record():
    relay, _ = relay_of(store([1], group=0), store([1, 2], group=1))
    header, records = records_of(asked(relay)[1])
    assert (header[6], sorted(records, key=lambda record: record[1])) == (2, [(None, 1), (1, 2)])


@pytest.mark.parametrize("block", [b"h" * 32, 2**63, 2**64 - 1])
def test_hashes_that_readers_cannot_take_are_refused_in_words(block):
    relay, _ = relay_of(store([block]))
    barriers, messages, _ = asked(relay)
    assert messages == [[b"id", b"", b"error", b"there are hashes that are no signed 64-bit integers"]]
    assert len(barriers) == 1


@pytest.mark.parametrize("frames", [[b"snapshot"], [b"", b"snapshot-v2"], [b"", bytes(8)], [b"", b"snapshot-v1", b""]])
def test_another_request_gets_an_error_and_no_barrier(frames):
    relay, _ = relay_of(store([1]))
    barriers, messages, outcome = asked(relay, [b"id", *frames])
    assert (barriers, outcome) == ([], "malformed")
    (message,) = messages
    assert message[-2:] == [b"error", b"snapshot-v1 is what is answered here"]


def test_nobody_to_answer():
    relay, _ = relay_of(store([1]))
    assert relay.handle(SnapshotAsked(0, 0, [b"snapshot-v1"]), 0.0) == []
    assert relay.outputs[0].stats.malformed == 1


def test_a_refusal_is_an_error():
    relay, _ = relay_of(store([1]))
    (command,) = relay.handle(SnapshotAsked(0, 0, REQUEST), 0.0)
    assert reading(lambda _: [], command).refusal() == [b"id", b"", b"error", b"too many requests"]


def test_the_state_on_subscription_and_a_replay_have_the_same_numbers_and_topic():
    relay, _ = relay_of(store([1]))
    *empty, command = relay.handle(Subscribed(0, 0, (1,)), 0.0)
    assert [(each.seq, each.topic) for each in empty] == [(1, LIVE)]
    assert (command.transfer.topic, command.transfer.publisher_id) == (LIVE, b"")
    (begun,) = relay.handle(ReplayAsked(0, 0, [b"id", b"", bytes(8)]), 0.0)
    answer = reading(lambda event: relay.handle(event, 0.0), begun)
    assert there(answer.next_message())[-2] == bytes(8)


def test_the_engines_own_epoch_gives_way():
    relay, (sent,) = relay_of(store([1]), topic=None, engine_topic=b"kv\0sgl-kv-epoch=theirs")
    assert sent.topic == LIVE
    (barrier,), _, _ = asked(relay)
    assert barrier.topic.count(EPOCH_MARK) == 1


def test_a_topic_stays_as_it_is_where_there_is_no_identity():
    theirs = b"kv\0sgl-kv-epoch=theirs"
    assert marked(theirs, epoch_mark(b"")) == theirs
    assert relay_of(store([1]), topic=None, engine_topic=theirs, publisher=b"")[1][0].topic == theirs


@pytest.mark.parametrize("topic", [b"kv", None])
def test_numbers_and_epoch_go_on_from_a_checkpoint(topic):
    relay, _ = relay_of(store([1]), topic=topic, engine_topic=b"kv")
    fresh, _ = relay_of(topic=topic, publisher=b"n" * 16)
    loader = Loader(fresh)
    for blob in dump(relay):
        loader.feed(blob)
    assert loader.complete
    (barrier,), messages, _ = asked(fresh)
    assert (barrier.seq, barrier.topic.partition(b"\0sgl-kv-snapshot")[0]) == (1, LIVE)
    assert records_of(messages) == ([1, EPOCH, 0, 2, 1, f"{EPOCH}-1", 1], [(None, 1)])


def test_a_numbering_that_goes_on_clears_under_the_new_epoch():
    relay, (first,) = relay_of(begun=[7])
    assert (first.seq, first.topic, unpack(first.payload)[1]) == (7, LIVE, [cleared()])
    assert records_of(asked(relay)[1])[0][3:5] == [9, 8]
