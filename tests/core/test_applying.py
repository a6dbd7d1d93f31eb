"""Tests that each record of the write-ahead log has the same effect after a restart as when it was written."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from kvbus.core.checkpoint import Loader, dump
from kvbus.core.commands import RequestReplay, RequestSnapshot
from kvbus.core.events import (
    BatchReceived,
    EngineEmptied,
    RelayEvent,
    ReplayReceived,
    SnapshotReceived,
    SourceDown,
    SourceUp,
    Started,
    Subscribed,
    Tick,
)
from kvbus.core.normalizing import large_batches
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.frames import END_SEQ
from kvbus.core.wire.profiles import PROFILES
from kvbus.core.write_ahead_log import Delivered, EpochBegun, Record, StateError, decode_records
from tests.doubles.payloads import batch, cleared, payload, removed, store
from tests.properties.world import everything

ONE, OTHER = b"1" * 16, b"2" * 16
"""Publisher ids that an engine has in two different epochs."""


def make_relay() -> Relay:
    source = SourceSpec(
        "engine", 0, replay=True, snapshot=True, source_timeout=5.0, expiring_media=frozenset({"CPU"}), expire_after=3.0
    )
    return Relay([source], [OutputSpec("out", PROFILES["vllm"], [None], heartbeat=1.0, first_seqs=[40])])


class RecordingRelay:
    """A relay that writes records for a write-ahead log. It gets its events from a test and from a simple engine.

    To a replay request, the engine answers only with its newest batch.
    """

    def __init__(self) -> None:
        self.relay = make_relay()
        self.saved = list(dump(self.relay))
        self.relay.keep_records(keep=True)
        self.now = 100.0
        self.asked: RequestSnapshot | None = None
        self.kinds: set[type] = set()
        self.newest: list[bytes] = []

    def take(self, event: RelayEvent, after: float = 0.0) -> None:
        self.now += after
        todo = [event]
        while todo:
            for command in self.relay.handle(todo.pop(0), self.now):
                if isinstance(command, RequestReplay):
                    todo.append(ReplayReceived(0, command.request, self.newest))
                    todo.append(ReplayReceived(0, command.request, [b"", b"", END_SEQ, b""]))
                elif isinstance(command, RequestSnapshot):
                    self.asked = command

    def live(self, seq: int, *events: Any, publisher: bytes = b"") -> None:
        topic, number, body = batch(seq, *events)
        self.newest = [b"", topic, number + publisher, body]
        self.take(BatchReceived(0, self.newest[1:]))

    def snapshot(self, seq: int, *events: Any, publisher: bytes) -> None:
        assert self.asked is not None
        chunks = [payload(*events)] if seq >= 0 else []
        frames = [b"", seq.to_bytes(8, "big", signed=True), publisher, *chunks]
        self.take(SnapshotReceived(0, self.asked.request, frames))

    def check_recovery(self) -> None:
        """Check that a relay which loads the checkpoint and applies the records has the same state as this relay."""
        assert self.relay.records is not None
        body, payloads = self.relay.records.take()
        records = decode_records(body, b"".join(payloads))
        assert records is not None
        self.kinds |= {type(record) for record in records}
        again = make_relay()
        loader = Loader(again)
        for blob in self.saved:
            loader.feed(blob)
        for record in records:
            again.apply_record(record, self.now)
        again.recovery_finished(self.now)
        kept = {(0, 0): again.outputs[0].streams[0].journal.first_seq}
        assert everything(again, kept) == everything(self.relay, kept)
        self.saved = list(dump(self.relay))


def test_applied_records_restore_the_state_of_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = RecordingRelay()
    kept.take(Started(7.0))
    kept.take(SourceUp(0))
    kept.live(4, store([1]))
    kept.snapshot(4, store([1, 2, 3]), publisher=ONE)
    kept.check_recovery()
    kept.live(5, store([4], 3), removed([1]), publisher=ONE)
    many = list(range(10, 6000))  # a state in two batches
    kept.live(6, cleared(), store(many, tokens=many, block_size=1), publisher=ONE)
    copy = store([7], tokens=[7], block_size=1)
    kept.live(7, copy, copy, removed([7]), publisher=ONE)
    kept.check_recovery()
    assert 7 in kept.relay.sources[0].normalizer.index.tables[None, "GPU", None, None].blocks
    kept.check_recovery()
    kept.live(8, store([8], tokens=[8], block_size=1, medium="CPU"), publisher=ONE)
    kept.take(Tick(7.0), after=3.0)
    assert not kept.relay.sources[0].normalizer.index.media().get("CPU")
    kept.check_recovery()
    kept.take(EngineEmptied(0))
    assert not len(kept.relay.sources[0].normalizer.index)
    kept.check_recovery()
    with monkeypatch.context() as patch:
        patch.setattr(large_batches, "PART", 4000)
        kept.live(9, store(many, tokens=many, block_size=1), publisher=ONE)
        assert kept.relay.backlog
        kept.take(Tick(7.0))
        assert not kept.relay.backlog
        kept.take(Subscribed(0, 0, (1,)))
        kept.check_recovery()
    kept.live(11, store([5]), publisher=ONE)
    for _ in range(4):
        kept.take(Tick(8.0), after=2.5)
    kept.take(Tick(9.0), after=1.5)
    kept.check_recovery()
    kept.live(0, store([8]), publisher=OTHER)
    kept.snapshot(-1, publisher=OTHER)
    kept.live(1, store([9]), publisher=OTHER)
    kept.check_recovery()
    kept.take(SourceDown(0))
    kept.take(Tick(30.0), after=10.0)
    kept.check_recovery()
    kept.take(SourceUp(0))
    kept.take(Tick(31.0), after=1.0)
    kept.check_recovery()
    assert kept.kinds == set(get_args(Record))


def test_a_restart_applies_the_remaining_parts_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ended between two parts of a batch has the rest of the batch only in its write-ahead log."""
    monkeypatch.setattr(large_batches, "PART", 2)
    kept = RecordingRelay()
    kept.take(SourceUp(0))
    kept.live(0, store([1, 2, 3, 4, 5, 6]), removed([6, 5, 4, 3, 2]))
    kept.take(Tick(1.0))
    assert kept.relay.backlog
    assert kept.relay.records is not None
    body, payloads = kept.relay.records.take()
    again = make_relay()
    for record in decode_records(body, b"".join(payloads)) or ():
        again.apply_record(record, kept.now)
    assert again.recovery_finished(kept.now)
    assert again.take_commands() == []
    assert list(again.sources[0].normalizer.index.tables[None, "GPU", None, None].blocks) == [1]
    while kept.relay.backlog:
        kept.take(Tick(1.0))
    assert again.outputs[0].streams[0].next_seq == kept.relay.outputs[0].streams[0].next_seq
    assert not again.recovery_finished(kept.now)


@pytest.mark.parametrize("record", [Delivered(7, 0, b"", 0, b""), EpochBegun(1, partial=False, publisher_id=None)])
def test_a_record_of_another_relay_is_refused(record: Record) -> None:
    with pytest.raises(StateError):
        make_relay().apply_record(record, 0.0)
