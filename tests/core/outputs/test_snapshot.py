import pytest

from kvbus.core.blocks.compaction import BLOCKS_PER_BATCH, Part, StateSnapshot
from kvbus.core.commands import AnswerSnapshot, SendPart
from kvbus.core.outputs.snapshot import SnapshotAnswer, SnapshotRequest, parse_snapshot_request, reply
from kvbus.core.wire.profiles import Wire
from kvbus.transport.answer_reader import AnswerReader
from tests.core.dsl import Bench
from tests.doubles.payloads import store
from tests.doubles.router import PlainSetRouter
from tests.typed import there

PUBLISHER = b"p" * 16


class TestRequest:
    def test_of_a_req(self):
        assert parse_snapshot_request([b"id", b"", b"snapshot"]) == SnapshotRequest([b"id", b""], True)

    def test_of_a_dealer(self):
        assert parse_snapshot_request([b"id", b"snapshot"]) == SnapshotRequest([b"id"], True)

    @pytest.mark.parametrize(
        "frames",
        [[b"id", b""], [b"id", b"SNAPSHOT"], [b"id", b"", bytes(8)], [b"id", b"", b"snapshot", b""], [b"id"] * 50],
    )
    def test_of_nobody_we_know_is_answered_all_the_same(self, frames):
        request = there(parse_snapshot_request(frames))
        assert not request.valid
        assert request.envelope[0] == b"id"

    @pytest.mark.parametrize("frames", [[], [b"id"]])
    def test_without_anybody_to_answer(self, frames):
        assert parse_snapshot_request(frames) is None


def answered(request, cut):
    begun = SnapshotAnswer(request.envelope, PUBLISHER, request.valid, published=cut is not None)
    answer = AnswerReader(AnswerSnapshot(0, 0, begun), lambda event: SendPart(0, 0, reply(event.answer, 7, cut)))  # type: ignore[arg-type]
    turns = []
    while (message := answer.next_message()) == []:
        turns.append(message)
    assert answer.next_message() is None
    return message, len(turns)


def cut_of(count, seq=5):
    """A state that was made two empty batches ago."""
    bench = Bench()
    bench.feed(*[store([block]) for block in range(count)])
    return bench, lambda: StateSnapshot(seq, [Part(bench.normalizer.index.copy(), 0, 1.0)], Wire())


@pytest.mark.parametrize("count", [0, 1, 3 * BLOCKS_PER_BATCH + 1])
def test_one_message_with_everything_built_in_slices(count):
    bench, cut = cut_of(count)
    (identity, delimiter, seq, publisher, *chunks), turns = answered(SnapshotRequest([b"id", b""], True), cut)
    assert (identity, delimiter, seq, publisher) == (b"id", b"", (7).to_bytes(8, "big"), PUBLISHER)
    assert len(chunks) == max(1, -(-count // BLOCKS_PER_BATCH))
    assert len(chunks) <= turns <= 2 * len(chunks)
    router = PlainSetRouter()
    for number, chunk in enumerate(chunks):
        router.apply(number, chunk)
    assert router.blocks == bench.router.blocks
    assert router.violations == []


def test_nothing_published_yet_is_minus_one_and_a_bad_request_minus_two():
    _, cut = cut_of(1)
    message, _ = answered(SnapshotRequest([b"id"], True), None)
    assert message == [b"id", b"\xff" * 8, PUBLISHER]
    message, _ = answered(SnapshotRequest([b"id"], False), cut)
    assert message == [b"id", b"\xff" * 7 + b"\xfe", PUBLISHER]


def test_two_answers_share_a_cut_and_not_their_frames():
    _, make = cut_of(3)
    cut = make()
    one, _ = answered(SnapshotRequest([b"a"], True), lambda: cut)
    other, _ = answered(SnapshotRequest([b"b"], True), lambda: cut)
    assert (one[0], other[0]) == (b"a", b"b")
    assert one[1:] == other[1:]


def test_a_refusal_says_that_there_is_none():
    answer = SnapshotAnswer([b"id", b""], PUBLISHER, valid=True, published=True)
    assert answer.refusal() == [b"id", b"", b"\xff" * 7 + b"\xfe", PUBLISHER]
    assert answer.outcome == "compacted"
