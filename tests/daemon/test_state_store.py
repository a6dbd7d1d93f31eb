"""``state_dir`` on a real file system: what is written comes back, what is damaged is refused and nothing else suffers."""

from __future__ import annotations

import errno
import itertools
import os
import resource
from pathlib import Path

import pytest

from kvbus.core.commands import AnswerReplay, Publish, RequestReplay
from kvbus.core.events import BatchReceived, ReplayAsked, ReplayReceived, SourceUp, Started, Subscribed, Tick
from kvbus.core.normalizing.rules import Rules
from kvbus.core.outputs.journal import Journal
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import SLICE, Relay
from kvbus.core.sequencing.fingerprints import RING
from kvbus.core.sequencing.settings import Settings
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.encoding import encode_batch, encode_value
from kvbus.core.wire.frames import END_SEQ
from kvbus.core.wire.profiles import Profile
from kvbus.core.wire.schema import BlockRemoved, BlockStored
from kvbus.core.write_ahead_log import StateError
from kvbus.daemon import state_store as statestore
from kvbus.daemon.disk import Disk
from kvbus.daemon.generations import SPARE
from kvbus.daemon.state_store import StateStore
from tests.doubles.answers import reading
from tests.doubles.disk import Machine, MemoryDisk, PowerCut
from tests.doubles.router import PlainSetRouter
from tests.long import sample
from tests.typed import there

NAMES = ["engine", "routers"]


def make_relay() -> Relay:
    return Relay(
        [SourceSpec("engine", 0, Settings(), Rules())], [OutputSpec("routers", Profile(), [None], heartbeat=0)]
    )


def stored(block: int, tokens: int = 4) -> BlockStored:
    return BlockStored((block,), None, encode_value([block] * tokens), tokens, None, "GPU", None, 0)


class Process:
    """One life of kvbus over the directory: a relay, its store, an engine that counts."""

    def __init__(self, directory: Path, names: list[str] = NAMES) -> None:
        self.relay = make_relay()
        self.store = StateStore(directory, names)
        self.unusable = ""
        try:
            self.resumed = self.store.load(self.relay, 0.0)
        except StateError as error:
            self.relay, self.resumed, self.unusable = make_relay(), False, str(error)
        self.store.begin(self.relay)

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
        """Store a block a batch; every third batch also removes the block before. All may be written ``together``."""
        for _ in range(count):
            seq = self.relay.sources[0].sequencer.next
            events: list[BlockStored | BlockRemoved] = [stored(seq, tokens)]
            if seq % 3 == 2:
                events.append(BlockRemoved((seq - 1,), "GPU", 0))
            payload = encode_batch(events, 1.0 + seq, 0)
            self.relay.handle(BatchReceived(0, [b"", seq.to_bytes(8, "big"), payload]), 1.0)
            if not together:
                self.store.flush()
        self.store.flush()

    def subscribe(self) -> None:
        """A router comes: the state that it is sent takes numbers."""
        self.relay.handle(Subscribed(0, 0, (1,)), 1.0)
        self.store.flush()

    def kill(self) -> None:
        """What the kernel has is what there is: nothing is closed in order."""
        self.relay.keep_records(keep=False)
        self.store.close()


def started(directory: Path) -> Process:
    process = Process(directory)
    process.connect()
    while process.store.busy:  # the checkpoint is written in slices, a few milliseconds each
        process.store.work()
    return process


class Copy:
    """What the kernel has of a directory at some moment, to be put elsewhere."""

    def __init__(self, directory: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in directory.iterdir()}

    def put(self, directory: Path, **other: bytes) -> Path:
        """Put the files into a new directory, some with another content: ``log``, ``dump``, ``commit``."""
        directory.mkdir()
        for name, content in self.files.items():
            (directory / name).write_bytes(other.get(name.rpartition(".")[2], content))
        return directory


def refused(directory: Path, names: list[str] = NAMES) -> str:
    """Why the state there is not loaded; it was moved aside."""
    process = Process(directory, names)
    process.kill()
    assert process.unusable
    assert process.store.refused == len(list(directory.glob("*.refused-*")))
    return process.unusable


