"""Answers that break off at a batch that is too large to be taken: it is lost, counted, and the rest is asked for."""

import pytest

from kvbus.core.events import Oversize, ReplayAborted
from kvbus.core.sequencing.actions import Ask, Lost
from kvbus.core.sequencing.phases import State
from kvbus.core.source_spec import ATTEMPTS
from kvbus.core.types import Reason
from tests.core.dsl import Script, ask, cancel, live, replay_aborted, replay_end, replayed, up
from tests.core.sequencing.script import SequencerScript, deliver, in_sync, lost


def test_the_batch_behind_the_last_one_is_lost_and_the_rest_recovered():
    script = in_sync(2)
    (asked,) = script.after(live(5))
    assert isinstance(asked, Ask)
    script.after(replayed(0), replayed(1))  # the answer overlaps what is known, and breaks off at 2
    said = script.after(replay_aborted())
    assert lost(1) in said
    assert any(isinstance(action, Ask) for action in said)
    script.after(replayed(3), replayed(4))
    script.after(replay_end())
    assert script.sequencer.next == 6
    assert (script.stats.missing, script.stats.recovered, script.stats.lost) == (3, 2, 1)
    assert script.sequencer.partial
    assert script.sequencer.state is State.LIVE


def test_a_batch_that_waited_behind_the_one_that_is_too_large_is_delivered_at_once():
    script = in_sync(2)
    script.after(live(3), replayed(0), replayed(1))
    said = script.after(replay_aborted())
    assert said[said.index(lost(1)) :][:2] == [lost(1), *deliver(3)]


def test_at_the_start_nothing_is_missing_that_nobody_had_shown():
    script = SequencerScript()
    script.after(up())
    script.after(replayed(0), replayed(1))
    said = script.after(replay_aborted())
    assert lost(1) in said
    script.after(replayed(3))
    script.after(replay_end())
    assert script.sequencer.next == 4
    assert script.sequencer.partial
    assert script.stats.missing == script.stats.lost == 0  # history kvbus never saw; the rejection is counted


def test_an_answer_that_breaks_off_at_once_twice_is_given_up():
    """A trimmed history that begins with such a batch: nobody knows its number, and it is not guessed for ever."""
    script = SequencerScript()
    script.after(up())
    asked = 0
    while script.sequencer.state is not State.LIVE:
        script.after(replay_aborted())
        asked += 1
        assert asked < 6
    script.after(live(900))
    assert script.sequencer.next in (0, 1, 2, 901)


def test_what_the_live_stream_has_brought_is_not_the_batch_that_is_too_large():
    """The publisher's ROUTER dropped batch 1 at its high-water mark; batch 2 is too large."""
    script = SequencerScript()
    script.after(up(), replayed(0), live(1))
    said = script.after(replay_aborted())
    assert not any(isinstance(action, Lost) for action in said)
    script.after(live(3), *[each for _ in range(ATTEMPTS) for each in (replayed(0), replayed(1), replay_end())])
    assert script.delivered == [script.payload(seq) for seq in (0, 1, 3)]
    assert (script.stats.missing, script.stats.lost) == (1, 1)
    assert not script.sequencer.held


def test_a_snapshot_that_is_too_large_is_no_lost_batch():
    script = SequencerScript(snapshot=True)
    script.after(up())
    assert script >> replay_aborted() << cancel() << ask(0)
    script.after(*map(replayed, range(3)), replay_end())
    assert script.delivered == [script.payload(seq) for seq in range(3)]
    assert not script.sequencer.partial


def test_an_old_answer_that_breaks_off_is_nobodys():
    script = in_sync(2)
    assert script >> replay_aborted(request=999)
    assert script.stats.stale_replies == 1


@pytest.mark.parametrize("event", [Oversize(0), ReplayAborted(0, 1)])
def test_a_frame_over_the_limit_is_a_rejection(event):
    script = Script(replay=True)
    script.relay.handle(event, 1.0)
    assert script.relay.sources[0].stats.rejected == {Reason.FRAME_SIZE: 1}
