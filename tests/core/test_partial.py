"""Tests for the state `partial` of a source, in which kvbus may lack blocks of the engine: its reasons, its begin and
its end.

The state is the same after a restart from the write-ahead log.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from kvbus.core.checkpoint import Loader, dump
from kvbus.core.events import BatchReceived
from kvbus.core.findings.source import source_findings
from kvbus.core.relay import SLICE, Relay
from kvbus.core.types import Reason
from kvbus.core.write_ahead_log import Records, decode_records
from tests.core.dsl import Happens, Script, down, live, raw, replay_end, replayed, tick, up
from tests.doubles.payloads import batch, cleared, removed, store

HOST = "CPU_PINNED"
WALL = 1_700_000_000.0


class LoggedScript(Script):
    """A test's conversation with a relay (see `Script`). This relay writes a write-ahead log."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        super().__init__(**options)
        self.saved = list(dump(self.relay))
        self.relay.records = Records()

    def hear(self, *happens: Happens) -> LoggedScript:
        """Give the relay these events, and accept all its commands."""
        for each in happens:
            self >> each
            self.whatever()
        return self

    def resumed(self, *, checkpoint: bool = False) -> Relay:
        """Return the relay of a new process, which loads the checkpoint that was made at the script's start, and then
        applies this relay's write-ahead log.

        With ``checkpoint``, the new process loads a checkpoint of the present state instead, and applies no log.
        """
        assert self.relay.records is not None
        body, payloads = self.relay.records.take()
        log = [] if checkpoint else decode_records(body, b"".join(payloads))
        assert log is not None
        relay = Script(**self.options).relay
        loader = Loader(relay)
        for blob in dump(self.relay) if checkpoint else self.saved:
            loader.feed(blob)
        for record in log:
            relay.apply_record(record, self.now)
        relay.recovery_finished(self.now)
        return relay

    def is_the_same_after_a_restart(self, *, checkpoint: bool) -> None:
        mine = self.source
        theirs = self.resumed(checkpoint=checkpoint).sources[0]
        assert theirs.partial == mine.partial
        assert theirs.partial_since == mine.partial_since
        assert theirs.lost == mine.lost
        assert theirs.sequencer.history.first == mine.sequencer.history.first
        assert theirs.normalizer.dump()["media"] == mine.normalizer.dump()["media"]
        assert theirs.normalizer.clears.empty == mine.normalizer.clears.empty


def older_than_kvbus(*first: Any, **options: Any) -> LoggedScript:
    """Return the script of an engine whose replay buffer begins at batch 100."""
    script = LoggedScript(replay=True, **options)
    script.hear(up(), replayed(100, *(first or [store([1])])), replay_end(), tick(0.1, WALL))
    return script


restarts = pytest.mark.parametrize("checkpoint", [False, True], ids=["log", "checkpoint"])


STORES = {
    Reason.MISSING_FIELD: {"type": "BlockStored", "block_hashes": [5], "token_ids": [1]},
    Reason.WRONG_TYPE: store([5]) | {"block_size": "16"},
    Reason.INTEGER_RANGE: store([5], group=-1),
    Reason.TOKEN_RANGE: store([5], tokens=[-1] * 16),
    Reason.TOKEN_COUNT: store([5], tokens=[1] * 15),
    Reason.HASH_KIND: store([b"x" * 32]),
    Reason.BLOCK_SIZE: store([5, 6], block_size=7),
    Reason.DUPLICATE_HASH: store([5, 5]),
    Reason.SELF_PARENT: store([5], 5),
    Reason.UNKNOWN_MEDIUM: store([5], medium="HBM"),
    Reason.TOO_MANY_GROUPS: store([5], group=3),
    Reason.TOO_MANY_OWNERS: store([5], ownership="b"),
}
"""For each reason to refuse a store, a store that is refused for it."""