def the_files(directory: Path, kind: str) -> list[Path]:
    return sorted(directory.glob(f"*.{kind}"))


def test_nothing_is_there_at_first(tmp_path: Path) -> None:
    process = Process(tmp_path / "made" / "here")
    assert not process.resumed
    assert process.next_seq == 0


def test_after_a_kill_everything_is_as_it_was(tmp_path: Path) -> None:
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


def test_a_kill_at_any_byte_of_the_log_loses_only_what_was_never_sent(tmp_path: Path) -> None:
    process = started(tmp_path / "first")
    (log,) = the_files(tmp_path / "first", "log")
    before = Copy(tmp_path / "first")
    for count in range(1, 6):
        process.publish(1)
        whole = log.read_bytes()
        for end in sample(range(len(before.files[log.name]), len(whole) + 1), 7):
            again = Process(before.put(tmp_path / f"{count}-{end}", log=whole[:end]))
            assert again.resumed
            assert again.next_seq == (count if end == len(whole) else count - 1)
            again.kill()
        before = Copy(tmp_path / "first")
    process.kill()


def test_a_log_that_is_shorter_than_what_was_sent_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    process = started(tmp_path / "first")
    process.publish(5)
    process.kill()
    copy = Copy(tmp_path / "first")
    whole = copy.files["state-1.log"]
    for end in sample(range(len(whole)), 7):
        assert "state-1.log" in refused(copy.put(tmp_path / f"{end}", log=whole[:end]))


