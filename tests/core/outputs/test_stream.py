from kvbus.core.outputs.journal import Journal
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.wire.profiles import PROFILES


def stream(*, topic=b"kv", heartbeat=1.0):
    return OutputStream(topic, PROFILES["vllm"], Journal(100, 10**6), heartbeat=heartbeat, rank=0)


class TestNumbers:
    def test_seq_is_dense_from_zero(self):
        made = stream()
        assert [made.append(b"", 0.0, empty=i % 2 == 0) for i in range(10)] == list(range(10))
        assert made.next_seq == 10

    def test_it_goes_on_at_a_later_seq_with_nothing_to_replay(self):
        made = stream()
        for _ in range(3):
            made.append(b"x", 0.0)
        made.incomplete.add(1, 3)
        made.resume_at(100)
        assert (made.first_seq, made.next_seq, made.changed_seq) == (100, 100, 99)
        assert (len(made.journal), made.journal.max_batches, made.journal.max_bytes) == (0, 100, 10**6)
        assert 2 not in made.incomplete
        assert made.append(b"y", 1.0) == made.journal.first_seq == 100


class TestHeartbeat:
    def test_due_after_silence(self):
        made = stream(heartbeat=1.0)
        made.append(b"x", 50.0)
        assert not made.heartbeat_due(50.9)
        assert made.heartbeat_due(51.0)

    def test_a_batch_puts_it_off(self):
        made = stream(heartbeat=1.0)
        made.append(b"x", 50.0)
        made.append(b"x", 50.9)
        assert not made.heartbeat_due(51.5)
        assert made.heartbeat_due(51.9)

    def test_a_stream_that_never_spoke_waits_once_too(self):
        made = stream(heartbeat=1.0)
        assert not made.heartbeat_due(1000.0)
        assert made.heartbeat_due(1001.0)

    def test_zero_is_off(self):
        made = stream(heartbeat=0.0)
        assert not made.heartbeat_due(0.0)
        assert not made.heartbeat_due(10.0**9)


class TestTopic:
    def test_of_ones_own_or_the_sources(self):
        assert (stream(topic=b"kv").topic, stream(topic=b"kv").keeps_topic) == (b"kv", False)
        assert (stream(topic=None).topic, stream(topic=None).keeps_topic) == (b"", True)
        assert (stream(topic=b"").topic, stream(topic=b"").keeps_topic) == (b"", False)
