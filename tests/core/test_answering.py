import gc
import weakref

import pytest

from kvbus.core import answering
from kvbus.core.blocks.compaction import Part, StateSnapshot
from kvbus.core.outputs.journal import Journal
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.wire.frames import parse_replay_request, replay_request
from kvbus.core.wire.profiles import PROFILES, Wire
from tests.core.dsl import Bench, seqs_of
from tests.doubles.answers import AnswerReader, answer_of
from tests.doubles.payloads import cleared, plain_all, store, unpack
from tests.doubles.stage import cut_states
from tests.typed import there, well_formed


def stream(profile="vllm", *, topic=b"kv", batches=100):
    return OutputStream(topic, PROFILES[profile], Journal(batches, 10**7), heartbeat=0.0, rank=0)


def small(seq):
    return b"batch %d" % seq


def filled(count, **options):
    made = stream(**options)
    for seq in range(count):
        assert made.append(small(seq), 0.0) == seq
    return made


def never(start):
    raise AssertionError("the journal holds all that was asked for")


def request_of(start):
    return there(parse_replay_request([b"id", *replay_request(start)]))


def ask(of, start, cut=never, **options):
    return AnswerReader(answer_of(of, request_of(start), cut, **options))


def cutter(of, *hashes):
    """Return a function that makes snapshots of a stream, and a list of the calls of this function.

    The stream has these blocks, each stored by one event.
    """
    bench = Bench()
    bench.feed(*[store([block]) for block in hashes])
    made = []

    def cut(start=0):
        made.append(StateSnapshot(of.next_seq - 1, [Part(bench.normalizer.index.copy(), 0, 1.0)], Wire()))
        return made[-1]

    return cut, made


def messages_of(answer):
    found = []
    while (message := answer.next_message()) is not None:
        if message:
            found.append(message)
    return found


class TestAnswers:
    def test_a_run_of_heartbeats_that_grows_during_an_answer_ends_at_its_old_end(self):
        made = filled(1)
        made.append(b"beat", 0.0, empty=True)
        answer = ask(made, 0)
        for _ in range(5):
            made.append(b"beat", 0.0, empty=True)
        assert seqs_of(answer) == [0, 1, "END"]


class TestAnswersWithState:
    def test_a_new_router_gets_the_state_right_before_the_newest_seq(self, monkeypatch):
        cut_states(monkeypatch, 1)
        made = filled(150)
        cut, cuts = cutter(made, 1, 2, 3)
        shared = cut()
        made.append(b"batch 150", 0.0)
        answer = ask(made, 0, lambda start: shared)
        messages = messages_of(answer)
        assert [int.from_bytes(message[-2], "big") for message in messages[:-1]] == [147, 148, 149, 150]
        assert plain_all(unpack(messages[0][-1])[1]) == plain_all([cleared(), store([1])])
        assert messages[3][-1] == b"batch 150"
        assert (answer.outcome, len(cuts)) == ("late", 1)

    def test_an_answer_from_0_with_all_seqs_is_not_late(self, monkeypatch):
        cut_states(monkeypatch, 1)
        made = filled(3, batches=1)
        cut, _ = cutter(made, 1, 2, 3)
        answer = ask(made, 0, cut)
        assert seqs_of(answer) == [0, 1, 2, "END"]
        assert answer.outcome == "compacted"

    def test_an_answer_has_at_most_max_filler_empty_batches(self, monkeypatch):
        monkeypatch.setattr(answering, "MAX_FILLER", 1000)
        made = stream("llm-d")
        made.next_seq = 10**12
        made.append(b"newest", 0.0)
        cut, _ = cutter(made, 1)
        answer = ask(made, 0, cut)
        messages = messages_of(answer)
        assert len(messages) < 10
        assert well_formed(messages[0][-1]).events
        seqs = [int.from_bytes(message[-2], "big") for message in messages[:-1]]
        assert seqs == list(range(seqs[0], 10**12 + 1)), "it begins late, as a trimmed buffer does, and has no hole"
        assert answer.outcome == "late"

    @pytest.mark.parametrize(("newest", "first", "outcome"), [(1000, 0, "compacted"), (1001, 1001, "late")])
    def test_a_contiguous_answer_uses_up_to_max_filler_empty_batches(self, monkeypatch, newest, first, outcome):
        monkeypatch.setattr(answering, "MAX_FILLER", 1000)
        made = stream("llm-d")
        made.next_seq = newest
        made.append(b"newest", 0.0)
        cut, _ = cutter(made, 1)
        answer = ask(made, 0, cut)
        assert seqs_of(answer) == [*range(first, newest + 1), "END"]
        assert answer.outcome == outcome

    def test_requests_during_an_answer_share_its_snapshot(self):
        made = filled(150, profile="llm-d")
        cut, cuts = cutter(made, 1)
        shared = weakref.ref(cut())
        answer = ask(made, 0, lambda start: cuts.pop())
        answer.next_message()
        made.append(b"later", 0.0)
        assert shared() is not None
        assert seqs_of(answer)[-2:] == [149, "END"]
        gc.collect()
        assert shared() is None


LATE_FROM_0 = [name for name, profile in PROFILES.items() if profile.late_replay]
LLMD = [name for name in PROFILES if name not in LATE_FROM_0]