@pytest.mark.parametrize(("count", "tokens"), [(300, 4), (1500, 16), (40, 2000), (5, 40_000)])
def test_many_batches_written_at_a_time_come_back_or_none_of_them(tmp_path: Path, count: int, tokens: int) -> None:
    """However many pieces and calls a frame takes: nothing of it was sent before all of it was written."""
    process = started(tmp_path / "first")
    process.publish(3, tokens=tokens)
    (log,) = the_files(tmp_path / "first", "log")
    before = Copy(tmp_path / "first")
    first = log.stat().st_size
    process.publish(count, tokens=tokens, together=True)
    process.kill()
    whole = log.read_bytes()
    for end in {*range(first, len(whole), (len(whole) - first) // 7), len(whole) - 1, len(whole)}:
        again = Process(before.put(tmp_path / f"{end}", log=whole[:end]))
        assert again.next_seq == (3 + count if end == len(whole) else 3)
        assert again.blocks == process.blocks or end < len(whole)
        again.kill()


def test_what_was_held_back_behind_a_gap_comes_back_however_much_it_was(tmp_path: Path) -> None:
    """More is delivered at a time than fingerprints are kept of, and handled in slices."""
    process = started(tmp_path)
    process.publish(10)
    payloads = [encode_batch([stored(seq)], 1.0 + seq, 0) for seq in range(10, 10 + 3 * RING)]
    asked = []
    for seq, payload in enumerate(payloads[1:], 11):
        asked += process.relay.handle(BatchReceived(0, [b"", seq.to_bytes(8, "big"), payload]), 1.0)
    (question,) = [command for command in asked if isinstance(command, RequestReplay)]
    missing = [b"", b"", (10).to_bytes(8, "big"), payloads[0]]
    process.relay.handle(ReplayReceived(0, question.request, missing), 1.0)
    while process.relay.backlog:
        process.relay.handle(Tick(1.0), 1.0)
    process.store.flush()
    assert process.next_seq == 10 + 3 * RING
    process.kill()
    again = Process(tmp_path)
    assert (again.next_seq, again.blocks) == (process.next_seq, process.blocks)
    again.kill()


@pytest.mark.parametrize("written", [0, 1, 16, 59, 60])
def test_a_kill_before_a_new_log_is_committed_loses_nothing(tmp_path: Path, written: int) -> None:
    process = started(tmp_path)
    process.publish(20)
    process.kill()
    (log,) = the_files(tmp_path, "log")
    (tmp_path / "state-2.log").write_bytes(log.read_bytes()[:written])
    again = Process(tmp_path)
    assert again.resumed
    assert again.store.refused == 0
    assert again.blocks == process.blocks
    assert again.next_seq == 20
    again.subscribe()
    again.kill()
    assert Process(tmp_path).next_seq == again.next_seq > 20


def test_a_kill_before_the_checkpoint_is_complete_loses_nothing_however_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = started(tmp_path)
    process.publish(20)
    process.kill()
    monkeypatch.setattr(StateStore, "_go_on", lambda *_, **__: None)
    for count in range(1, 5):
        again = Process(tmp_path)
        assert again.next_seq == process.next_seq
        again.subscribe()
        assert again.next_seq > process.next_seq
        again.kill()
        assert len(the_files(tmp_path, "log")) == 1 + count
        process = again
    copy = Copy(tmp_path)
    whole = Process(tmp_path)
    assert whole.resumed
    assert (whole.next_seq, whole.blocks) == (process.next_seq, process.blocks)
    whole.kill()
    for number in range(1, 6):
        copy.put(tmp_path / f"{number}").joinpath(f"state-{number}.log").unlink()
        assert "missing" in refused(tmp_path / f"{number}")


@pytest.mark.parametrize("position", [*range(3, 100, 7)])
def test_a_log_of_which_a_byte_is_another_is_refused(tmp_path: Path, position: int) -> None:
    process = started(tmp_path)
    process.publish(5)
    process.kill()
    (log,) = the_files(tmp_path, "log")
    body = bytearray(log.read_bytes())
    body[position] ^= 0xFF
    log.write_bytes(body)
    assert refused(tmp_path)


@pytest.mark.parametrize("position", [3, 20, 40, -3])
def test_a_damaged_dump_is_refused_and_moved_aside(tmp_path: Path, position: int) -> None:
    process = started(tmp_path)
    process.publish(5)
    process.kill()
    Process(tmp_path).kill()  # a dump with blocks in it
    (dump,) = the_files(tmp_path, "dump")
    body = bytearray(dump.read_bytes())
    body[position] ^= 0xFF
    dump.write_bytes(body)
    aside = {path.name for kind in ("dump", "log") for path in the_files(tmp_path, kind)}
    assert refused(tmp_path)
    assert {path.name.partition(".refused-")[0] for path in tmp_path.glob("*.refused-*")} == aside
    again = Process(tmp_path)
    assert again.resumed
    assert not again.blocks
    again.kill()


def test_the_state_of_another_configuration_is_refused(tmp_path: Path) -> None:
    process = started(tmp_path)
    process.publish(5)
    process.kill()
    assert "another configuration" in refused(tmp_path, ["other", "routers"])


def test_logs_are_rotated_and_both_count_until_the_dump_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statestore, "MIN_ROTATE", 500)
    process = started(tmp_path)
    process.publish(30)
    process.store.work()  # begins the next generation
    process.publish(10)
    before = Copy(tmp_path)
    while process.store.busy:
        process.store.work()
    process.publish(3)
    process.kill()
    assert len(the_files(tmp_path, "dump")) == len(the_files(tmp_path, "log")) == 1
    late = Process(tmp_path)
    assert late.blocks == process.blocks
    assert late.next_seq == 43
    early = Process(before.put(tmp_path / "early"))
    assert early.next_seq == 40
    late.kill()
    early.kill()


def written(path: Path) -> int:
    """How far this process has written a file it has open; what an older one left may lie behind."""
    (descriptor,) = [int(fd.name) for fd in Path("/proc/self/fd").iterdir() if fd.resolve() == path]
    return os.lseek(descriptor, 0, os.SEEK_CUR)


def rotated(process: Process) -> None:
    process.store.work()
    while process.store.busy:
        process.store.work()


def test_a_log_written_over_an_older_one_may_be_killed_at_any_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statestore, "MIN_ROTATE", 100)
    process = started(tmp_path / "first")
    for count in (20, 100):
        process.publish(count)
        rotated(process)
    spare = tmp_path / "first" / SPARE
    older = spare.read_bytes()
    process.publish(300)
    rotated(process)
    (log,) = the_files(tmp_path / "first", "log")
    for count in range(1, 4):
        before, begin = Copy(tmp_path / "first"), written(log)
        process.publish(1)
        end, whole = written(log), log.read_bytes()
        assert whole[end:] == older[end:] != b""
        for at in sample(range(begin, end + 1), 7):
            torn = whole[:at] + older[at:]
            again = Process(before.put(tmp_path / f"{count}-{at}", log=torn))
            # what the older log has in common with the end of a frame makes that frame whole
            assert again.next_seq == 420 + count - (torn[:end] != whole[:end])
            again.kill()
    process.kill()
    last = Copy(tmp_path / "first")
    for at in sample(range(begin), 7):
        changed = whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]
        assert refused(last.put(tmp_path / f"damaged-{at}", log=changed))


