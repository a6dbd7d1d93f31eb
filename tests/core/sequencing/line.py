"""A sequencer on its own: what happens goes in by name, what it decides comes out as words.

A :class:`~tests.core.dsl.Script` talks to a whole relay and sees messages. Some decisions leave no message (a batch given
up behind another source's backlog, the end of a catch-up): here they are seen, as ``"lost 1"`` or ``"synced"``.
"""

from kvbus.core.sequencing.actions import Ask, Deliver, Lost, NewEpoch, Stop, Synced
from kvbus.core.sequencing.sequencer import Sequencer
from kvbus.core.sequencing.settings import Settings, State
from kvbus.core.stats import SourceStats
from tests.doubles.accounting import all_accounted_for


class Line:
    """A sequencer, and a publisher that says what it is told to say. ``life`` tells its lives apart."""

    def __init__(self, *, replay=True, life=0, **settings):
        self.stats = SourceStats()
        self.sequencer = Sequencer(Settings(replay=replay, **settings), self.stats)
        self.life = life
        self.now = 0.0
        self.request = 0
        self.delivered = []
        self.sends = True
        """What is asked leaves at once; False: it waits behind a backlog."""

    def batch(self, seq):
        return b"life %d, batch %d" % (self.life, seq)

    def done(self):
        said: list[int | str] = []
        while self.sequencer.actions:
            action = self.sequencer.actions.popleft()
            if isinstance(action, Deliver):
                said.append(action.seq)
                self.delivered.append(action.payload)
            elif isinstance(action, Lost):
                said.append(f"lost {action.count}")
            elif isinstance(action, Ask):
                said.append(f"ask {action.start}")
                self.request = action.request
                if self.sends:
                    self.sequencer.sent(action.request, self.now)
            else:
                said.append({NewEpoch: "new epoch", Synced: "synced", Stop: "stop"}[type(action)])
        all_accounted_for(self)
        return said

    def up(self):
        self.sequencer.up(self.now)
        return self.done()

    def down(self):
        self.sequencer.down(self.now)
        return self.done()

    def live(self, *seqs):
        said = []
        for seq in seqs:
            self.sequencer.live(seq, self.batch(seq), self.now)
            said += self.done()
        return said

    def replayed(self, *seqs, request=None):
        said = []
        for seq in seqs:
            self.sequencer.replayed(request or self.request, seq, self.batch(seq), self.now)
            said += self.done()
        return said

    def end(self, request=None):
        self.sequencer.replay_ended(request or self.request, self.now)
        return self.done()

    def later(self, seconds):
        self.now += seconds
        self.sequencer.tick(self.now)
        return self.done()

    @property
    def state(self):
        return self.sequencer.state

    @property
    def missing(self):
        """Missing, recovered, lost, pending."""
        return self.stats.missing, self.stats.recovered, self.stats.lost, self.stats.pending


def synced(count=0, **settings):
    """A line in sync that has delivered ``count`` batches."""
    line = Line(**settings)
    if line.sequencer.settings.replay:
        line.up()
        line.replayed(*range(count))
        line.end()
    else:
        line.up()
        line.live(*range(count))
    assert line.sequencer.next == count
    assert line.state is State.LIVE
    return line
