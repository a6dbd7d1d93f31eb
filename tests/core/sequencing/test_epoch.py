"""What is known of one epoch."""

from collections import deque

import pytest

from kvbus.core.sequencing.actions import Action, Deliver, Lost, LostReason
from kvbus.core.sequencing.epoch import FAR, Epoch
from kvbus.core.sequencing.settings import Settings
from kvbus.core.source_stats import SourceStats


def made(**settings):
    actions: deque[Action] = deque()
    stats = SourceStats()
    return Epoch(Settings(**settings), stats, actions), actions, stats


def begun(count, **settings):
    """An epoch in sync of which so many batches were delivered."""
    epoch, actions, stats = made(**settings)
    for seq in range(count):
        epoch.restore_batch(seq, b"%d" % seq)
    return epoch, actions, stats


def test_a_late_beginning_is_partial():
    epoch, _, stats = made()
    epoch.baseline(7)
    assert epoch.backfill.partial
    assert (epoch.backfill.first, epoch.tracker.next) == (7, 7)
    epoch.open()
    assert stats.missing == 0


def test_a_snapshot_covers_it():
    epoch, _, _ = made()
    epoch.baseline(7)
    epoch.cover(9)
    assert not epoch.backfill.partial
    assert epoch.tracker.next == 10


@pytest.mark.parametrize(("certain", "first"), [(True, 0), (False, 7)])
def test_an_emptied_cache_misses_nothing(certain, first):
    epoch, _, _ = made()
    epoch.baseline(7)
    epoch.emptied(certain=certain)
    assert not epoch.backfill.partial
    assert epoch.backfill.first == first


def test_a_gap_that_is_given_up_is_partial_from_the_batch_behind_it():
    epoch, actions, _ = begun(3)
    epoch.tracker.live_later(5, b"5")
    epoch.give_up()
    assert epoch.backfill.first == 5
    assert [type(action) for action in actions] == [Lost, Deliver]


def test_a_batch_that_cannot_be_had_is_lost_alone():
    epoch, actions, _ = begun(3)
    epoch.skip_lost()
    assert (epoch.backfill.first, epoch.tracker.next, epoch.aborted_at) == (4, 4, 4)
    assert list(actions) == [Lost(1)]


def test_requests_are_counted_for_each_gap():
    epoch, _, _ = begun(3)
    assert epoch.asks_for_gap()
    epoch.gap_attempts += 1
    assert not epoch.asks_for_gap()
    epoch.skip_lost()
    assert epoch.asks_for_gap()


def test_a_number_from_nowhere_is_far_once_something_is_known():
    assert not made()[0].is_far(FAR)
    epoch, _, stats = begun(3)
    assert epoch.is_far(FAR + 3)
    assert not epoch.is_far(FAR + 2)
    fresh, _, stats = made()
    fresh.tracker.live_later(FAR, b"")
    fresh.open()
    assert stats.rejected == {"seq_range": 1}


def test_it_survives_a_restart():
    epoch, _, _ = begun(3)
    epoch.buffer.keeps = True
    again = made()[0]
    again.load(epoch.dump())
    assert again.dump() == epoch.dump()
    again.restore_batch(5, b"5")
    assert again.backfill.first == 5
    again.recovery_finished()
    assert again.backfill.pending
    again.restore_snapshot(8)
    assert (again.tracker.next, again.backfill.partial) == (9, False)


@pytest.mark.parametrize("replay", [True, False])
def test_more_history_is_pending_only_where_it_can_be_asked_for(replay):
    epoch, _, _ = made(replay=replay)
    epoch.restore_batch(5, b"5")
    epoch.recovery_finished()
    assert epoch.backfill.pending is replay


def test_nothing_delivered_is_nothing_known():
    epoch, _, _ = made()
    epoch.restore_snapshot(-1)
    epoch.recovery_finished()
    assert not epoch.tracker.synced


def test_a_trimmed_history_begins_where_the_publishers_does():
    epoch, _, stats = begun(3)
    epoch.trimmed_before(9)
    assert (epoch.tracker.next, epoch.backfill.first) == (9, 9)
    assert stats.lost == 6


def test_what_nobody_confirmed_has_to_be_had_again():
    epoch, _, _ = begun(3)
    epoch.interrupted = True
    epoch.unconfirmed()
    assert not epoch.interrupted
    assert epoch.backfill.pending
    assert epoch.lost_because is LostReason.NO_ANSWER


def test_a_compacted_snapshot_proves_nothing_about_live_batches():
    epoch, _, _ = made(compacted=True)
    epoch.cover(9)
    assert epoch.tracker.answered_end == 10


@pytest.mark.parametrize(("replay", "reason"), [(True, LostReason.HOLE), (False, LostReason.NO_REPLAY)])
def test_a_loss_has_a_reason(replay, reason):
    epoch, actions, _ = begun(3, replay=replay)
    epoch.tracker.live_later(5, b"5")
    actions.clear()
    epoch.give_up()
    assert actions[0] == Lost(2, reason)
