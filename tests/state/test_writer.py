"""Tests for writing kvbus's state to a real file system.

kvbus reads back what it wrote. If the disk is full, it continues without a state.
"""

from __future__ import annotations

import itertools
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from kvbus.core.commands import AnswerReplay, Publish, RequestReplay
from kvbus.core.events import BatchReceived, ReplayAsked, ReplayReceived, SourceUp, Started, Subscribed, Tick
from kvbus.core.outputs.journal import Journal
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import SLICE, Relay
from kvbus.core.sequencing.fingerprints import RING
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.encoding import encode_batch, encode_value
from kvbus.core.wire.frames import END_SEQ
from kvbus.core.wire.profiles import Profile
from kvbus.core.wire.schema import BlockRemoved, BlockStored
from kvbus.state import sqlite, writer
from kvbus.state.contract import MARGIN, StoreError
from kvbus.state.database import contents
from kvbus.state.lock import DirectoryLock
from kvbus.state.reservations import SeqReservations
from kvbus.state.sqlite import SqliteStore
from kvbus.state.writer import RETRY_SECONDS, StateWriter, StoppedError
from tests.doubles.answers import reading
from tests.doubles.disk import room_for
from tests.doubles.router import PlainSetRouter
from tests.state.left import opened, rows
from tests.typed import there

NAMES = ["engine", "routers"]


def make_relay() -> Relay:
    return Relay([SourceSpec("engine", 0)], [OutputSpec("routers", Profile(), [None], heartbeat=0)])


def stored(block: int, tokens: int = 4) -> BlockStored:
    return BlockStored((block,), None, encode_value([block] * tokens), tokens, None, "GPU", None, 0)


class Process:
    """One kvbus process on a state directory: a relay, its store, and an engine that numbers its batches."""

    def __init__(self, directory: Path, names: list[str] = NAMES) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.relay, self.now = make_relay(), 0.0
        self.store = SqliteStore(directory, DirectoryLock(directory, "the state"))
        self.state = StateWriter(self.store, self.clock)
        self.unusable = ""
        try:
            self.resumed = self.state.load(self.relay, names, 0.0)
        except StoreError as error:
            self.relay, self.resumed, self.unusable = make_relay(), False, str(error)
        self.state.begin(self.relay)

    def clock(self) -> float:
        self.now += 0.002
        return self.now

    @property
    def blocks(self) -> set[int | bytes]:
        tables = self.relay.sources[0].normalizer.index.tables.values()
        return {block for table in tables for block in table.blocks}

    @property
    def next_seq(self) -> int:
        return self.relay.outputs[0].streams[0].next_seq

    def connect(self) -> None:
        self.relay.handle(SourceUp(0), 1.0)
        last = self.relay.sources[0].sequencer.next - 1
        if last < 0:
            self.relay.handle(ReplayReceived(0, 1, [b"", b"", END_SEQ, b""]), 1.0)

    def publish(self, count: int, *, tokens: int = 4, together: bool = False) -> None:
        """Publish batches that store a block each. Every third batch also removes the previous block.

        With ``together``, kvbus writes the records of all batches in one commit.
        """
        for _ in range(count):
            seq = self.relay.sources[0].sequencer.next
            events: list[BlockStored | BlockRemoved] = [stored(seq, tokens)]
            if seq % 3 == 2:
                events.append(BlockRemoved((seq - 1,), "GPU", 0))
            payload = encode_batch(events, 1.0 + seq, 0)
            self.relay.handle(BatchReceived(0, [b"", seq.to_bytes(8, "big"), payload]), 1.0)
            if not together:
                self.state.flush()
        self.state.flush()

    def subscribe(self) -> None:
        """Let a router subscribe. The state that it gets uses seqs of the stream."""
        self.relay.handle(Subscribed(0, 0, (1,)), 1.0)
        self.state.flush()

    def kill(self) -> None:
        """End the process without writing anything, so that only committed data remains."""
        self.relay.keep_records(keep=False)
        self.store.close()


def started(directory: Path) -> Process:
    process = Process(directory)
    process.connect()
    process.state.flush()
    return process


def checkpointed(process: Process) -> None:
    process.state.work()
    while process.state.busy:  # each call writes slices for a few milliseconds
        process.state.work()


