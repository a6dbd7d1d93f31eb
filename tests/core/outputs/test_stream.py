from kvbus.core.outputs.journal import Journal
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.wire.profiles import PROFILES


def stream(*, topic=b"kv", heartbeat=1.0, profile="vllm", **more):
    return OutputStream(topic, PROFILES[profile], Journal(100, 10**6), heartbeat=heartbeat, rank=0, **more)


class TestStreamOfALog:
    """Tests for a stream with a log's seqs: its journal begins with the newest complete state.

    If the routers already have the blocks of a new state, they get empty batches in its place. The journal keeps the
    batches before the new state until the new state is complete.
    """

    def taken(self, made, seq, payload, *, begins=False, ends=False, known=False):
        return made.take(seq, payload, b"-", 0.0, begins=begins, ends=ends, known=known)

    def kept(self, made):
        return [(entry.seq, entry.payload, entry.batches) for entry in made.journal.entries()]

    def made(self, max_bytes=10**6):
        made = OutputStream(b"kv", PROFILES["vllm"], Journal(100, max_bytes), heartbeat=1.0, rank=0, numbered=True)
        assert self.taken(made, 7, b"ab", begins=True) == b"ab"
        assert self.taken(made, 8, b"cd", ends=True) == b"cd"
        return made

    def test_a_known_state_replaces_the_journal_when_it_is_complete(self):
        made = self.made()
        assert self.taken(made, 9, b"ef", begins=True, known=True) == b"-"
        assert self.kept(made) == [(7, b"ab", 1), (8, b"cd", 1), (9, b"-", 1)]
        assert self.taken(made, 10, b"gh", ends=True, known=True) == b"-"
        assert self.kept(made) == [(9, b"ef", 1), (10, b"gh", 1)]

    def test_an_interrupted_known_state_does_not_replace_the_journal(self):
        made = self.made()
        self.taken(made, 9, b"ef", begins=True, known=True)
        self.taken(made, 10, b"x")
        self.taken(made, 11, b"gh", ends=True, known=True)
        assert self.kept(made)[0] == (7, b"ab", 1)

    def test_a_gap_or_a_new_state_restarts_the_journal(self):
        made = self.made()
        self.taken(made, 20, b"x")
        assert self.kept(made) == [(20, b"x", 1)]
        self.taken(made, 21, b"y", begins=True)
        assert self.kept(made) == [(21, b"y", 1)]

    def test_a_journal_that_drops_entries_is_complete_again_with_the_next_state(self):
        made = self.made(max_bytes=5)
        for seq in (9, 10):
            self.taken(made, seq, b"ef")
        assert (made.holds_state, made.outgrown) == (False, 1)
        self.taken(made, 11, b"ab", begins=True, ends=True)
        assert (made.holds_state, made.outgrown) == (True, 1)

    def test_a_stream_with_a_logs_seqs_sends_no_heartbeat(self):
        assert not self.made().heartbeat_due(10**6)
