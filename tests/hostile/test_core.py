"""Tests for bad input to kvbus's relay without I/O: kvbus counts the reason, and only the bad batch or event is
lost.
"""

from __future__ import annotations

import pytest

from kvbus.core.commands import RequestReplay
from kvbus.core.events import BatchReceived, ReplayReceived, Tick
from kvbus.core.types import Reason
from kvbus.core.wire.frames import END_SEQ
from tests.core.dsl import Script, live, raw, replay_end, tick, up
from tests.doubles.payloads import batch, payload, removed, store
from tests.hostile.bad import BATCHES, FIELDS, FRAMES, fields, with_field, without

BEFORE = [store([1, 2]), removed([2])]
AFTER = [store([3], 1), removed([1])]


def begun(**settings) -> Script:
    """Return a script whose relay has read the engine's history and relayed one batch, so that block 1 is live."""
    script = Script(**settings)
    script >> live(0, *BEFORE)
    script.whatever()
    script.stats.rejected.clear()
    return script


def say(script: Script, *happens) -> list:
    """Pass several inputs, such as received batches, to the relay, and return all resulting commands."""
    told = []
    for one in happens:
        script >> one
        told += script.whatever()
    return told


def goes_on(script: Script, seq: int = 1) -> None:
    """Check that the relay still relays: after the engine's next batch, the router has exactly the right blocks."""
    script >> live(seq, *AFTER)
    script.whatever()
    live_blocks = {block for _, _, block in script.router.blocks}
    assert 3 in live_blocks
    assert 1 not in live_blocks
    assert script.router.violations == []
    assert script.source.sequencer.pending == 0
    assert {block for table in script.source.normalizer.index.tables.values() for block in table.blocks} == live_blocks


@pytest.mark.parametrize("bad", BATCHES, ids=[bad.name for bad in BATCHES])
def test_a_bad_batch_is_counted_and_harms_no_other_batch(bad):
    script = begun()
    script >> raw(b"", (1).to_bytes(8, "big"), bad.payload)
    script.whatever()
    counted = {**script.stats.rejected, **script.stats.filtered}
    assert {reason: counted.get(reason, 0) for reason in bad.counted} == bad.counted
    assert sum(script.stats.rejected.values()) == sum(n for reason, n in bad.counted.items() if reason in set(Reason))
    goes_on(script, 2)
    assert script.stats.missing == 0


@pytest.mark.parametrize(("name", "frames", "reason"), FRAMES, ids=[name for name, *_ in FRAMES])
def test_a_bad_message_is_counted_and_harms_no_other_message(name, frames, reason):
    script = begun()
    script >> raw(*frames)
    assert script.whatever() == []
    assert script.stats.rejected == {reason: 1}
    goes_on(script)
    assert script.stats.missing == 0


@pytest.mark.parametrize(("field", "value", "form"), fields(), ids=lambda value: repr(value)[:20])
def test_an_event_with_a_field_of_a_wrong_type_is_counted(field, value, form):
    script = begun()
    bad = payload(store([904]), with_field(field, value, form), removed([904]))
    script >> raw(b"", (1).to_bytes(8, "big"), bad)
    script.whatever()
    # kvbus uses all of these fields except lora_name, which it only passes on and so never rejects.
    counted = script.stats.filtered if field == "lora_name" else script.stats.rejected
    assert sum(counted.values()) == 1, counted
    goes_on(script, 2)


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("field", FIELDS[:4])
def test_an_event_without_a_required_field_is_rejected(field, form):
    script = begun()
    script >> raw(b"", (1).to_bytes(8, "big"), payload(without(field, form)))
    script.whatever()
    optional = field == "parent_block_hash" and form == "map"  # SGLang omits null fields
    assert script.stats.rejected == ({} if optional else {Reason.MISSING_FIELD: 1})
    goes_on(script, 2)


def test_a_hash_with_other_tokens_counts_as_copy_and_collision():
    script = begun() >> live(1, store([1], tokens=[7] * 16))
    assert script.whatever() == []
    assert script.stats.rejected == {Reason.HASH_COLLISION: 1}
    script >> live(2, removed([1]))
    assert script.whatever() == []  # this removes the first of two copies
    goes_on(script, 3)


@pytest.mark.parametrize("length", [2, 3, 50])
def test_blocks_whose_parents_form_a_cycle_are_announced_once(length):
    """An engine sends blocks whose parents form a cycle. kvbus must finish the announcement of these blocks.

    Later batches must work as before.
    """
    ring = [store([100 + n], 100 + (n - 1) % length) for n in range(length)]
    script = begun() >> live(1, *ring)
    script.whatever()
    told = list(script.source.normalizer.announce())
    assert len(told) == length + 1
    script >> live(2, removed([100 + n for n in range(length)]))
    script.whatever()
    goes_on(script, 3)


@pytest.mark.slow
def test_an_event_with_a_million_hashes_is_stored_and_removed():
    """kvbus stores and removes a million blocks of one event in linear time. Each block has one token.

    It takes several ticks, so that the event loop is never blocked for long.
    """
    many = list(range(10_000, 1_010_000))
    script = begun(max_blocks=2_000_000)
    stored = store(many, tokens=[1] * len(many), block_size=1, group=7)
    for seq, (event, left) in enumerate([(stored, 1_000_001), (removed(many, group=7), 1)], 1):
        script.relay.handle(BatchReceived(0, batch(seq, event)), script.now)
        while script.relay.backlog:
            script.relay.handle(Tick(), script.now)
        assert len(script.source.normalizer.index) == left
    assert script.stats.rejected == {}


