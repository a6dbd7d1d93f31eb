from kvbus.core.outputs.journal import Journal
from kvbus.core.outputs.stream import JournalTransfer, OutputStream
from kvbus.core.wire.profiles import PROFILES


def taken(batches):
    return [batch for batch in batches if batch is not None]


def numbered_stream(journal=(10**6, 10**9)):
    return OutputStream(b"kv", PROFILES["vllm"], Journal(*journal), heartbeat=1.0, rank=0, numbered=True)


class TestTransferOfALogStream:
    """Tests for a stream with a log's seqs: its journal begins with a state, and a new router gets the journal."""

    def test_a_transfer_sends_the_complete_journal_with_its_seqs(self):
        stream = numbered_stream()
        sent = []
        for seq in range(1_000_000, 1_000_000 + 300):
            empty = seq % 3 == 0
            payload = b"" if empty else seq.to_bytes(4, "big") * 100
            stream.take(seq, payload, b"", 0.0, begins=seq == 1_000_000, ends=seq == 1_000_003, known=False)
            sent.append((seq, payload))
        transfer = JournalTransfer(stream)
        assert (transfer.first_seq, transfer.end_seq) == (1_000_000, 1_000_000 + 300)
        assert taken(transfer.batches()) == sent

    def test_fast_and_slow_readers_of_a_transfer_get_the_same_batches(self):
        stream = numbered_stream()
        stream.take(7, b"state", b"", 0.0, begins=True, ends=True, known=False)
        stream.take(8, b"next", b"", 0.0, begins=False, ends=False, known=False)
        transfer = JournalTransfer(stream)
        fast, slow = transfer.batches(), transfer.batches()
        assert next(slow) == (7, b"state")
        stream.take(9, b"later", b"", 0.0, begins=False, ends=False, known=False)
        assert taken(fast) == [(7, b"state"), (8, b"next")]
        assert taken(slow) == [(8, b"next")]

    def test_a_transfer_of_an_empty_journal_has_no_batches(self):
        transfer = JournalTransfer(numbered_stream())
        assert transfer.first_seq == transfer.end_seq == 0
        assert taken(transfer.batches()) == []
