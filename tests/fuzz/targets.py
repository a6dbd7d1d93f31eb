"""The targets of fuzzing: functions that take any bytes and check what must hold for all of them.

A test without a fuzzer can call them, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvbus.core.commands import AnswerReplay, Publish, RequestReplay
from kvbus.core.events import BatchReceived, ReplayAsked, ReplayReceived, SourceDown, SourceUp, Tick
from kvbus.core.normalizing.admission import check_removed, check_stored
from kvbus.core.outputs.snapshot import parse_snapshot, parse_snapshot_request
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.types import Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.dialects import sniff
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
from kvbus.core.wire.schema import AllBlocksCleared, Batch, BlockRemoved, BlockStored
from kvbus.core.wire.tokens import decode_tokens
from tests.doubles.accounting import all_accounted_for, size_is_true
from tests.doubles.answers import reading
from tests.doubles.payloads import plain_all
from tests.doubles.router import PlainSetRouter


def codec(data: bytes, max_events: int = 4096) -> None:
    """Decode one payload: the result is a batch or a reason, never an exception.

    Each field of a batch has the right type, and encoding the batch changes nothing.
    """
    sniff(data)
    batch = decode_batch(data, max_events)
    if isinstance(batch, Reason):
        return
    assert isinstance(batch, Batch)
    assert isinstance(batch.ts, float)
    assert batch.rank is None or isinstance(batch.rank, int)
    assert all(isinstance(reason, Reason) for reason in batch.rejects)
    for event in batch.events:
        _well_typed(event)
    again = decode_batch(encode_batch(batch.events, batch.ts, batch.rank), max_events)
    assert isinstance(again, Batch), again
    assert (len(again.events), again.ts, again.rank, again.rejects) == (len(batch.events), batch.ts, batch.rank, [])
    assert isinstance(decode_batch(encode_positional_batch(batch.events, batch.ts, batch.rank), max_events), Batch)
    try:
        events = plain_all(batch.events)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return  # a carried field is incomplete; the tests of the rules for events cover this
    assert plain_all(again.events) == events


def _well_typed(event: object) -> None:
    if isinstance(event, AllBlocksCleared):
        return
    assert isinstance(event, BlockStored | BlockRemoved)
    assert all(type(block) in (int, bytes) for block in event.block_hashes)
    assert event.medium is None or isinstance(event.medium, str)
    if isinstance(event, BlockRemoved):
        check_removed(event)
        return
    check_stored(event)
    assert type(event.block_size) is int
    assert event.parent_block_hash is None or type(event.parent_block_hash) in (int, bytes)
    tokens = decode_tokens(event.token_ids)
    assert isinstance(tokens, Reason) or all(type(token) in (int, tuple) for token in tokens)


def frames(data: bytes) -> None:
    """Parse one multipart message. Before each frame, ``data`` has a byte with the frame's length."""
    message(list(_cut(data)), 512)


def message(parts: list[bytes], max_frame_bytes: int) -> None:
    """Check that each parser reads a multipart message, or returns the reason why it cannot."""
    limits = FrameLimits(max_frame_bytes=max_frame_bytes)
    live = parse_live(parts, limits)
    assert isinstance(live, Reason) or 0 <= live.seq < 2**63
    reply = parse_replay(parts, limits)
    assert isinstance(reply, (Reason, ReplayEnd, ReplayMessage))
    request = parse_replay_request(parts)
    assert (request is None) == (len(parts) < 2)
    if request is not None:
        assert request.envelope[0] == parts[0]
        assert 0 <= request.start < 2**64
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
    """Give a relay arbitrary events in any order, and check its output and its counters.

    Routers must be able to rely on the output, and all batches must be counted. ``data`` is a sequence of steps. A
    step begins with three bytes: ``kind``, ``seq`` and ``length / 4``. If it is a live or a replayed batch, the
    payload of the batch follows.
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
    """Two simulated routers, one for each output. Each keeps its blocks in a set, and counts no copies.

    They check that the seqs of each stream have no gap, and that a router that joins late gets the same blocks.
    """

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
            answer = reading(self.bus, asked)
            late = PlainSetRouter()
            while (message := answer.next_message()) is not None and message[-2] != END_SEQ:
                late.apply(int.from_bytes(message[-2], "big"), message[-1])
            _holds_nothing_against(late)
            assert late.blocks.keys() == view.blocks.keys()


def _holds_nothing_against(router: PlainSetRouter) -> None:
    assert router.violations == []
    assert all(isinstance(rank, int) for rank in router.ranks)


TARGETS = {"codec": codec, "frames": frames, "relay": relay}
