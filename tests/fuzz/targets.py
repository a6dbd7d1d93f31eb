"""What is fuzzed: bytes in, and what must hold whatever they are. Plain functions, with or without a fuzzer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvbus.core.commands import AnswerReplay, Publish, RequestReplay
from kvbus.core.events import BatchReceived, ReplayAsked, ReplayReceived, SourceDown, SourceUp, Tick
from kvbus.core.normalizing.validate import check_removed, check_stored
from kvbus.core.outputs.snapshot import parse_snapshot, parse_snapshot_request
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.types import Reason
from kvbus.core.wire.batch import Batch
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.encoding import encode_batch, encode_positional_batch
from kvbus.core.wire.frames import (
    END_SEQ,
    FrameLimits,
    ReplayEnd,
    ReplayMessage,
    parse_live,
    parse_replay,
    parse_replay_request,
)
from kvbus.core.wire.profiles import PROFILES
from kvbus.core.wire.schema import BlockRemoved, BlockStored
from tests.doubles.accounting import all_accounted_for, size_is_true
from tests.doubles.answers import reading
from tests.doubles.router import PlainSetRouter


def codec(data: bytes) -> None:
    """One payload: a batch or a reason, never an exception; what is a batch can be said again and read again."""
    batch = decode_batch(data, 4096)
    if isinstance(batch, Reason):
        return
    assert isinstance(batch, Batch)
    for event in batch.events:
        if isinstance(event, BlockStored):
            check_stored(event)
        elif isinstance(event, BlockRemoved):
            check_removed(event)
    again = decode_batch(encode_batch(batch.events, batch.ts, batch.rank), 4096)
    assert isinstance(again, Batch), again
    assert len(again.events) == len(batch.events)
    assert (again.ts, again.rank) == (batch.ts, batch.rank)
    assert encode_positional_batch(batch.events, batch.ts, batch.rank)


def frames(data: bytes) -> None:
    """One multipart message, cut at a length byte before each frame: whatever reads it names what is wrong."""
    parts = list(_cut(data))
    limits = FrameLimits(max_frame_bytes=512)
    live = parse_live(parts, limits)
    assert isinstance(live, Reason) or 0 <= live.seq < 2**63
    reply = parse_replay(parts, limits)
    assert isinstance(reply, (Reason, ReplayEnd, ReplayMessage))
    request = parse_replay_request(parts)
    assert request is None or 0 <= request.start < 2**64
    parse_snapshot(parts)
    parse_snapshot_request(parts)


def _cut(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        end = at + 1 + data[at]
        yield data[at + 1 : end]
        at = end


STEPS = 64


def relay(data: bytes) -> None:
    """A source told anything in any order; its output is what routers may rely on, and nothing is uncounted.

    A step is ``kind, seq, length / 4``, and the payload of a live or a replayed batch.
    """
    source = SourceSpec("engine", 0, max_blocks=64, source_timeout=5.0)
    outputs = [
        OutputSpec(f"out-{number}", PROFILES[name], [None], heartbeat=0.0, journal_batches=4)
        for number, name in enumerate(("vllm", "aibrix"))
    ]
    bus = Relay([source], outputs, FrameLimits(max_events=256))
    follower = Follower(bus)
    now, at = 100.0, 0
    for _ in range(STEPS):
        if at + 3 > len(data):
            break
        kind, seq, length = data[at : at + 3]
        payload = data[at + 3 : at + 3 + 4 * length]
        at += 3
        frame = seq.to_bytes(8, "big")
        if kind % 8 < 4:
            at += 4 * length
            follower.take(bus.handle(BatchReceived(0, [b"", frame, payload]), now))
        elif kind % 8 == 4:
            at += 4 * length
            follower.take(bus.handle(ReplayReceived(0, follower.request, [b"", frame, payload]), now))
        elif kind % 8 == 5:
            follower.take(bus.handle(ReplayReceived(0, follower.request, [b"", END_SEQ, b""]), now))
        elif kind % 8 == 6:
            follower.take(bus.handle(SourceDown(0) if seq % 2 else SourceUp(0), now))
        else:
            now += seq / 10
            follower.take(bus.handle(Tick(now), now))
        for _ in range(10_000):
            if not bus.backlog:
                break
            follower.take(bus.handle(Tick(now), now))
        _counted(bus)
    follower.compare()


def _counted(bus: Relay) -> None:
    (source,) = bus.sources
    all_accounted_for(source)
    assert source.normalizer.entries <= 64
    size_is_true(source.normalizer)


class Follower:
    """Two routers on plain sets, one for each output; the streams are dense, and a late one comes to the same."""

    def __init__(self, bus: Relay) -> None:
        self.bus = bus
        self.request = 0
        self.next = [0, 0]
        self.views = [PlainSetRouter(), PlainSetRouter()]

    def take(self, commands: Sequence[object]) -> None:
        for command in commands:
            if isinstance(command, RequestReplay):
                self.request = command.request
            elif isinstance(command, Publish):
                assert command.seq == self.next[command.output]
                self.next[command.output] += 1
                self.views[command.output].apply(command.seq, command.payload)
                _holds_nothing_against(self.views[command.output])

    def compare(self) -> None:
        for number, view in enumerate(self.views):
            commands = self.bus.handle(ReplayAsked(number, 0, [b"id", b"", bytes(8)]), 1e6)
            (asked,) = [command for command in commands if isinstance(command, AnswerReplay)]
            answer = reading(lambda event: self.bus.handle(event, 1e6), asked)
            late = PlainSetRouter()
            while (message := answer.next_message()) is not None and message[-2] != END_SEQ:
                late.apply(int.from_bytes(message[-2], "big"), message[-1])
            _holds_nothing_against(late)
            assert late.blocks.keys() == view.blocks.keys()


def _holds_nothing_against(router: PlainSetRouter) -> None:
    assert router.violations == []
    assert all(isinstance(rank, int) for rank in router.ranks)


TARGETS = {"codec": codec, "frames": frames, "relay": relay}
