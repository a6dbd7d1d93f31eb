import pytest

from kvbus.core.codec import decode_batch
from kvbus.core.frames import END_SEQ, parse_replay_request, replay_request
from kvbus.core.journal import Journal
from kvbus.core.schema import AllBlocksCleared
from kvbus.core.encoding import PROFILES, Profile, encode
from kvbus.core.stream import OutputStream
from tests.core.dsl import payload, plain_all, removed, seqs_of, store, unpack


def stream(profile="vllm", *, topic=b"kv", heartbeat=1.0, batches=100):
    return OutputStream(topic, PROFILES[profile], Journal(batches, 10**6), heartbeat, 0)


def filled(count, **options):
    made = stream(**options)
    for seq in range(count):
        assert made.append(b"batch %d" % seq, 0.0) == seq
    return made


def ask(of, start):
    return of.answer(parse_replay_request([b"id", *replay_request(start)]))


class TestProfiles:
    def test_every_profile_a_configuration_may_name(self):
        assert {name: (p.encoding, p.framing) for name, p in PROFILES.items()} == {
            "vllm": ("map", "4"),
            "dynamo": ("map", "4"),
            "llm-d": ("map", "4"),
            "aibrix": ("array", "4"),
            "sglang": ("map", "3"),
        }

    @pytest.mark.parametrize("encoding", ["map", "array"])
    def test_a_batch_is_an_array_of_three(self, encoding):
        assert unpack(encode(encoding, [], 1.5, 3)) == [1.5, [], 3]

    @pytest.mark.parametrize("encoding", ["map", "array"])
    def test_both_encodings_say_the_same(self, encoding):
        events = [store([2**64 - 1, 2], 3), removed([b"x" * 32]), {"type": "AllBlocksCleared"}]
        batch = decode_batch(payload(*events))
        again = decode_batch(encode(encoding, batch.events, 1.0, 0))
        assert plain_all(again.events) == plain_all(batch.events)

    def test_by_position_lengths_are_those_of_vllm_0_10_2(self):
        batch = decode_batch(payload(store([1], group=0), removed([1], group=0), {"type": "AllBlocksCleared"}))
        assert [len(event) for event in unpack(encode("array", batch.events, 1.0, 0))[1]] == [7, 3, 1]

    def test_the_default_profile_is_the_newest_engine(self):
        assert Profile() == PROFILES["vllm"]
        assert AllBlocksCleared() == decode_batch(encode("array", [AllBlocksCleared()], 1.0, 0)).events[0]


class TestNumbers:
    def test_seq_is_dense_from_zero(self):
        made = stream()
        assert [made.append(b"", 0.0, empty=i % 2 == 0) for i in range(10)] == list(range(10))
        assert made.next_seq == 10


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


class TestAnswers:
    @pytest.mark.parametrize("profile", ["vllm", "sglang"])
    def test_messages_in_the_framing_of_the_profile(self, profile):
        answer = ask(filled(2, profile=profile), 1)
        topic = [b"kv"] if profile == "vllm" else []
        none = [b""] if profile == "vllm" else []
        assert answer.next_message() == [b"id", b"", *topic, (1).to_bytes(8, "big"), b"batch 1"]
        assert answer.next_message() == [b"id", b"", *none, END_SEQ, b""]
        assert answer.next_message() is None
        assert answer.next_message() is None

    @pytest.mark.parametrize(("start", "first"), [(0, 0), (4, 4), (9, 9), (10, 10), (11, 10), (2**64 - 1, 10)])
    def test_from_where_it_was_asked_to_the_newest(self, start, first):
        assert seqs_of(ask(filled(10), start)) == [*range(first, 10), "END"]

    def test_a_stream_with_nothing_ends_at_once(self):
        assert seqs_of(ask(stream(), 0)) == ["END"]

    def test_a_malformed_request_ends_at_once(self):
        answer = filled(10).answer(parse_replay_request([b"id", b"", b"what"]))
        assert seqs_of(answer) == ["END"]

    def test_what_was_trimmed_is_told_and_the_rest_follows(self):
        made = filled(150)
        answer = ask(made, 0)
        assert answer.trimmed
        assert seqs_of(answer) == [*range(50, 150), "END"]
        assert not ask(made, 50).trimmed

    def test_it_ends_at_the_batch_that_was_newest_when_asked(self):
        made = filled(5)
        answer = ask(made, 3)
        made.append(b"later", 0.0)
        assert seqs_of(answer) == [3, 4, "END"]

    def test_heartbeats_are_answered_one_by_one(self):
        made = filled(2)
        for _ in range(5):
            made.append(b"beat", 0.0, empty=True)
        made.append(b"batch 7", 0.0)
        assert seqs_of(ask(made, 0)) == [*range(8), "END"]
        assert seqs_of(ask(made, 4)) == [4, 5, 6, 7, "END"]

    def test_a_run_that_grows_while_it_is_read_ends_where_it_was(self):
        made = filled(1)
        made.append(b"beat", 0.0, empty=True)
        answer = ask(made, 0)
        for _ in range(5):
            made.append(b"beat", 0.0, empty=True)
        assert seqs_of(answer) == [0, 1, "END"]

    def test_trimming_while_it_is_read_goes_on_at_the_oldest_left(self):
        made = filled(100)
        answer = ask(made, 0)
        first = [int.from_bytes(answer.next_message()[-2], "big") for _ in range(10)]
        for seq in range(100, 150):
            made.append(b"batch %d" % seq, 0.0)
        assert first + seqs_of(answer) == [*range(10), *range(50, 100), "END"]

    def test_trimming_past_all_of_it_ends_it(self):
        made = filled(100)
        answer = ask(made, 0)
        answer.next_message()
        for seq in range(100, 350):
            made.append(b"batch %d" % seq, 0.0)
        assert seqs_of(answer) == ["END"]

    def test_payloads_are_those_of_their_seq(self):
        made = filled(120)
        answer = ask(made, 90)
        for seq in range(90, 120):
            assert answer.next_message()[-2:] == [seq.to_bytes(8, "big"), b"batch %d" % seq]

    def test_two_answers_do_not_disturb_each_other(self):
        made = filled(10)
        one, other = ask(made, 0), ask(made, 5)
        one.next_message()
        assert seqs_of(other) == [*range(5, 10), "END"]
        assert seqs_of(one) == [*range(1, 10), "END"]