class TestByProfile:
    """Tests for replay answers by the output's profile and by the requested seq. The journal begins at seq 10.

    A router may have got the state by its subscription and still request a replay.
    """

    @pytest.mark.parametrize("profile", LLMD)
    def test_a_subscribed_llm_d_gets_only_end_from_0_and_the_state_again(self, profile):
        answer = answer_of(filled(20, profile=profile, batches=10), request_of(0), never, gets_states=True)
        assert answer.repeats_state
        assert seqs_of(AnswerReader(answer)) == ["END"]
        assert answer.outcome == "subscription"

    @pytest.mark.parametrize(("newest", "repeats"), [(999, False), (1000, True)])
    def test_llm_ds_at_one_address_get_the_state_again_only_after_too_many_seqs(self, newest, repeats, monkeypatch):
        monkeypatch.setattr(answering, "MAX_FILLER", 1000)
        made = stream("llm-d")
        made.next_seq = newest
        made.append(b"newest", 0.0)
        cut, _ = cutter(made, 1)
        answer = answer_of(made, request_of(0), cut, gets_states=True, alone=False)
        assert answer.repeats_state == repeats
        assert seqs_of(AnswerReader(answer)) == [*([] if repeats else range(newest + 1)), "END"]

    @pytest.mark.parametrize("profile", LLMD)
    @pytest.mark.parametrize(("count", "seqs"), [(0, ["END"]), (5, [0, 1, 2, 3, 4, "END"])])
    def test_a_subscribed_llm_d_gets_everything_from_the_journal_if_it_is_there(self, profile, count, seqs):
        answer = answer_of(filled(count, profile=profile), request_of(0), never, gets_states=True)
        assert not answer.repeats_state
        assert seqs_of(AnswerReader(answer)) == seqs

    @pytest.mark.parametrize("profile", LLMD)
    def test_a_subscribed_llm_d_gets_the_state_even_if_the_journal_has_its_next_seq(self, profile):
        made = filled(20, profile=profile, batches=10)
        cut, cuts = cutter(made, 1)
        answer = ask(made, 15, cut, gets_states=True)
        assert plain_all(unpack(answer.next_message()[-1])[1]) == plain_all([cleared(), store([1])])
        assert [*seqs_of(answer)] == [16, 17, 18, 19, "END"]
        assert (answer.outcome, len(cuts)) == ("compacted", 1)

    @pytest.mark.parametrize("profile", LLMD)
    @pytest.mark.parametrize(("missed", "seqs"), [(11, [*range(5, 16), "END"]), (12, ["END"])])
    def test_a_subscribed_llm_d_gets_only_end_instead_of_too_many_empty_batches(
        self, profile, missed, seqs, monkeypatch
    ):
        monkeypatch.setattr(answering, "MAX_FILLER", 10)
        made = filled(5 + missed, profile=profile)
        cut, _ = cutter(made, 1)
        answer = answer_of(made, request_of(5), cut, gets_states=True)
        assert not answer.repeats_state, "llm-d does not take this END, and asks from 0 later"
        assert seqs_of(AnswerReader(answer)) == seqs

    @pytest.mark.parametrize("gets_states", [False, True])
    @pytest.mark.parametrize(("profile", "start"), [*((name, 0) for name in LATE_FROM_0), ("llm-d", 4), ("vllm", 4)])
    def test_other_requests_get_the_state_even_if_the_subscription_brought_one(self, profile, start, gets_states):
        made = filled(20, profile=profile, batches=10)
        cut, cuts = cutter(made, 1)
        answer = ask(made, start, cut, gets_states=gets_states)
        assert plain_all(unpack(answer.next_message()[-1])[1]) == plain_all([cleared(), store([1])])
        assert [*seqs_of(answer)] == [*range(20 if start == 0 else start + 1, 20), "END"]
        assert (answer.outcome, len(cuts)) == ("late" if start == 0 else "compacted", 1)

    @pytest.mark.parametrize("profile", LLMD)
    def test_kvbus_readers_get_the_state_without_filler_from_an_llm_d_profile(self, profile):
        made = filled(20, profile=profile, batches=10)
        cut, _ = cutter(made, 1)
        assert seqs_of(ask(made, 0, cut, rebuilds=True)) == [19, "END"]

    @pytest.mark.parametrize("profile", [name for name, profile in PROFILES.items() if not profile.filled_replay])
    def test_a_profile_without_contiguous_answers_gets_no_filler(self, profile):
        made = filled(20, profile=profile, batches=10)
        cut, _ = cutter(made, 1)
        answer = ask(made, 4, cut)
        assert seqs_of(answer) == [19, "END"]
        assert answer.outcome == "late"

    def test_a_slow_requester_gets_a_contiguous_answer_after_the_journal_was_trimmed(self):
        made = filled(20, profile="dynamo", batches=10)
        cut, _ = cutter(made, 1)
        answer = ask(made, 10, cut)
        answer.next_message()
        for seq in range(20, 40):
            made.append(small(seq), 0.0)
        assert seqs_of(answer) == [*range(11, 40), "END"]

    @pytest.mark.parametrize("gets_states", [False, True])
    def test_a_request_from_an_incomplete_seq_gets_the_complete_state(self, gets_states):
        made = filled(20, profile="dynamo")
        made.incomplete.add(12, 14)
        cut, cuts = cutter(made, 1)
        answer = ask(made, 13, cut, gets_states=gets_states)
        first = unpack(answer.next_message()[-1])[1]
        assert plain_all(first)[0]["type"] == "AllBlocksCleared"
        assert [*seqs_of(answer)][-1] == "END"
        assert (answer.outcome, len(cuts)) == ("late", 1)
        assert seqs_of(ask(made, 14)) == [*range(14, 20), "END"]
        assert seqs_of(ask(made, 11)) == [*range(11, 20), "END"], "an answer that goes through it is whole"
