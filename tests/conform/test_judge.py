"""Tests for the judgement of each clause that one stream can show.

One stream keeps the clause, and another breaks it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvbus.tools.conform.engine.judge import Answer, EngineJudge
from kvbus.tools.conform.engine.stream import Message
from kvbus.tools.conform.report import Level, Outcome, Verdict
from kvbus.tools.conform.vectors import CLEARED, END, Frames, message, pack, raw, removed, stored
from tests.typed import there

KEPT, BROKEN, NOT_SEEN = Outcome


def verdicts_of(*messages: Frames, connected: bool = True) -> dict[str, Verdict]:
    judge = EngineJudge()
    for frames in messages:
        found = judge.parse(frames)
        if found is not None:
            judge.take(found, connected=connected)
    return {str(each.clause): each for each in judge.verdicts()}


def outcome_of(number: str, *messages: Frames, **more: Any) -> tuple[Outcome, Level]:
    verdict = verdicts_of(*messages, **more)[number]
    assert verdict.message
    return verdict.outcome, verdict.level


def batch_with_long_seq(seq: int) -> Frames:
    return [b"", seq.to_bytes(8, "big") + bytes(16), pack([1.5, [], 0])]


A, B = stored(1), stored(2, parent=1)
CPU = stored(1, medium="CPU")
GROUP: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
MANY = [stored(1)] * 65_537
LEFT_OUT = {"type": "BlockStored", "block_hashes": [2], "token_ids": [1, 2], "block_size": 2}
BARE = [{"type": "AllBlocksCleared"}, {"type": "BlockStored", "block_hashes": [7]}]
LEFT = removed(1, remaining_copy_counts=[1])

CASES: dict[str, tuple[list[Frames], list[Frames]]] = {
    "1.2": ([message(0)], [message(0), message(1, rank=1)]),
    "2.1": ([message(0)], [message(0)[:2]]),
    "2.2": ([message(0), batch_with_long_seq(1)], [[b"", bytes(4), b""]]),
    "2.3": ([message(0), message(1)], [message(0), message(1, topic=b"other")]),
    "3.1": ([message(0), message(1)], [message(0, A), message(1, B), message(0, A)]),
    "3.3": ([message(4), message(0, A)], [message(0, A), message(4), message(2, B)]),
    "6.1": ([message(0, rank=None)], [raw(0, pack([1.5, []]))]),
    "6.2": ([message(0, A)], [message(0, ["BlockStored", [1], None, [1, 2], 2])]),
    "6.3": ([message(0, A, B)], [message(0, A, LEFT_OUT)]),
    "6.4": ([message(0, A)], [message(0, *BARE)]),
    "6.5": ([message(0, A)], [message(0, stored(1, token_ids=[1]))]),
    "6.6": ([message(0, stored(-5), stored(2**64 - 1))], [message(0, A, stored(bytes(range(32))))]),
    "6.7": ([message(0, A), message(1, A)], [message(0, A, B, stored(3), stored(2, parent=3))]),
    "6.8": ([message(0, A), message(0, stored(2), A)], [message(3, A), message(0, stored(9, token_ids=[10, 11]))]),
    "6.9": ([message(0, stored(1, token_ids=[[1, 2], [2, 3]]))], [message(0, stored(1, token_ids=[-1, 2]))]),
    "6.11": ([message(0, A, B)], [message(0, B)]),
    "6.12": ([message(0, A, B, removed(2, 1))], [message(0, A, B, removed(1))]),
    "7.1": ([message(0, A, removed(1))], [message(0, A, removed(1), removed(1))]),
    "7.2": ([message(0, A, A, LEFT)], [message(0, A, A, removed(1))]),
    "8.1": ([message(0, stored(1, **GROUP))], [message(0, stored(1, kv_cache_spec_kind="sliding_window"))]),
    "8.2": ([message(0, A)], [message(0, A, stored(2, size=4))]),
    "9.1": ([message(0, stored(1, medium="disk"))], [message(0, stored(1, medium="cloud"))]),
    "9.2": ([message(0, A, CPU, removed(1))], [message(0, CPU, removed(1))]),
    "10.1": ([message(0), message(1)], [message(0), message(1, rank=None)]),
    "11.1": ([message(0, A, CPU, CLEARED), message(1, B)],
             [message(0, A, CPU, CLEARED), message(1, removed(1, medium="CPU"))]),
    "11.3": ([message(0, CLEARED)], [message(0, A)]),
    "12.1": ([message(0)], [message(0, *MANY)]),
    "12.3": ([message(0, stored(1, lora_id=3))], [message(0, stored(1, group_idx=-1))]),
}  # fmt: skip


@pytest.mark.parametrize("number", CASES)
def test_the_judge_recognizes_kept_and_broken_clauses(number):
    kept, broken = CASES[number]
    assert outcome_of(number, *kept)[0] is KEPT
    assert outcome_of(number, *broken)[0] is BROKEN


@pytest.mark.parametrize(
    ("number", "level", "messages"),
    [
        ("7.1", Level.SHOULD, [message(0, A, A)]),
        ("7.1", Level.MUST, [message(0, A, A, removed(2), removed(9))]),
        ("6.12", Level.SHOULD, [message(0, A, B, removed(1))]),
        ("6.12", Level.MUST, [message(0, A, B, removed(1), {"type": "BlockRemoved"})]),
        ("8.1", Level.SHOULD, [message(0, stored(1, group_idx=0))]),
        ("2.3", Level.SHOULD, [message(0), message(1, topic=b"x")]),
    ],
)
def test_a_broken_must_outweighs_a_broken_should(number, level, messages):
    assert outcome_of(number, *messages) == (BROKEN, level)


def test_a_verdict_has_the_bytes_that_break_the_clause():
    verdict = verdicts_of(message(0, A), message(1, stored(7, medium="cloud")))["9.1"]
    assert verdict.message == "event 0 of batch 1 is on 'cloud'"
    assert [msgspec.msgpack.decode(each.data)["medium"] for each in verdict.evidence] == ["cloud"]


def test_the_judge_judges_a_stream_that_it_joined_late_from_the_next_clear():
    late = [message(5, B, removed(1), removed(2), removed(8))]
    found = verdicts_of(*late)
    assert {found[each].outcome for each in ("6.11", "6.12", "7.1", "11.3")} == {NOT_SEEN}
    assert outcome_of("7.1", *late, message(6, CLEARED, removed(8))) == (BROKEN, Level.MUST)


def test_a_gap_is_no_verdict_without_a_replay():
    found = verdicts_of(message(0, A), message(3, removed(1), removed(9)))
    assert found["3.1"].outcome is NOT_SEEN
    assert "2 numbers are missing" in found["3.1"].message
    assert found["7.1"].outcome is NOT_SEEN


def test_the_first_seq_after_a_lost_connection_does_not_show_a_new_epoch():
    assert outcome_of("3.3", message(0, A), message(4), message(2, B), connected=False)[0] is NOT_SEEN


def test_the_same_batch_after_a_reconnection_belongs_to_a_new_epoch():
    judge = EngineJudge()
    judge.take(Message(b"", 0, message(0, A)[2]))
    judge.reconnected(None)
    judge.take(Message(b"", 0, message(0, A)[2]))
    found = {str(each.clause): each.outcome for each in judge.verdicts()}
    assert (found["3.1"], found["3.3"], judge.restarts) == (NOT_SEEN, KEPT, 1)


def test_two_publishers_at_one_endpoint_have_separate_seqs_by_topic():
    found = verdicts_of(
        message(0, A, topic=b"a"), message(0, A, topic=b"b"), message(1, topic=b"a"), message(1, topic=b"b")
    )
    assert {found[each].outcome for each in ("2.3", "3.1")} == {KEPT}


def test_a_clear_of_one_medium_clears_only_this_medium():
    found = verdicts_of(message(0, A, CPU, {"type": "AllBlocksCleared", "medium": "CPU"}, removed(1)), message(1, CPU))
    assert found["7.1"].outcome is KEPT


@pytest.mark.parametrize(
    ("passed", "batch", "outcome"),
    [(1.0, message(1), KEPT), (3.0, message(1), BROKEN), (1.0, message(1, B), NOT_SEEN), (0.1, message(1), NOT_SEEN)],
)
def test_the_judge_judges_the_time_between_two_batches(passed, batch, outcome):
    judge = EngineJudge()
    for frames in (message(0, A), batch):
        judge.take(Message(frames[0], int.from_bytes(frames[1], "big"), frames[2]))
        if frames is not batch:
            judge.silence.passed(passed)
    assert {str(each.clause): each.outcome for each in judge.verdicts()}["3.6"] is outcome


def answered(*frames: Frames, start: int = 0, **more: Any) -> dict[str, Verdict]:
    answer = Answer(start, **more)
    for each in frames:
        answer.add(each)
    judge = EngineJudge()
    judge.answer(answer)
    return {str(each.clause): each for each in judge.verdicts()}


def replay_message(seq: int, *events: Any) -> Frames:
    return [b"", *message(seq, *events)]


@pytest.mark.parametrize(
    ("number", "kept", "broken"),
    [
        ("4.2", [replay_message(0, A), replay_message(1), END], [[b"", *message(0)[1:]], [b"", b"\xff" * 8, b""]]),
        ("4.2", [END], [[b"", b"topic", b"\xff" * 8, b""]]),
        ("4.2", [replay_message(0), END], [replay_message(1), replay_message(0), END]),
        ("4.3", [END], [replay_message(0)]),
        ("4.3", [END], []),
        ("4.4", [replay_message(0), replay_message(1), END], [replay_message(0), replay_message(2), END]),
        (
            "4.4",
            [replay_message(7, CLEARED, A), replay_message(8), END],
            [replay_message(7, A), replay_message(8), END],
        ),
        ("4.6", [*(replay_message(n, A) for n in range(1000)), END], [*(replay_message(n) for n in range(1000)), END]),
    ],
)
def test_the_judge_recognizes_kept_and_broken_clauses_in_a_replay_answer(number, kept, broken):
    assert answered(*kept)[number].outcome is KEPT
    assert answered(*broken)[number].outcome is BROKEN


def test_the_judge_reports_the_same_for_an_empty_replay_answer_and_no_replay():
    for found in (answered(END), verdicts_of(message(0, A))):
        assert found["4.4"].message == "no replay answer had a batch (--replay-endpoint)"


@pytest.mark.parametrize(
    ("first", "outcome"), [(message(1, CLEARED, A), KEPT), (message(1, A), BROKEN), (message(1), BROKEN)]
)
def test_a_new_epoch_must_begin_with_a_clear_after_a_subscription(first, outcome):
    judge = EngineJudge()
    answer = Answer(0)
    for frames in (replay_message(0), END):
        answer.add(frames)
    judge.begin(answer)
    found = there(judge.parse(first))
    judge.welcome(found)
    judge.take(found)
    for _ in range(2):  # asking for the verdicts twice gives the same result
        verdict = {str(each.clause): each for each in judge.verdicts()}["11.3"]
        assert (verdict.outcome, verdict.level) == (outcome, Level.SHOULD)


def test_a_reset_at_the_time_of_a_subscription_is_not_a_new_epoch():
    judge = EngineJudge()
    found = there(judge.parse(message(7, CLEARED)))
    judge.welcome(found)
    judge.take(found)
    assert {str(each.clause): each.outcome for each in judge.verdicts()}["11.3"] is NOT_SEEN


def test_a_gap_in_a_replay_answer_to_a_slow_requester_is_a_loss():
    found = answered(replay_message(0), replay_message(2), END, slow=True)
    assert (found["4.3"].outcome, found["4.4"].outcome) == (BROKEN, NOT_SEEN)


def test_a_replay_answer_that_begins_late_without_a_clear_breaks_a_should():
    assert answered(replay_message(7, A), END)["4.4"].level is Level.SHOULD


def test_a_replay_answer_fills_a_gap_or_shows_an_unsent_seq():
    for has, outcome in (([1, 2, 3], KEPT), ([1, 3], BROKEN)):
        judge = EngineJudge()
        judge.take(Message(b"", 0, message(0, A)[2]))
        late = Message(b"", 3, message(3)[2])
        assert judge.gap_before(late) == 1
        answer = Answer(1)
        for number in has:
            answer.add(replay_message(number))
        answer.add(END)
        judge.fill(late, answer)
        judge.take(late)
        assert {str(each.clause): each.outcome for each in judge.verdicts()}["3.1"] is outcome


def test_a_block_under_two_owners_is_stored_and_removed_twice() -> None:
    owned = stored(1, medium="CPU", ownership="kvcr")
    gone = removed(1, medium="CPU"), removed(1, medium="CPU", ownership="kvcr")
    assert outcome_of("7.1", message(0, CPU, owned, *gone))[0] is KEPT
    assert outcome_of("7.2", message(0, CPU, owned, *gone))[0] is NOT_SEEN
    verdict = verdicts_of(message(0, owned, removed(1, medium="CPU")))["9.2"]
    assert verdict.outcome is BROKEN
    assert "another locality or owner" in verdict.message