def copied(directory: Path, to: Path) -> Path:
    """Return a copy of the directory: the files that a kill at this moment would leave."""
    shutil.copytree(directory, to)
    return to


def test_a_new_state_directory_has_no_state(tmp_path: Path) -> None:
    process = Process(tmp_path / "made" / "here")
    assert not process.resumed
    assert process.next_seq == 0


def test_kvbus_restores_its_complete_state_after_a_kill(tmp_path: Path) -> None:
    process = started(tmp_path)
    process.publish(20)
    process.kill()
    again = Process(tmp_path)
    assert again.resumed
    assert again.blocks == process.blocks
    assert again.next_seq == process.next_seq == 20
    assert again.relay.sources[0].sequencer.next == 20
    journal = again.relay.outputs[0].streams[0].journal
    assert [journal.at(at).payload for at in range(20)] == [  # type: ignore[union-attr]
        process.relay.outputs[0].streams[0].journal.at(at).payload  # type: ignore[union-attr]
        for at in range(20)
    ]


@pytest.mark.parametrize(("count", "tokens"), [(300, 4), (1500, 16), (40, 2000), (5, 40_000)])
def test_batches_that_are_written_together_are_restored_together(tmp_path: Path, count: int, tokens: int) -> None:
    process = started(tmp_path / "first")
    process.publish(3, tokens=tokens)
    before = copied(tmp_path / "first", tmp_path / "before")
    process.publish(count, tokens=tokens, together=True)
    process.kill()
    for directory, known in ((before, 3), (tmp_path / "first", 3 + count)):
        again = Process(directory)
        assert again.resumed
        assert again.next_seq == known
        again.kill()


def held_back(process: Process, count: int) -> None:
    """Publish batches from seq 10 on, and lose the first of them, so that the others wait in the reorder buffer.

    Then deliver the first by a replay.
    """
    payloads = [encode_batch([stored(seq)], 1.0 + seq, 0) for seq in range(10, 10 + count)]
    asked = []
    for seq, payload in enumerate(payloads[1:], 11):
        asked += process.relay.handle(BatchReceived(0, [b"", seq.to_bytes(8, "big"), payload]), 1.0)
    (question,) = [command for command in asked if isinstance(command, RequestReplay)]
    missing = [b"", b"", (10).to_bytes(8, "big"), payloads[0]]
    process.relay.handle(ReplayReceived(0, question.request, missing), 1.0)


def test_kvbus_restores_thousands_of_batches_that_waited_after_a_gap(tmp_path: Path) -> None:
    """kvbus restores its state after a gap was filled and thousands of waiting batches were delivered in slices.

    There are more batches than fingerprints that kvbus keeps (`RING`).
    """
    process = started(tmp_path)
    process.publish(10)
    held_back(process, 3 * RING)
    while process.relay.backlog:
        process.relay.handle(Tick(1.0), 1.0)
    process.state.flush()
    assert process.next_seq == 10 + 3 * RING
    process.kill()
    again = Process(tmp_path)
    assert (again.next_seq, again.blocks) == (process.next_seq, process.blocks)
    again.kill()


def test_kvbus_uses_only_the_seqs_of_a_state_of_another_configuration(tmp_path: Path) -> None:
    process = started(tmp_path)
    process.publish(5)
    process.store.reserved.raise_to(4096)
    process.store.reserve(process.store.reserved)
    process.kill()
    other = Process(tmp_path, ["other", "routers"])
    assert "another configuration" in other.unusable
    assert (other.store.refused, other.store.reserved.floor) == (1, 4096)
    other.kill()
    again = Process(tmp_path, ["other", "routers"])
    assert (again.resumed, again.blocks) == (True, set())
    again.kill()


