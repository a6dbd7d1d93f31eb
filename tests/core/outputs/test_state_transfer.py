import pytest

from kvbus.core.blocks.announce import MOST_BLOCKS
from kvbus.core.blocks.compaction import Part, StateSnapshot
from kvbus.core.outputs.journal import RUNS, Journal
from kvbus.core.outputs.state_transfer import JournalTransfer, StateTransfer
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.wire.profiles import PROFILES, Wire
from tests.core.dsl import Bench
from tests.doubles.payloads import store
from tests.doubles.router import PlainSetRouter


def transfer_of(count, first_seq, size=16):
    bench = Bench()
    for first in range(0, count, 1000):
        hashes = list(range(first, min(count, first + 1000)))
        bench.feed(*(store([block], tokens=[2**31 + block] * size, block_size=size) for block in hashes))
    snapshot = StateSnapshot(first_seq - 1, [Part(bench.normalizer.index.copy(), 0, 1.0, size)], Wire())
    return StateTransfer(snapshot, first_seq, b"topic", b"id")


def taken(reader):
    found = []
    while not reader.done:
        batch = reader.next_batch()
        if batch is not None:
            found.append(batch)
    return found


@pytest.mark.parametrize("count", [0, 1, MOST_BLOCKS, MOST_BLOCKS + 1, 2 * MOST_BLOCKS + 1])
def test_its_batches_have_the_seqs_from_the_first_on_and_begin_with_a_clear(count):
    transfer = transfer_of(count, 7)
    assert transfer.end_seq == 7 + max(1, -(-count // MOST_BLOCKS))
    batches = taken(transfer.reader())
    assert [seq for seq, _ in batches] == list(range(7, transfer.end_seq))
    router = PlainSetRouter()
    for seq, payload in batches:
        router.apply(seq, payload)
    assert (router.clears, len(router.blocks), router.violations) == (1, count, [])


def test_readers_share_it_at_their_own_pace():
    transfer = transfer_of(5000, 1, size=512)
    fast, slow = transfer.reader(), transfer.reader()
    while (first := slow.next_batch()) is None:
        pass
    assert not slow.done
    whole = taken(fast)
    assert slow.next_batch() is None, "not kept for it: it is made again, step by step"
    assert whole == [first, *taken(slow)]


def test_nothing_comes_after_its_end():
    reader = transfer_of(1, 0).reader()
    taken(reader)
    with pytest.raises(IndexError, match="transfer 0 to 1 is over"):
        reader.next_batch()


def numbered_stream(journal=(10**6, 10**9)):
    return OutputStream(b"kv", PROFILES["vllm"], Journal(*journal), heartbeat=1.0, rank=0, numbered=True)


class TestOfALogsNumbers:
    """The journal of such a stream begins with a state: it is what a router is told."""

    def test_everything_the_journal_has_under_the_numbers_that_it_has(self):
        stream = numbered_stream()
        sent = []
        for seq in range(1_000_000, 1_000_000 + 5 * RUNS):
            empty = seq % 3 == 0
            payload = b"" if empty else seq.to_bytes(4, "big") * 100
            stream.take(seq, payload, b"", 0.0, begins=seq == 1_000_000, ends=seq == 1_000_003, known=False)
            sent.append((seq, payload))
        transfer = JournalTransfer(stream)
        assert (transfer.first_seq, transfer.end_seq) == (1_000_000, 1_000_000 + 5 * RUNS)
        assert taken(transfer.reader()) == sent

    def test_it_is_as_of_the_moment_and_readers_share_it_at_their_own_pace(self):
        stream = numbered_stream()
        stream.take(7, b"state", b"", 0.0, begins=True, ends=True, known=False)
        stream.take(8, b"next", b"", 0.0, begins=False, ends=False, known=False)
        transfer = JournalTransfer(stream)
        fast, slow = transfer.reader(), transfer.reader()
        assert slow.next_batch() == (7, b"state")
        stream.take(9, b"later", b"", 0.0, begins=False, ends=False, known=False)
        assert taken(fast) == [(7, b"state"), (8, b"next")]
        assert taken(slow) == [(8, b"next")]

    def test_nothing_was_read_yet(self):
        transfer = JournalTransfer(numbered_stream())
        assert transfer.first_seq == transfer.end_seq == 0
        assert transfer.reader().done
