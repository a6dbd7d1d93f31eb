"""Tests for a replay answer that breaks off at an oversized batch.

kvbus counts this batch as lost and requests the batches after it.
"""

import pytest

from kvbus.core.events import ReplayAborted, StreamBroken
from kvbus.core.findings.source import source_findings
from kvbus.core.sequencing.actions import Ask
from kvbus.core.sequencing.phases import State
from kvbus.core.types import Reason
from tests.core.dsl import Script, ask, cancel, live, replay_aborted, replay_end, replayed, up
from tests.core.sequencing.script import SequencerScript, in_sync, lost


def test_an_aborted_replay_loses_the_oversized_batch_only():
    script = in_sync(2)
    (asked,) = script.after(live(5))
    assert isinstance(asked, Ask)
    script.after(replayed(0), replayed(1))  # the answer repeats two batches, and breaks off at batch 2
    said = script.after(replay_aborted())
    assert lost(1) in said
    assert any(isinstance(action, Ask) for action in said)
    script.after(replayed(3), replayed(4))
    script.after(replay_end())
    assert script.sequencer.next == 6
    assert (script.stats.missing, script.stats.recovered, script.stats.lost) == (3, 2, 1)
    assert script.sequencer.partial
    assert script.sequencer.state is State.LIVE


def test_an_oversized_snapshot_does_not_count_as_a_lost_batch():
    script = SequencerScript(snapshot=True)
    script.after(up())
    assert script >> replay_aborted() << cancel() << ask(0)
    script.after(*map(replayed, range(3)), replay_end())
    assert script.delivered == [script.payload(seq) for seq in range(3)]
    assert not script.sequencer.partial


@pytest.mark.parametrize("event", [StreamBroken(0, Reason.FRAME_SIZE), ReplayAborted(0, 1)])
def test_an_oversized_frame_counts_as_rejected(event):
    script = Script(replay=True)
    script.relay.handle(event, 1.0)
    assert script.relay.sources[0].stats.rejected == {Reason.FRAME_SIZE: 1}


@pytest.mark.parametrize(
    ("reason", "finding"),
    [
        (Reason.FRAME_SIZE, "frame_too_large"),
        (Reason.MESSAGE_SIZE, "message_too_large"),
        (Reason.ZMTP, "zmtp_broken"),
    ],
)
def test_a_finding_names_why_the_connection_was_closed(reason, finding):
    script = Script(replay=True)
    script.relay.handle(StreamBroken(0, reason), 1.0)
    assert script.relay.sources[0].stats.rejected == {reason: 1}
    assert finding in [each.id for each in source_findings(script.source)]