def test_a_complete_checkpoint_replaces_the_write_ahead_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill during a checkpoint leaves the previous checkpoint and the write-ahead log, until the new one is
    complete.
    """
    monkeypatch.setattr(sqlite, "CHECKPOINT_AFTER", 500)
    monkeypatch.setattr(writer, "SLICE_SECONDS", 0.0)
    process = started(tmp_path / "now")
    process.publish(200)
    process.state.work()
    assert process.state.busy
    process.publish(10)
    before = copied(tmp_path / "now", tmp_path / "early")
    while process.state.busy:
        process.state.work()
    process.publish(3)
    assert contents(tmp_path / "now").frames == 13
    process.kill()
    for directory, known in ((tmp_path / "now", 213), (before, 210)):
        again = Process(directory)
        assert (again.resumed, again.next_seq) == (True, known)
        again.kill()


def test_the_database_file_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "CHECKPOINT_AFTER", 50_000)
    process = started(tmp_path)
    sizes = []
    for _ in range(12):
        process.publish(200)
        checkpointed(process)
        sizes.append((tmp_path / "state.db").stat().st_size)
    process.kill()
    assert sizes[-1] < 2 * sizes[3]


@pytest.mark.parametrize("room", [60_000, 100])
def test_kvbus_continues_without_state_on_a_full_disk(tmp_path: Path, room: int) -> None:
    """If the disk is full, kvbus gives up its state and continues.

    The disk has room for an empty state, or for nothing.
    """
    process = started(tmp_path)
    process.publish(5)
    process.store.reserved.raise_to(4096)
    process.store.reserve(process.store.reserved)
    with room_for(room):
        process.publish(300, tokens=200)
        assert process.next_seq == 305
        assert process.state.failed
        assert process.relay.records is None
        assert str(tmp_path) in process.state.failure
        process.store.reserved.raise_to(8192)
        with suppress(StoreError):
            process.store.reserve(process.store.reserved)
        process.kill()
    assert process.store.refused == 0
    assert (tmp_path / "state.db").stat().st_size <= 60_000 if room > 100 else True
    again = Process(tmp_path)
    assert not again.resumed, "it would be older than what was sent"
    assert again.store.refused == 0
    assert again.store.reserved.highest == 8192, "the numbering goes on exactly"
    again.kill()


def test_kvbus_deletes_its_state_if_the_disk_refuses_every_write(tmp_path: Path) -> None:
    """If the disk refuses every write, kvbus deletes the files of its state.

    It cannot mark them as unusable, because it cannot write the mark. The next process must not load this state, which
    lacks batches that were sent.
    """
    process = started(tmp_path)
    process.publish(5)
    process.store.reserved.raise_to(4096)
    process.store.reserve(process.store.reserved)
    with room_for(1):
        process.publish(3)
        assert process.state.failed
        process.kill()
    again = Process(tmp_path)
    assert not again.resumed, "it would be older than what was sent"
    assert again.store.reserved.highest >= 4096 + MARGIN
    again.kill()


def test_seqs_skip_ahead_after_the_database_was_deleted(tmp_path: Path) -> None:
    """If kvbus had to delete its state's database on a full disk, the next process begins above all used seqs.

    It cannot begin at the highest reserved seq of the lock file. kvbus used higher seqs, whose reservation it could not
    write to the full disk.
    """
    process = started(tmp_path)
    with room_for(100):
        process.publish(300, tokens=200)
        assert process.state.failed
    used = process.store.reserved.highest + 20_000
    process.store.reserved.raise_to(used)
    with room_for(1), suppress(StoreError):
        process.store.reserve(process.store.reserved)
    process.kill()
    again = Process(tmp_path)
    assert again.store.reserved.highest > used
    again.kill()


def test_kvbus_gives_up_its_state_if_a_reservation_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kvbus gives up its state if it cannot write a seq reservation, even between two slices of a checkpoint.

    The checkpoint must not continue in the new database, where it would look complete.
    """
    monkeypatch.setattr(sqlite, "CHECKPOINT_AFTER", 500)
    monkeypatch.setattr(writer, "SLICE_SECONDS", 0.0)
    process = started(tmp_path)
    process.publish(200)
    process.state.work()
    assert process.state.busy
    reservations = SeqReservations(process.store, process.state.fail)
    reservations.add(0, 0, "routers")
    with room_for(100):
        reservations.use(0, 0, 10**6)
    assert process.state.failed
    assert not process.state.busy
    process.publish(3)
    early = copied(tmp_path, tmp_path.with_name("early"))
    process.now += RETRY_SECONDS
    checkpointed(process)
    process.publish(4)
    process.kill()
    again = Process(tmp_path)
    assert (again.resumed, again.next_seq, again.blocks) == (True, 207, process.blocks)
    again.kill()
    killed = Process(early)
    assert (killed.resumed, killed.blocks) == (False, set())
    killed.kill()