LIMITS: dict[Reason, dict[str, int]] = {
    Reason.TOO_MANY_GROUPS: {"max_groups": 1},
    Reason.TOO_MANY_OWNERS: {"max_owners": 0},
}
"""For the reasons that are limits, the setting of a source with which the store is refused."""


def partial(script: Script) -> bool:
    """Return whether a finding says that kvbus lacks blocks of the source."""
    return any(each.text.startswith("partial: ") for each in source_findings(script.source))


class TestFindings:
    def finding_of(self, script: Script) -> tuple[str, str]:
        (found,) = [each for each in source_findings(script.source) if each.text.startswith("partial: ")]
        return found.text.removeprefix("partial: "), found.remedy

    def test_the_finding_names_trimmed_batches(self):
        script = older_than_kvbus()
        assert script.source.partial_since == WALL
        reason, heals = self.finding_of(script)
        assert reason == "batches 0 to 99 were trimmed from the engine's replay buffer before kvbus asked for them"
        assert heals.startswith("the finding ends when the engine restarts, or its cache is reset (vLLM: POST")

    def test_the_finding_warns_if_a_reset_leaves_other_tiers_unknown(self):
        script = older_than_kvbus(store([1]), store([2], medium=HOST))
        assert "leaves its other tiers unknown" in self.finding_of(script)[1]
        script = older_than_kvbus(store([1]), store([2], medium=HOST), clears="all")
        assert "other tiers" not in self.finding_of(script)[1]

    def test_the_finding_counts_lost_batches(self):
        script = LoggedScript(reorder_grace=0.2).hear(live(0), live(4), tick(0.3, WALL))
        assert self.finding_of(script)[0] == "3 batches were lost and not recoverable before 4"
        script.hear(live(6), tick(0.3, WALL + 1))
        assert self.finding_of(script)[0] == "4 batches were lost and not recoverable before 6"
        assert script.source.partial_since == WALL

    def test_the_finding_names_an_engine_that_answers_no_replay(self):
        script = LoggedScript(replay=True).hear(up(), live(7, store([1])), tick(3), tick(3, WALL))
        reason, heals = self.finding_of(script)
        assert reason == "batches 0 to 6 were missing, and the engine has not answered a replay request so far"
        assert heals.startswith(
            "the finding ends when the engine answers a replay request (kvbus repeats it), or when the engine restarts"
        )

    def test_the_finding_names_a_missing_replay_endpoint(self):
        script = LoggedScript().hear(up(), live(7, store([1])))
        reason, _ = self.finding_of(script)
        assert reason == (
            "batches 0 to 6 were sent while kvbus was not connected, "
            "and without a replay_endpoint kvbus cannot request lost batches"
        )
        script.hear(down(), up())
        said = (
            "something may have been sent while kvbus was not connected, "
            "and without a replay_endpoint kvbus cannot request lost batches"
        )
        assert self.finding_of(script)[0] == said

    def test_the_finding_names_the_limits_of_a_full_index(self):
        script = LoggedScript(max_blocks=1).hear(up(), live(0, store([1])), live(1, store([2])), tick(0.1, WALL))
        reason, _ = self.finding_of(script)
        assert reason == (
            "the index is full: kvbus refuses blocks beyond limits.max_blocks (1), limits.max_index_bytes "
            "(4,294,967,296) or limits.max_groups (64)"
        )

    @pytest.mark.parametrize("reason", STORES)
    def test_the_finding_names_the_reason_of_a_refused_store(self, reason: Reason):
        """A refused store makes its source partial, because the engine holds a block that routers do not get."""
        script = LoggedScript(**LIMITS.get(reason, {}))
        script.hear(up(), live(0, *[store([n, n + 1]) for n in range(20, 40, 2)]), live(1, STORES[reason]))
        assert script.stats.rejected == {reason: 1}
        said, heals = self.finding_of(script)
        assert heals.startswith(("wait: the finding ends when the engine restarts", "raise the limit"))
        if reason not in LIMITS:
            assert said == f"the blocks of refused stores are missing (reason {reason}, see docs/PROTOCOL.md)"
        script.hear(live(2, cleared()), tick(0.1))
        assert script.source.partial is (reason is Reason.UNKNOWN_MEDIUM), "a tier nobody knows of is not cleared"
        script.hear(live(3, cleared(), cleared()), tick(0.1))
        assert not script.source.normalizer.refused

    @restarts
    def test_the_finding_names_the_reason_of_a_refused_batch(self, checkpoint: bool):
        script = LoggedScript().hear(
            up(), live(0, store([1])), raw(b"", (1).to_bytes(8, "big"), b"\xc1"), tick(0.1, WALL)
        )
        assert "not_msgpack" in self.finding_of(script)[0]
        script.is_the_same_after_a_restart(checkpoint=checkpoint)

    def test_the_finding_about_several_publishers_replaces_partial(self):
        script = LoggedScript().hear(up(), *(live(0, store([n])) for n in range(1, 8)))
        assert [each.id for each in source_findings(script.source)] == ["conflict"]

    def test_the_finding_names_a_tier_that_appears_after_a_reset(self):
        script = older_than_kvbus().hear(live(101, cleared()), live(102, store([2], medium=HOST)), tick(1, WALL + 1))
        reason, heals = self.finding_of(script)
        assert reason == (
            "the engine named a tier for the first time after a reset of its cache, and kvbus does not know the blocks that "
            "this tier held before"
        )
        assert "leaves its other tiers unknown" in heals