def test_a_disk_that_is_full_costs_the_state_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = started(tmp_path)
    process.publish(5)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    process.publish(5)
    monkeypatch.undo()
    process.publish(5)
    assert process.next_seq == 15
    assert process.store.failed
    assert "No space left on device" in caplog.text
    assert process.store.refused == 0
    # what is out of date does not keep the disk full
    assert [path.name for path in tmp_path.iterdir()] == ["commit"]
    process.kill()
    # what is on disk is older than what was sent: it must not be taken for the truth
    assert not Process(tmp_path).resumed


@pytest.mark.parametrize("room", [0, 40])
def test_a_disk_that_is_full_at_the_start_costs_the_state_and_not_the_relay(tmp_path: Path, room: int) -> None:
    """Not even the head of a file fits, or only that."""
    process = started(tmp_path)
    process.publish(5)
    process.kill()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        again = Process(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert again.resumed
    assert again.next_seq == 5
    assert again.store.failed
    assert again.relay.records is None
    again.store.close()
    # what is on disk is older than what was sent: it must not be taken for the truth
    assert not Process(tmp_path).resumed


def test_the_highest_reserved_seq_outlives_the_state(tmp_path: Path) -> None:
    process = started(tmp_path)
    process.store.reserve(70_000)
    process.store.reserve(60_000)
    process.kill()
    process.store.reserve(80_000)  # it is closed
    again = StateStore(tmp_path, ["another configuration"])
    with pytest.raises(StateError):
        again.load(make_relay(), 0.0)
    assert again.reserved == 70_000
    again.close()


def test_a_reservation_that_cannot_be_written_costs_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = started(tmp_path)

    def full(_disk: Disk, _fd: int, _data: bytes, _at: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Disk, "pwrite", full)
    process.store.reserve(70_000)
    assert process.store.failed
    assert process.relay.records is None


def test_numbers_that_were_told_as_a_state_are_not_given_by_the_journal_after_a_restart_either(tmp_path: Path) -> None:
    """Whoever was being told when the process was killed asks on from where it is."""
    process = started(tmp_path)
    process.publish(20)
    stream = process.relay.outputs[0].streams[0]
    long, stream.journal = stream.journal, Journal(15, 10**6)
    for seq in range(20):
        stream.journal.append(seq, there(long.at(long.position(seq))).payload)
    (command,) = process.relay.handle(ReplayAsked(0, 0, [b"id", b"", (3).to_bytes(8, "big")]), 1.0)
    assert isinstance(command, AnswerReplay)
    assert reading(lambda event: process.relay.handle(event, 1.0), command).next_message() is not None
    process.publish(2)
    process.kill()
    again = Process(tmp_path)
    assert again.next_seq == 22
    restored = again.relay.outputs[0].streams[0]
    assert (3 in restored.incomplete, 4 in restored.incomplete, 20 in restored.incomplete) == (False, True, False)
    (command,) = again.relay.handle(ReplayAsked(0, 0, [b"id", b"", (4).to_bytes(8, "big")]), 1.0)
    assert isinstance(command, AnswerReplay)
    router = PlainSetRouter()
    answer = reading(lambda event: again.relay.handle(event, 1.0), command)
    while (message := answer.next_message()) is not None and message[-2] != END_SEQ:
        router.apply(int.from_bytes(message[-2], "big"), message[-1])
    assert answer.outcome == "compacted"
    assert {block for _, _, block in router.blocks} == again.blocks
    assert router.violations == []


def test_a_disk_that_is_full_when_a_generation_begins_costs_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = started(tmp_path)
    process.publish(20)
    monkeypatch.setattr(statestore, "MIN_ROTATE", 0)
    monkeypatch.setattr(process.store, "_checkpoint_end", 0)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    process.store.work()
    assert process.store.failed
    monkeypatch.undo()
    process.store.work()  # nothing more is written
    assert not process.store.busy
    assert [path.name for path in tmp_path.iterdir()] == ["commit"]
    process.kill()
    assert not Process(tmp_path).resumed


def test_changed_sources_begin_a_generation_of_their_own(tmp_path: Path) -> None:
    process = started(tmp_path / "first")
    process.publish(20)
    process.store.rename(["other", "routers"])
    while process.store.busy:
        process.store.work()
    process.publish(5)
    process.kill()
    copy = Copy(tmp_path / "first")
    again = Process(tmp_path / "first", ["other", "routers"])
    assert (again.resumed, again.next_seq, again.blocks) == (True, 25, process.blocks)
    again.kill()
    assert "another configuration" in refused(copy.put(tmp_path / "second"))


def test_a_shutdown_in_the_midst_of_the_first_checkpoint_of_changed_sources_leaves_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state before it is of other sources. A slice may be one frame long, where the machine is busy."""
    process = started(tmp_path)
    process.publish(20)
    late = itertools.count(step=0.002)
    monkeypatch.setattr("kvbus.daemon.state_store.time.perf_counter", lambda: next(late))
    process.store.rename(["other", "routers"])
    assert process.store.busy
    process.store.close()
    again = Process(tmp_path, ["other", "routers"])
    assert (again.resumed, again.next_seq, again.blocks) == (True, 20, process.blocks)
    again.kill()


def test_a_file_that_cannot_be_deleted_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = started(tmp_path)
    (dump,) = the_files(tmp_path, "dump")
    dump.unlink()
    dump.mkdir()
    process.store.fail(OSError(28, "No space left on device"))
    assert f"{dump} is out of date, delete it: " in caplog.text
    process.kill()


class Boot(Disk):
    """The real disk in a boot of the machine; it counts what it is asked to sync."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.synced = 0

    def boot_id(self) -> bytes:
        return bytes([self.number] * 16)

    def sync(self, fd: int) -> None:
        self.synced += 1
        super().sync(fd)


@pytest.mark.parametrize("sync", [False, True])
def test_after_another_boot_only_a_synced_state_is_as_new_as_what_was_sent(tmp_path: Path, *, sync: bool) -> None:
    older: list[bool] = []
    for boot in (1, 1, 2):
        disk, relay = Boot(boot), make_relay()
        store = StateStore(tmp_path, NAMES, disk, sync=sync)
        assert store.load(relay, 0.0) is bool(older)
        older.append(store.may_be_older)
        store.begin(relay)
        before = disk.synced
        relay.handle(Subscribed(0, 0, (1,)), 1.0)  # the state that a router is sent takes numbers
        store.flush()
        assert (disk.synced > before) is sync
        store.close()
    assert older == [False, False, not sync]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_state_that_is_only_loaded_stays_as_it_was(tmp_path: Path) -> None:
    """Until everything is bound it is not known whether this process is to go on with it."""
    process = started(tmp_path)
    process.publish(20)
    process.kill()
    before = contents(tmp_path)
    relay, store = make_relay(), StateStore(tmp_path, NAMES)
    assert store.load(relay, 0.0)
    store.close()
    assert contents(tmp_path) == before
    (log,) = the_files(tmp_path, "log")
    log.write_bytes(log.read_bytes()[:90] + b"\xff" + log.read_bytes()[91:])
    before = contents(tmp_path)
    store = StateStore(tmp_path, NAMES)
    with pytest.raises(StateError, match="damaged"):
        store.load(make_relay(), 0.0)
    store.close()
    assert contents(tmp_path) == before


def test_one_refused_state_is_kept_and_no_older_one(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        process = Process(tmp_path, [name, "routers"])
        process.connect()
        process.publish(3)
        process.kill()
    assert process.store.refused == len(list(tmp_path.glob("*.refused-*"))) == 2


def test_a_log_whose_dump_is_gone_is_refused(tmp_path: Path) -> None:
    process = started(tmp_path)
    process.publish(5)
    process.kill()
    (dump,) = the_files(tmp_path, "dump")
    dump.unlink()
    assert "the checkpoint is missing" in refused(tmp_path)
    process = Process(tmp_path)
    assert process.resumed
    process.connect()
    process.publish(3)
    process.kill()
    again = Process(tmp_path)
    assert again.next_seq == 3
    again.kill()


def test_the_files_of_another_version_are_refused_with_a_sentence(tmp_path: Path) -> None:
    """It wrote no commit record, or one of its own."""
    dump, commit = tmp_path / "state-3.dump", tmp_path / "commit"
    sentence = "state-3.dump is of version 009, and this kvbus reads version 013"
    dump.write_bytes(b"kvbus-state-009\n" + bytes(100))
    assert refused(tmp_path) == sentence
    dump.write_bytes(b"kvbus-state-009\n" + bytes(100))
    commit.write_bytes(b"kvbus-commit-00\n" + bytes(1000))
    assert refused(tmp_path) == sentence
    commit.write_bytes(b"kvbus-commit-00\n" + bytes(1000))
    assert refused(tmp_path) == "the commit record is damaged, or of another version"
    dump.write_bytes(b"kvbus-state-013\n" + bytes(100))
    commit.unlink(missing_ok=True)
    assert refused(tmp_path) == "there is no commit record"


def test_no_dump_begins_while_batches_wait_to_be_handled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would say that they were delivered, and a kill before they are would lose them without a word."""
    process = started(tmp_path)
    process.publish(10)
    count = 3 * SLICE
    payloads = [encode_batch([stored(seq)], 1.0 + seq, 0) for seq in range(10, 10 + count)]
    asked = []
    for seq, payload in enumerate(payloads[1:], 11):
        asked += process.relay.handle(BatchReceived(0, [b"", seq.to_bytes(8, "big"), payload]), 1.0)
    (question,) = [command for command in asked if isinstance(command, RequestReplay)]
    missing = [b"", b"", (10).to_bytes(8, "big"), payloads[0]]
    process.relay.handle(ReplayReceived(0, question.request, missing), 1.0)
    assert process.relay.backlog
    monkeypatch.setattr(statestore, "MIN_ROTATE", 0)
    process.store.flush()
    rotated(process)
    process.kill()
    again = Process(tmp_path)
    known = again.relay.sources[0].sequencer.next
    assert again.blocks == set(range(known)) - {seq - 1 for seq in range(2, 10, 3)}
    again.kill()


def test_a_state_that_routers_may_be_ahead_of_is_cleared_and_announced_when_the_engine_is_in_sync(
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


def test_a_process_that_is_killed_while_it_begins_leaves_nothing_to_refuse():
    """Nothing has left by then. Between the checkpoint's name and its commit it looked like a state that was given up."""
    operations = 0
    killed = True
    while killed:
        operations += 1
        machine = Machine(operations)
        for _ in range(2):
            store = StateStore(Path("/state"), NAMES, MemoryDisk(machine, operations))
            killed = False
            try:
                store.load(make_relay(), 0.0)
                store.begin(make_relay())
            except PowerCut:
                killed = True
            assert store.refused == 0
        again = StateStore(Path("/state"), NAMES, MemoryDisk(machine, None))
        assert again.load(make_relay(), 0.0) or killed
        again.begin(make_relay())
        assert again.refused == 0
    assert operations > 10
