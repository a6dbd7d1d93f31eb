"""Functions with which a test of a sequencer is written as a conversation: events, and the actions that must follow.

The functions for events have the names of those in :mod:`tests.core.dsl`. Some of the sequencer's actions cause no
command of the relay, such as a lost batch or the end of a catch-up. This module has functions that expect them.
"""

from __future__ import annotations

from typing import Any

from kvbus.core.events import (
    BatchReceived,
    RelayEvent,
    ReplayAborted,
    ReplayReceived,
    SnapshotReceived,
    SourceDown,
    SourceUp,
    Tick,
    Unread,
)
from kvbus.core.sequencing.actions import Ask, AskSnapshot, Deliver, Lost, NewEpoch, Synced
from kvbus.core.sequencing.phases import State
from kvbus.core.sequencing.sequencer import Sequencer
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import SourceStats
from kvbus.core.wire.frames import END_SEQ
from tests.core.dsl import Conversation, Does, live, replay_end, replayed, up
from tests.doubles.accounting import all_accounted_for


def deliver(*seqs: int) -> list[Does]:
    """Expect that the sequencer delivers batches with these seqs, in this order."""
    return [
        Does(f"deliver {seq}", lambda action, seq=seq: not isinstance(action, Deliver) or action.seq != seq)  # type: ignore[misc]
        for seq in seqs
    ]


def lost(count: int) -> Does:
    """Expect that the sequencer gives up ``count`` missing batches as lost."""
    return Does(f"lost {count}", lambda action: not isinstance(action, Lost) or action.count != count)


def new_epoch() -> Does:
    """Expect that the sequencer finds the publisher in a new epoch."""
    return Does("new epoch", lambda action: not isinstance(action, NewEpoch))


def synced() -> Does:
    """Expect that the sequencer has read the publisher's history completely."""
    return Does("synced", lambda action: action != Synced())


class SequencerScript(Conversation):
    """A conversation with a sequencer and its publisher. Keywords are fields of the SourceSpec.

    Batches have no events: a payload names its epoch and seq.
    """

    state_payload = b"a state"

    def __init__(self, *, replay: bool = True, epoch: int = 0, **settings: Any) -> None:
        super().__init__()
        self.stats = SourceStats()
        self.sequencer = Sequencer(SourceSpec(replay=replay, **settings), self.stats)
        self.epoch = epoch
        """The number of the simulated publisher's current epoch."""
        self.delivered: list[bytes] = []
        self.sends = True
        """Whether the relay sends the sequencer's requests immediately. If False, they wait behind other requests."""
        self.state_at = -1
        """The seq at which the publisher's answer begins with a state; -1 if the answer contains batches."""

    def payload(self, seq: int) -> bytes:
        """Return the payload that the publisher sends under this seq."""
        if seq == self.state_at:
            return self.state_payload
        return b"epoch %d, batch %d" % (self.epoch, seq)

    def frames(self, seq: int, *_events: Any, **_envelope: Any) -> list[bytes]:
        return [b"", seq.to_bytes(8, "big"), self.payload(seq)]

    def handle(self, event: RelayEvent) -> list[Any]:
        self._feed(event)
        actions = list(self.sequencer.actions)
        self.sequencer.actions.clear()
        for action in actions:
            if isinstance(action, Deliver):
                self.delivered.append(action.payload)
            elif isinstance(action, Ask | AskSnapshot):
                self.requests[0] = action.request
                if self.sends:
                    self.sequencer.sent(action.request, self.now)
        all_accounted_for(self)
        return actions

    def _feed(self, event: RelayEvent) -> None:
        sequencer, now = self.sequencer, self.now
        match event:
            case SourceUp():
                sequencer.up(now)
            case SourceDown():
                sequencer.down(now)
            case BatchReceived(frames=[_, seq, payload]):
                sequencer.live(int.from_bytes(seq, "big"), payload, now)
            case ReplayReceived(request=request, frames=[_, seq, payload]):
                if seq == END_SEQ:
                    sequencer.replay_ended(request, now)
                else:
                    number = int.from_bytes(seq, "big")
                    whole = sequencer.state_may_begin(number, payload) and payload == self.state_payload
                    sequencer.replayed(request, number, payload, now, may_be_state=whole)
            case SnapshotReceived(request=request, frames=[seq, *_]):
                if sequencer.snapshot(request, int.from_bytes(seq, "big", signed=True), now):
                    sequencer.snapshot_applied(now)
            case ReplayAborted(request=request):
                sequencer.replay_aborted(request, now)
            case Tick(stood=stood):
                if stood:
                    sequencer.stood_still(stood, now)
                sequencer.tick(now)
            case Unread(request=request):
                sequencer.unread(request, now)
            case _:
                raise AssertionError(event)

    @property
    def state(self) -> State:
        return self.sequencer.state

    @property
    def missing(self) -> tuple[int, int, int, int]:
        """How many batches the sequencer has counted as missing, recovered, lost and pending."""
        return self.stats.missing, self.stats.recovered, self.stats.lost, self.sequencer.pending


def in_sync(count: int = 0, **settings: Any) -> SequencerScript:
    """Return the script of a sequencer that is in sync and has delivered ``count`` batches."""
    script = SequencerScript(**settings)
    script.after(up())
    if script.sequencer.spec.replay:
        script.after(*map(replayed, range(count)), replay_end())
    else:
        script.after(*map(live, range(count)))
    assert script.sequencer.next == count
    assert script.state is State.LIVE
    return script
