"""Answers that break off at a batch that is too large to be taken: it is lost, counted, and the rest is asked for."""

import pytest

from kvbus.core.events import Oversize, ReplayAborted
from kvbus.core.sequencing.settings import State
from kvbus.core.types import Reason
from tests.core.dsl import Script
from tests.core.sequencing.line import Line, synced


def cut(line):
    line.sequencer.replay_aborted(line.request, line.now)
    return line.done()


def test_the_batch_behind_the_last_one_is_lost_and_the_rest_recovered():
    line = synced(2)
    said = line.live(5)
    assert said[0].startswith("ask ")
    line.replayed(0, 1)  # the answer overlaps what is known, and breaks off at 2
    said = cut(line)
    assert "lost 1" in said
    assert [word for word in said if str(word).startswith("ask ")]
    line.replayed(3, 4)
    line.end()
    assert line.sequencer.next == 6
    assert (line.stats.missing, line.stats.recovered, line.stats.lost) == (3, 2, 1)
    assert line.sequencer.partial
    assert line.sequencer.state is State.LIVE


def test_at_the_start_nothing_is_missing_that_nobody_had_shown():
    line = Line()
    line.up()
    line.replayed(0, 1)
    said = cut(line)
    assert "lost 1" in said
    line.replayed(3)
    line.end()
    assert line.sequencer.next == 4
    assert line.sequencer.partial
    assert line.stats.missing == line.stats.lost == 0  # history kvbus never saw; the rejection is counted


def test_an_answer_that_breaks_off_at_once_twice_is_given_up():
    """A trimmed history that begins with such a batch: nobody knows its number, and it is not guessed for ever."""
    line = Line()
    line.up()
    asked = 0
    while line.sequencer.state is not State.LIVE:
        cut(line)
        asked += 1
        assert asked < 6
    line.live(900)
    assert line.sequencer.next in (0, 1, 2, 901)


def test_an_old_answer_that_breaks_off_is_nobodys():
    line = synced(2)
    line.sequencer.replay_aborted(999, line.now)
    assert line.stats.stale_replies == 1
    assert line.done() == []


@pytest.mark.parametrize("event", [Oversize(0), ReplayAborted(0, 1)])
def test_a_frame_over_the_limit_is_a_rejection(event):
    script = Script(replay=True)
    script.relay.handle(event, 1.0)
    assert script.relay.sources[0].stats.rejected == {Reason.FRAME_SIZE: 1}
