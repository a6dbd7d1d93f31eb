"""Tests of a replay endpoint that belongs to another engine than the live stream.

The causes are a wrong port, or one Service in front of two engines. Routers must not hold blocks of the other engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvbus.core.commands import Publish, RequestReplay
from kvbus.core.events import BatchReceived, RelayEvent, ReplayReceived, SourceDown, SourcesNamed, SourceUp, Tick
from kvbus.core.findings.source import source_findings
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceLocation, SourceSpec
from kvbus.core.wire.frames import END_SEQ
from kvbus.core.wire.profiles import PROFILES
from tests.doubles.accounting import all_accounted_for
from tests.doubles.payloads import cleared, payload, store
from tests.doubles.router import RankedRouter

TICK = 0.1


class Publisher:
    """An engine that stores one block with each batch. Its blocks have numbers from ``first`` on."""

    def __init__(self, first: int, batches: int, buffer: int = 10_000) -> None:
        self.first = first
        self.sent: list[bytes] = []
        self.buffer = buffer
        for _ in range(batches):
            self.publish()

    def publish(self) -> list[bytes]:
        seq = len(self.sent)
        # a store of two blocks proves the block size
        events = [store([self.first, self.first + 1]), store([self.first + 2 + seq])] if not seq else []
        self.sent.append(payload(*(events or [store([self.first + 2 + seq])])))
        return [b"", seq.to_bytes(8, "big"), self.sent[-1]]

    @property
    def blocks(self) -> set[int]:
        return {self.first, self.first + 1, *(self.first + 2 + seq for seq in range(len(self.sent)))}

    def answer(self, start: int) -> list[list[bytes]]:
        seqs = range(max(start, len(self.sent) - self.buffer), len(self.sent))
        batches = [[b"", b"", seq.to_bytes(8, "big"), self.sent[seq]] for seq in seqs]
        return [*batches, [b"", b"", END_SEQ, b""]]


class Scene:
    """A relay that reads the live stream of one publisher, and requests replays from a publisher that a test chooses."""

    def __init__(self, live: Publisher, replay: Callable[[], Publisher], **spec: Any) -> None:
        self.live, self.replay = live, replay
        self.relay = Relay(
            [SourceSpec("engine/0", probe_interval=1.0, **spec)],
            [OutputSpec("out", PROFILES["vllm"], [None], heartbeat=0.0)],
        )
        self.now = 100.0
        self.router = RankedRouter()
        self.seen: set[Any] = set()
        """All blocks that the router held at the end of some tick since the finding began."""
        self.handle(SourcesNamed({0: SourceLocation("sources[0]", "tcp://a:5557", "tcp://b:5558")}))
        self.handle(SourceUp(0))

    def handle(self, event: RelayEvent) -> None:
        asked = []
        for command in self.relay.handle(event, self.now):
            if isinstance(command, Publish):
                self.router.apply(command.seq, command.payload)
            elif isinstance(command, RequestReplay):
                asked.append(command)
        for command in asked:
            for frames in self.replay().answer(command.start):
                self.handle(ReplayReceived(0, command.request, frames))

    def run(self, seconds: float, rate: float, others: tuple[Publisher, ...] = (), *, lose: int | None = None) -> None:
        """Let time pass, while the live publisher and the others publish ``rate`` batches a second."""
        due = 0.0
        for number in range(round(seconds / TICK)):
            due += rate * TICK
            while due >= 1:
                due -= 1
                frames = self.live.publish()
                for other in others:
                    other.publish()
                if lose is None or number != lose:
                    self.handle(BatchReceived(0, frames))
            self.now += TICK
            self.handle(Tick())
            all_accounted_for(self.source)
            if self.found:
                self.seen |= self.hashes

    @property
    def source(self) -> Any:
        return self.relay.sources[0]

    @property
    def found(self) -> list[str]:
        return [finding.text for finding in source_findings(self.source) if finding.id == "replay_of_another"]

    @property
    def hashes(self) -> set[int | bytes]:
        return self.router.hashes().get(0, set())

    def check_it_is_found(self) -> None:
        """Check that kvbus reports the other publisher, and that routers hold none of its blocks."""
        assert self.found == [
            "the replay at tcp://b:5558 returns batches that differ from those that tcp://a:5557 publishes"
        ]
        assert [finding.key for finding in source_findings(self.source)] == ["sources[0].replay_endpoint"]
        assert self.source.state == "live"
        assert self.source.partial
        assert self.hashes <= self.live.blocks
        assert self.router.violations == []


AHEAD = [-50, -9, -1, 0, 1, 7, 50, 1100]
"""By how many batches the other publisher is ahead of the publisher of the live stream."""

ahead = pytest.mark.parametrize("ahead", AHEAD)
rates = pytest.mark.parametrize("rate", [0.2, 2.0, 40.0])


def scene_of(ahead: int, *, batches: int = 60, **spec: Any) -> tuple[Scene, Publisher, Publisher]:
    live, other = Publisher(1, batches), Publisher(1_000_001, batches + ahead)
    return Scene(live, lambda: other, **spec), live, other


@ahead
@rates
@pytest.mark.parametrize("both", [False, True], ids=["the other is idle", "both publish"])
def test_the_replay_of_another_engine_is_found_and_not_used(ahead, rate, both):
    scene, live, other = scene_of(ahead)
    scene.run(6 if rate > 1 else 30, rate, (other,) if both else ())
    scene.check_it_is_found()
    assert scene.source.stats.restarts <= 1
    scene.run(5, rate, (other,) if both else ())
    scene.check_it_is_found()
    assert scene.source.stats.restarts <= 1
    assert live.first + 1 + len(live.sent) in scene.hashes


@ahead
@pytest.mark.parametrize("rate", [2.0, 20.0])
def test_the_replay_is_used_again_after_the_endpoint_is_corrected(ahead, rate):
    scene, live, other = scene_of(ahead)
    scene.run(10, rate, (other,))
    scene.check_it_is_found()
    scene.replay = lambda: live
    scene.run(90, rate, (other,))
    assert not source_findings(scene.source)
    assert scene.hashes == live.blocks
    assert not scene.source.partial


def test_it_is_found_if_the_stream_is_faster_than_the_fingerprints_last():
    scene, _, other = scene_of(-1000, batches=1030)
    scene.run(4, 1500.0, (other,))
    scene.check_it_is_found()


def test_lost_batches_are_counted_while_the_replay_is_of_another_engine():
    scene, _, other = scene_of(0)
    scene.run(10, 50.0, (other,))
    assert scene.source.stats.lost == 0
    scene.run(5, 10.0, (other,), lose=20)
    scene.check_it_is_found()
    assert scene.source.stats.lost == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_service_in_front_of_two_engines_is_found(seed):
    """Each request goes to either engine by chance. The live connection stays at one of them."""
    chance = random.Random(seed)
    live, other = Publisher(1, 100), Publisher(1_000_001, 100 + chance.choice([-50, 0, 3, 50]))
    scene = Scene(live, lambda: chance.choice([live, other]))
    scene.run(300, 0.3, (other,))
    found = 0
    for _ in range(100):
        scene.run(6, 0.3, (other,))
        found += bool(scene.found)
        assert not scene.found or scene.hashes <= live.blocks
    assert found >= 90


def test_an_engine_that_restarts_unseen_restarts_once():
    """Behind a proxy, the connection stays open while the engine restarts. Its first sign is an answer."""
    first, second = Publisher(1, 100), Publisher(1_000_001, 0)
    publishers = [first]
    scene = Scene(first, lambda: publishers[-1])
    scene.run(5, 5.0)
    scene.live = second
    publishers.append(second)
    for _ in range(130):
        second.publish()
    scene.run(20, 5.0)
    assert scene.hashes == second.blocks
    assert scene.source.stats.restarts == 1
    assert not source_findings(scene.source)


def test_an_answer_that_is_a_state_shows_no_other_publisher():
    """A kvbus in place of the engine answers with its state in place of old batches."""
    live, other = Publisher(1, 100), Publisher(1_000_001, 0)
    other.sent = [payload()] * 98 + [payload(cleared(), store([1, 2]))] + [payload(store([n])) for n in range(3, 103)]
    other.buffer = len(other.sent) - 98
    scene = Scene(live, lambda: other)
    scene.run(3, 0.0)
    assert not scene.found


def test_a_reconnection_begins_to_trust_the_replay_again():
    scene, live, other = scene_of(0)
    scene.run(10, 5.0, (other,))
    scene.check_it_is_found()
    scene.handle(SourceDown(0))
    scene.live = other
    scene.handle(SourceUp(0))
    assert not scene.found
    scene.run(10, 5.0, (live,))
    assert scene.hashes == other.blocks
    assert not source_findings(scene.source)


def test_a_healthy_engine_is_asked_once_whether_its_replay_is_its_own():
    live = Publisher(1, 100)
    scene = Scene(live, lambda: live)
    asked = scene.source.stats.replays
    scene.run(60, 50.0)
    assert scene.source.stats.replays == asked + 1
    assert scene.source.stats.restarts == 0
    assert scene.hashes == live.blocks