def test_a_full_index_counts_refused_blocks_and_stays_exact_for_its_blocks():
    script = begun(max_blocks=3)
    say(script, live(1, store([10, 11], 1)), live(2, store([12, 13], 11)))
    assert script.stats.rejected == {Reason.INDEX_FULL: 1}
    assert script.source.partial
    assert {block for _, _, block in script.router.blocks} == {1, 10, 11}
    say(script, live(3, removed([10, 11, 12, 13])))
    goes_on(script, 4)
    assert script.source.partial, "what was refused may be live in the engine"


def test_suppressed_coarse_blocks_count_towards_the_limit_of_blocks():
    script = begun(max_blocks=5, block_size=16)
    for n in range(6):
        script >> live(1 + n, store([50 + n], tokens=list(range(64)), block_size=64), store([200 + n], 1))
        script.whatever()
        assert script.source.normalizer.entries <= 5
    assert script.stats.rejected[Reason.INDEX_FULL] > 0


def test_a_topic_that_is_not_text_is_passed_on():
    script = begun() >> raw(b"\xff\xfe\x00", (1).to_bytes(8, "big"), payload(store([5])))
    (command,) = script.whatever()
    assert command.topic == b"\xff\xfe\x00"
    goes_on(script, 2)


def test_a_changed_rank_is_counted_and_routers_get_the_first_rank():
    script = begun()
    told = say(script, live(1, store([5]), rank=3), live(2, store([6], 5), rank=None), live(3, removed([5, 6]), rank=3))
    assert [command.payload[-1] for command in told] == [0, 0, 0]
    assert script.stats.filtered["other_rank"] == 2
    goes_on(script, 4)
    script.relay.handle(BatchReceived(0, batch(0, store([7]), rank=3)), script.now)
    assert script.source.rank == 3, "a new life may have another"


def test_an_endless_replay_is_cancelled_after_120_seconds():
    """An engine answers a replay request with more and more batches, but without END.

    After 120 s, kvbus cancels the request, and continues with the live stream: the source's state becomes ``live``.
    """
    script = Script(replay=True, probe_interval=1.0) >> up()
    script.whatever()
    seq = 0
    for _ in range(200):
        script.now += 1.0
        request = script.requests[0]
        script.relay.handle(ReplayReceived(0, request, [b"", seq.to_bytes(8, "big"), payload()]), script.now)
        script.relay.handle(Tick(), script.now)
        seq += 1
        if script.source.state == "live":
            break
    assert script.source.state == "live"
    assert 119 <= seq <= 122
    assert script.stats.replay_timeouts == 1


def test_a_replay_that_repeats_one_batch_forever_is_given_up():
    script = begun(replay=True, replay_timeout=2.0) >> live(5, store([9]))
    script.whatever()
    for _ in range(30):
        script.now += 0.5
        for event in (ReplayReceived(0, script.requests[0], [b"", *batch(0, *BEFORE)[1:]]), Tick()):
            for command in script.relay.handle(event, script.now):
                if isinstance(command, RequestReplay):
                    script.requests[0] = command.request
        if script.source.state == "live":
            break
    assert script.source.state == "live"
    assert script.stats.lost == 4
    assert script.source.sequencer.pending == 0


def test_replies_without_a_request_are_counted_and_change_nothing():
    script = begun(replay=True)
    script >> tick()
    script.whatever()
    for request in (0, 7, 2**40):
        for frames in ([b"", *batch(1, store([66]))[1:]], [b"", END_SEQ, b""], [b"", b"", END_SEQ, b""]):
            assert script.relay.handle(ReplayReceived(0, request, frames), script.now) == []
    assert script.stats.stale_replies == 9
    goes_on(script)


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [b"", b""], [b"", b"\0", b"x"], [b"x"] * 5, [b"", b"\x80" + bytes(7), b""], [b"x"] * 50_000],
    ids=["none", "one", "two", "short seq", "five", "below zero", "50,000"],
)
def test_a_bad_reply_is_counted_and_the_replay_continues(frames):
    script = Script(replay=True) >> up()
    script.whatever()
    script.relay.handle(ReplayReceived(0, script.requests[0], frames), script.now)
    assert sum(script.stats.rejected.values()) == 1
    script.relay.handle(ReplayReceived(0, script.requests[0], [b"", *batch(0, *BEFORE)[1:]]), script.now)
    script >> replay_end()
    script.whatever()
    assert script.source.state == "live"
    assert len(script.source.normalizer.index) == 1


def test_the_number_of_groups_in_the_index_is_bounded():
    """An engine sends events of ever new groups.

    The limit of blocks also limits the number of groups that kvbus keeps.
    """
    script = begun(max_blocks=100)
    for n in range(1000):
        script >> live(1 + n, store([10_000 + n], group=n), removed([10_000 + n], group=n))
        script.whatever()
    assert len(script.source.normalizer.index) == 1
    assert len(script.source.normalizer.index.tables) <= 1 + 1024
    goes_on(script, 1001)


def test_the_relay_recovers_from_every_batch_with_one_changed_byte():
    """kvbus survives each batch with one changed byte.

    It rejects or applies the batch, and its routers have the engine's blocks again in the next epoch.
    """
    good = payload(store([5, 6], 1), removed([5]))
    script = begun()
    for at in range(len(good)):
        for value in (0x00, 0xC1, 0xFF, good[at] ^ 0x80):
            bad = good[:at] + bytes([value]) + good[at + 1 :]
            script.relay.handle(BatchReceived(0, [b"", (1).to_bytes(8, "big"), bad]), script.now)
            script.now += 100.0  # so that restarts do not look like a conflict
            begin = batch(0, store([70, 71]), ts=float(at * 256 + value))
            script.relay.handle(BatchReceived(0, begin), script.now)
            assert len(script.source.normalizer.index) == 2