class TestSince:
    @restarts
    def test_a_complete_new_epoch_ends_partial(self, checkpoint: bool):
        script = older_than_kvbus().hear(live(0, store([9])), replay_end(), tick(1, WALL + 1))
        assert not script.source.partial
        assert script.source.partial_since is None
        script.is_the_same_after_a_restart(checkpoint=checkpoint)


def emptied(script: LoggedScript, seq: int, checkpoint: bool) -> bool:
    """Send a clear, and return whether the source is no longer `partial` after it.

    Check that the relay, and a relay that restarts from its write-ahead log, agree.
    """
    script.hear(live(seq, cleared()), live(seq + 1, store([21, 22])), tick(0.1, WALL + 9))
    assert script.source.partial == (script.source.partial_since is not None) == partial(script)
    script.is_the_same_after_a_restart(checkpoint=checkpoint)
    if not script.source.partial:
        assert {block for _, _, block in script.router.blocks} == {21, 22}
    return not script.source.partial


@restarts
class TestAClear:
    def test_a_clear_ends_partial_if_the_engine_has_named_only_its_device(self, checkpoint: bool):
        assert emptied(older_than_kvbus(), 101, checkpoint)

    def test_a_clear_ends_partial_before_the_engine_has_answered(self, checkpoint: bool):
        script = LoggedScript(replay=True).hear(up(), live(7, store([1])), tick(3), tick(3))
        assert script.source.sequencer.history.pending
        assert emptied(script, 8, checkpoint)
        assert script.source.sequencer.history.pending, "what it still has tells what tiers there are"

    def test_a_clear_of_every_tier_ends_the_pending_history_request(self, checkpoint: bool):
        script = LoggedScript(replay=True, clears="all").hear(up(), live(7, store([1])), tick(3), tick(3))
        assert emptied(script, 8, checkpoint)
        assert not script.source.sequencer.history.pending

    @pytest.mark.parametrize(
        "spoken",
        [
            [store([1]), store([2], medium=HOST)],
            [store([1]), store([2], medium=HOST), removed([2], medium=HOST)],
            [removed([2], medium=HOST)],
            [store([2], tokens=[], block_size=0, medium=HOST)],
            [store([2], medium=HOST, group=1, kv_cache_spec_kind="sliding_window")],
            [store([2], medium="a tier of its own")],
        ],
        ids=["live", "gone", "unknown", "tokenless", "left out", "no medium we know"],
    )
    def test_a_clear_does_not_end_partial_if_another_tier_had_blocks(self, spoken: Iterable[Any], checkpoint: bool):
        """vLLM's clear empties only the device. If another tier had blocks before, the source stays ``partial``."""
        assert not emptied(older_than_kvbus(*spoken), 101, checkpoint)

    def test_a_source_is_partial_again_when_another_tier_appears_after_a_clear(self, checkpoint: bool):
        """After a clear, the first event of another tier makes the source partial again: the tier may have held
        blocks before.
        """
        script = older_than_kvbus()
        assert emptied(script, 101, checkpoint)
        script = older_than_kvbus().hear(live(101, cleared()), tick(0.1, WALL + 1))
        script.hear(live(102, store([2], medium=HOST)), tick(0.1, WALL + 2))
        assert script.source.partial
        assert script.source.partial_since == WALL + 2
        script.is_the_same_after_a_restart(checkpoint=checkpoint)

    def test_a_new_tier_after_a_clear_does_not_make_a_complete_source_partial(self, checkpoint: bool):
        script = LoggedScript().hear(
            up(), live(0, store([1])), live(1, cleared()), live(2, store([2], medium=HOST)), tick(0.1)
        )
        assert not script.source.partial
        script.is_the_same_after_a_restart(checkpoint=checkpoint)

    def test_a_clear_ends_partial_with_the_setting_clears_all(self, checkpoint: bool):
        script = older_than_kvbus(store([1]), store([2], medium=HOST), clears="all")
        assert emptied(script, 101, checkpoint)

    def test_the_empty_mark_of_a_clear_ends_with_its_epoch(self, checkpoint: bool):
        script = LoggedScript(replay=True).hear(up(), replayed(0, cleared(), store([1])), replay_end(), tick(0.1, WALL))
        assert script.source.normalizer.clears.empty
        script.hear(live(0, store([1]), store([2], medium=HOST)), replay_end())
        assert not script.source.normalizer.clears.empty
        script.is_the_same_after_a_restart(checkpoint=checkpoint)

    def test_a_queued_clear_of_the_old_epoch_does_not_end_partial_in_the_next(self, checkpoint: bool):
        """A clear of the old epoch does not end `partial` in the next epoch.

        kvbus has received the clear, but has not applied it yet when the next epoch begins.
        """
        script = LoggedScript(reorder_grace=10)
        last = 2 + SLICE + 20
        script.hear(live(0, store([1])), *(live(seq, store([seq])) for seq in range(2, last)), live(last, cleared()))
        script.hear(live(1, store([999])))
        assert script.relay.backlog
        script.hear(Happens("the next epoch", lambda _: BatchReceived(0, batch(5, store([5000])))))
        script.hear(tick(0.1, WALL), tick(0.1, WALL))
        assert not script.relay.backlog
        assert script.source.partial
        assert script.source.sequencer.epoch == 1
        assert script.source.sequencer.history.first == 5
        script.is_the_same_after_a_restart(checkpoint=checkpoint)


@pytest.mark.parametrize("events", [[cleared(), store([1])], [store([1])]])
@pytest.mark.parametrize("tiers", [False, True])
def test_a_state_in_a_late_replay_answer_ends_partial(events: list[Any], *, tiers: bool) -> None:
    """A state in a later replay answer makes a `partial` source complete, even after kvbus gave up requesting older
    batches.

    Another kvbus, from which this kvbus reads, sends such a state. A usual batch is not a state. Nor is a batch with a
    clear that leaves blocks on another tier.
    """
    script = LoggedScript(replay=True)
    script.hear(up(), live(7, store([7]), *[store([8], medium="CPU")] * tiers), tick(3), tick(3), tick(3))
    assert script.source.sequencer.history.unanswered
    whole = "AllBlocksCleared" in str(events) and not tiers
    for _ in range(1 + whole):
        script.hear(replayed(9, *events))
    script.hear(replay_end())
    assert script.source.partial is not whole
    assert script.stats.restarts == 0
    if whole:
        assert set(script.router.blocks) == {(None, "GPU", 1)}