def test_kvbus_begins_a_new_state_when_the_disk_has_space_again(tmp_path: Path) -> None:
    process = started(tmp_path)
    process.publish(5)
    with room_for(100):
        process.publish(3)
        assert process.state.failed
        process.now += RETRY_SECONDS
        process.state.work()
        assert process.state.failed
        process.publish(3)
    process.state.work()
    assert process.state.failed, "it is not time yet"
    process.now += RETRY_SECONDS
    checkpointed(process)
    assert not process.state.failed
    assert not process.state.failure
    process.publish(4)
    process.kill()
    again = Process(tmp_path)
    assert (again.resumed, again.next_seq, again.blocks) == (True, 15, process.blocks)
    again.kill()


def test_kvbus_restarts_with_its_blocks_on_a_full_disk(tmp_path: Path) -> None:
    process = started(tmp_path)
    process.publish(5)
    process.kill()
    with room_for(100):
        again = Process(tmp_path)
        assert again.resumed
        assert again.next_seq == 5
        assert again.state.failed
        assert again.relay.records is None
        again.kill()
    later = Process(tmp_path)
    assert not later.resumed, "it would be older than what was sent"
    later.kill()


def test_the_first_start_on_a_full_disk_begins_a_state_when_there_is_space(tmp_path: Path) -> None:
    with room_for(100):
        process = Process(tmp_path)
        assert process.state.failed
        process.connect()
        process.publish(3)
    process.now += RETRY_SECONDS
    checkpointed(process)
    process.kill()
    again = Process(tmp_path)
    assert (again.resumed, again.next_seq) == (True, 3)
    again.kill()


def test_seqs_inside_a_state_are_not_answered_from_the_journal_after_a_restart(tmp_path: Path) -> None:
    """After a restart, kvbus answers a request for seqs inside a state with a complete state, not from the journal.

    A router was reading the state when kvbus was killed, and requests the rest by a replay.
    """
    process = started(tmp_path)
    process.publish(20)
    stream = process.relay.outputs[0].streams[0]
    long, stream.journal = stream.journal, Journal(15, 10**6)
    for seq in range(20):
        stream.journal.append(seq, there(long.at(long.position(seq))).payload)
    (command,) = process.relay.handle(ReplayAsked(0, 0, [b"id", b"", (3).to_bytes(8, "big")]), 1.0)
    assert isinstance(command, AnswerReplay)
    assert reading(process.relay, command).next_message() is not None
    process.publish(2)
    process.kill()
    again = Process(tmp_path)
    assert again.next_seq == 22
    restored = again.relay.outputs[0].streams[0]
    assert (3 in restored.incomplete, 4 in restored.incomplete, 20 in restored.incomplete) == (False, True, False)
    (command,) = again.relay.handle(ReplayAsked(0, 0, [b"id", b"", (4).to_bytes(8, "big")]), 1.0)
    assert isinstance(command, AnswerReplay)
    router = PlainSetRouter()
    answer = reading(again.relay, command)
    while (message := answer.next_message()) is not None and message[-2] != END_SEQ:
        router.apply(int.from_bytes(message[-2], "big"), message[-1])
    assert answer.outcome == "compacted"
    assert {block for _, _, block in router.blocks} == again.blocks
    assert router.violations == []


def test_changed_sources_begin_a_new_checkpoint(tmp_path: Path) -> None:
    process = started(tmp_path / "first")
    process.publish(20)
    process.state.rename(["other", "routers"])
    while process.state.busy:
        process.state.work()
    process.publish(5)
    process.kill()
    other = copied(tmp_path / "first", tmp_path / "second")
    again = Process(tmp_path / "first", ["other", "routers"])
    assert (again.resumed, again.next_seq, again.blocks) == (True, 25, process.blocks)
    again.kill()
    late = Process(other)
    assert "another configuration" in late.unusable
    late.kill()


@pytest.mark.parametrize("in_order", [True, False])
def test_kvbus_may_end_during_the_first_checkpoint_after_a_change_of_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_order: bool
) -> None:
    """kvbus ends during the first checkpoint after its sources have changed. The previous state is of other sources.

    A graceful end writes the rest of the checkpoint; a kill leaves no state.
    """
    process = started(tmp_path)
    process.publish(20)
    monkeypatch.setattr(writer, "SLICE_SECONDS", 0.0)
    process.state.rename(["other", "routers"])
    assert process.state.busy
    if in_order:
        process.state.close()
    process.kill()
    again = Process(tmp_path, ["other", "routers"])
    assert (again.resumed, again.store.refused) == (in_order, 0)
    assert (again.next_seq, again.blocks) == ((20, process.blocks) if in_order else (0, set()))
    again.kill()


