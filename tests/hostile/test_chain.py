"""A relay behind a relay, both pure: what the first one replays is what it sent, heartbeats included."""

from __future__ import annotations

from typing import Any

from kvbus.core.commands import AnswerReplay, Publish, RequestReplay
from kvbus.core.events import BatchReceived, ReplayAsked, ReplayReceived, SourceDown, SourceUp, Tick
from kvbus.core.normalizing.rules import Rules
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.sequencing.settings import Settings
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.profiles import Profile
from tests.doubles.answers import reading
from tests.doubles.payloads import batch, store


class Chain:
    """The first relay's live stream and replay are the second one's source."""

    def __init__(self) -> None:
        def relay() -> Relay:
            source = SourceSpec("engine", 0, Settings(probe_interval=2.5), Rules())
            return Relay([source], [OutputSpec("out", Profile(), [None], heartbeat=1.0)])

        self.first, self.second = relay(), relay()
        self.now = 100.0
        self.lose = 0

    def tell_first(self, event: Any) -> None:
        for command in self.first.handle(event, self.now):
            if isinstance(command, Publish):
                if self.lose:
                    self.lose -= 1
                    continue
                frames = [b"", command.seq.to_bytes(8, "big"), command.payload]
                self.tell_second(BatchReceived(0, frames))

    def tell_second(self, event: Any) -> None:
        for command in self.second.handle(event, self.now):
            if isinstance(command, RequestReplay):
                asked = ReplayAsked(0, 0, [b"id", b"", command.start.to_bytes(8, "big")])
                (begun,) = [c for c in self.first.handle(asked, self.now) if isinstance(c, AnswerReplay)]
                answer = reading(lambda pull: self.first.handle(pull, self.now), begun)
                while (message := answer.next_message()) is not None:
                    self.tell_second(ReplayReceived(0, command.request, message[1:]))

    def seconds_pass(self, count: int) -> None:
        for n in range(count):
            self.now += 1.0
            self.tell_first(Tick(1e9 + self.now + n))
            self.tell_second(Tick(1e9 + self.now))


def test_heartbeats_are_no_other_life() -> None:
    """Asked after a loss, a reconnection and when idle; a run of them came back with one time for all."""
    chain = Chain()
    chain.tell_second(SourceUp(0))
    chain.tell_first(BatchReceived(0, batch(0, store([1, 2]))))
    chain.seconds_pass(20)
    chain.lose = 2
    chain.seconds_pass(5)
    chain.tell_second(SourceDown(0))
    chain.tell_second(SourceUp(0))
    chain.lose = 6  # long enough for a question of an idle stream
    chain.seconds_pass(20)
    (source,) = chain.second.sources
    assert source.stats.restarts == 0
    assert source.stats.recovered >= 2
    assert source.stats.lost == 0
    assert len(source.normalizer.index) == 2