@pytest.mark.parametrize("sync", [False, True])
def test_a_state_of_an_earlier_boot_is_current_only_if_it_was_synced(tmp_path: Path, *, sync: bool) -> None:
    older: list[bool] = []
    for boot in (1, 1, 2):
        relay = make_relay()
        with opened(tmp_path, sync=sync, boot=bytes([boot] * 16)) as store:
            state = StateWriter(store, lambda: 0.0)
            assert state.load(relay, NAMES, 0.0) is bool(older)
            older.append(store.older)
            state.begin(relay)
            relay.handle(Subscribed(0, 0, (1,)), 1.0)  # the state that the router gets uses seqs
            state.flush()
    assert older == [False, False, not sync]


def test_loading_a_state_does_not_change_it(tmp_path: Path) -> None:
    """Loading a state does not change it.

    Until all endpoints are bound, kvbus does not know whether this process will use the state.
    """
    process = started(tmp_path)
    process.publish(20)
    process.kill()
    before = rows(tmp_path)
    for names in (NAMES, ["other", "routers"]):
        with opened(tmp_path) as store:
            if names is NAMES:
                assert StateWriter(store, lambda: 0.0).load(make_relay(), names, 0.0)
            else:
                with pytest.raises(StoreError):
                    StateWriter(store, lambda: 0.0).load(make_relay(), names, 0.0)
        assert rows(tmp_path) == before


def test_loading_a_state_stops_when_kvbus_is_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    process = started(tmp_path)
    process.publish(20)
    process.kill()
    asked = itertools.count()
    before = rows(tmp_path)
    with opened(tmp_path) as store, pytest.raises(StoppedError):
        StateWriter(store, lambda: 0.0, lambda: next(asked) > 10).load(make_relay(), NAMES, 0.0)
    assert rows(tmp_path) == before
    assert f"reading the state in {tmp_path}" in caplog.text
    again = Process(tmp_path)
    assert (again.resumed, again.next_seq) == (True, 20)
    assert "state read: 14 blocks, " in caplog.text
    again.kill()


def test_no_checkpoint_begins_while_delivered_batches_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvbus begins no checkpoint while delivered batches wait to be handled.

    The checkpoint would record them as handled, so they would be lost if kvbus was killed before.
    """
    process = started(tmp_path)
    process.publish(10)
    count = 3 * SLICE
    held_back(process, count)
    assert process.relay.backlog
    monkeypatch.setattr(process.store, "checkpoint_after", 0)
    process.state.flush()
    checkpointed(process)
    process.kill()
    again = Process(tmp_path)
    known = again.relay.sources[0].sequencer.next
    assert again.blocks == set(range(known)) - {seq - 1 for seq in range(2, 10, 3)}
    again.kill()


def test_a_possibly_old_state_is_announced_again_when_its_engine_is_in_sync(
    tmp_path: Path,
) -> None:
    process = started(tmp_path)
    process.publish(20)
    process.kill()
    again = Process(tmp_path)
    relay = again.relay
    relay.resume_at(lambda _output, _stream: 5000)
    router = PlainSetRouter()
    sent = [command for command in relay.handle(Started(1.0), 1.0) if isinstance(command, Publish)]
    assert [command.seq for command in sent] == [5000]
    (question,) = [each for each in relay.handle(SourceUp(0), 1.0) if isinstance(each, RequestReplay)]
    journal = process.relay.outputs[0].streams[0].journal
    answer = [
        [b"", b"", seq.to_bytes(8, "big"), there(journal.at(journal.position(seq))).payload]
        for seq in range(question.start, 20)
    ]
    for frames in (*answer, [b"", b"", END_SEQ, b""]):
        sent += [
            command
            for command in relay.handle(ReplayReceived(0, question.request, frames), 1.0)
            if isinstance(command, Publish)
        ]
    for command in sent:
        router.apply(command.seq, command.payload)
    assert [command.seq for command in sent] == list(range(5000, 5000 + len(sent)))
    assert {block for _, _, block in router.blocks} == again.blocks == process.blocks
    again.kill()
