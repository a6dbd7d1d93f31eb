"""Tests for damaged state files: kvbus loads an exact state or refuses and counts it, and uses no seq twice.

The files are those that a daemon leaves when it is killed between two batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.common.errors import StateDirError
from kvbus.config import Config, load
from kvbus.core.commands import Publish
from kvbus.core.events import BatchReceived
from kvbus.daemon.daemon import Daemon
from kvbus.state import sqlite, writer
from kvbus.state.contract import StoreError
from kvbus.state.directory import Base, name_of
from kvbus.state.lock import HEAD_BYTES
from kvbus.state.sqlite import RESERVE_AHEAD, UNKNOWN, SqliteStore
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import removed, store
from tests.long import LONG, sample
from tests.state.left import immutable, opened, reserve

BATCHES = 80
DATABASE = "state.db"
WAL = "state.db-wal"


class Left(NamedTuple):
    """The files of a killed process, and the blocks and next seq that the process had."""

    directory: Path
    older: Path
    """Directory with a copy of the process's state files from an earlier moment."""
    config: Config
    blocks: set[int | bytes]
    next_seq: int


def blocks_of(daemon: Daemon) -> set[int | bytes]:
    return {block for table in daemon.relay.sources[0].normalizer.index.tables.values() for block in table.blocks}


def next_seq_of(daemon: Daemon) -> int:
    return daemon.relay.outputs[0].streams[0].next_seq


def fed(daemon: Daemon, first: int, count: int) -> None:
    """Feed batches of the engine. Each stores a block, and nearly all remove the previous block."""
    for n in range(first, first + count):
        events = [store([n]), *([removed([n - 1])] if n % 32 else [])]
        daemon.feed(BatchReceived(0, [b"", n.to_bytes(8, "big"), batch(*events)]))


def checkpointed(daemon: Daemon) -> None:
    assert daemon.state is not None
    daemon.state.work()
    while daemon.state.busy:
        daemon.state.work()


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    return asyncio.run(killed(tmp_path_factory.mktemp("left")))


async def killed(base: Path) -> Left:
    """Run a daemon that writes several checkpoints, and a write-ahead log after them, and kill it.

    Return the files that it leaves. The last checkpoint is incomplete.
    """
    config = load(
        None,
        env={},
        overrides={
            "sources": [{"endpoint": f"ipc://{base}/engine"}],
            "outputs": [{"endpoint": f"ipc://{base}/live", "heartbeat": 0}],
            "http": None,
            "on_lost": "keep",
            "state_dir": str(base / "running"),
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite, "CHECKPOINT_AFTER", 100)
        daemon = Daemon(config)
        await daemon.start()
        assert isinstance(daemon.store, SqliteStore)
        # The small limit makes the database and its log each have data that the other lacks.
        daemon.store.database.run("PRAGMA wal_autocheckpoint = 40")
        for number in range(3):
            fed(daemon, BATCHES * number, BATCHES)
            checkpointed(daemon)
            if number == 1:
                shutil.copytree(base / "running", base / "older")
        fed(daemon, BATCHES * 3, BATCHES)
        patch.setattr(writer, "SLICE_SECONDS", 0.0)
        assert daemon.state is not None
        daemon.state.work()
        assert daemon.state.busy
        fed(daemon, BATCHES * 4, BATCHES)
        # this batch needs a new reservation, so the older copy has not reserved the seqs that were sent
        daemon.reservations.use(0, 0, next_seq_of(daemon) + RESERVE_AHEAD)
        shutil.copytree(base / "running", base / "left")
        blocks, next_seq = blocks_of(daemon), next_seq_of(daemon)
        await daemon.close(drain=0)
    return Left(base / "left", base / "older", config, blocks, next_seq)


async def started_again(left: Left, directory: Path) -> str:
    """Start a daemon on a copy of the state directory, and check that it uses no seq twice.

    Return what it did with the saved state: ``exact`` (it has the complete state), ``older`` (its source has
    expired), ``refused``, or ``new`` (there was no state).
    """
    daemon = Daemon(left.config.model_copy(update={"state_dir": str(directory)}))
    sent: list[int] = []
    try:
        carry_out = daemon.carry_out

        def watched(commands: list[object]) -> None:
            sent.extend(command.seq for command in commands if isinstance(command, Publish))
            carry_out(commands)  # type: ignore[arg-type]

        daemon.carry_out = watched  # type: ignore[assignment, method-assign]
        await daemon.start()
        blocks, following = blocks_of(daemon), next_seq_of(daemon)
        assert following < 2**62
        assert daemon.state is not None
        assert not daemon.state.failed
        if daemon.restored:
            assert (blocks, following, sent) == (left.blocks, left.next_seq, [])
            assert daemon.state.refused == 0
            return "exact"
        if daemon.relay.sources[0].expired:
            return "older"
        assert blocks == set()
        return "refused" if daemon.state.refused else "new"
    finally:
        await daemon.close(drain=0)
        if sent:
            assert sent[0] >= left.next_seq, "a seq was used twice"
            assert len(sent) == 1, "AllBlocksCleared"


def truncated(path: Path, size: int) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: size if size >= 0 else len(whole) + size])


def flipped(path: Path, byte: int, bit: int = 3) -> None:
    whole = bytearray(path.read_bytes())
    whole[byte] ^= 1 << bit
    path.write_bytes(whole)


def appended(path: Path, more: bytes) -> None:
    path.write_bytes(path.read_bytes() + more)


def copied(path: Path, over: Path) -> None:
    over.write_bytes(path.read_bytes())


def deleted(*paths: Path) -> None:
    for path in paths:
        path.unlink()


def older(directory: Path, left: Left, *names: str) -> None:
    for name in names:
        (directory / name).unlink(missing_ok=True)
        if (left.older / name).exists():
            copied(left.older / name, directory / name)


def sql(directory: Path, *statements: str) -> None:
    """Execute statements on a state's database, as an operator could do with SQLite's command line tool."""
    connection = sqlite3.connect(directory / DATABASE, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def foreign(directory: Path) -> None:
    deleted(directory / DATABASE, directory / WAL)
    sql(directory, "CREATE TABLE head (id, crc, content)", "CREATE TABLE theirs (a)", "INSERT INTO theirs VALUES (1)")


def flipped_and_deleted(directory: Path) -> None:
    flipped(directory / "lock", 20)
    deleted(directory / DATABASE)


DAMAGE: dict[str, tuple[Callable[[Path, Left], object], str]] = {
    "nothing": (lambda at, _: at, "exact"),
    "everything deleted": (lambda at, _: shutil.rmtree(at), "new"),
    "database emptied": (lambda at, _: truncated(at / DATABASE, 0), "refused"),
    "database deleted": (lambda at, _: deleted(at / DATABASE), "refused"),
    "database and its log deleted": (lambda at, _: deleted(at / DATABASE, at / WAL), "refused"),
    "database garbage": (lambda at, _: (at / DATABASE).write_bytes(b"\xa5" * 9000), "refused"),
    "database without its log": (lambda at, _: deleted(at / WAL), "refused"),
    "log emptied": (lambda at, _: truncated(at / WAL, 0), "refused"),
    "garbage behind the log": (lambda at, _: appended(at / WAL, b"\xa5" * 500), "exact"),
    "an older database": (lambda at, left: older(at, left, DATABASE, WAL), "refused"),
    "an older log": (lambda at, left: older(at, left, WAL), "refused"),
    "lock file deleted": (lambda at, _: deleted(at / "lock"), "refused"),
    "lock file emptied": (lambda at, _: truncated(at / "lock", 0), "refused"),
    "mark torn": (lambda at, _: truncated(at / "lock", 40), "refused"),
    "mark flipped": (lambda at, _: flipped(at / "lock", 20), "refused"),
    "mark flipped, database deleted": (lambda at, _: flipped_and_deleted(at), "refused"),
    "a frame deleted": (lambda at, _: sql(at, "DELETE FROM log WHERE id = (SELECT max(id) - 3 FROM log)"), "refused"),
    "the last frame deleted": (
        lambda at, _: sql(at, "DELETE FROM log WHERE id = (SELECT max(id) FROM log)"),
        "refused",
    ),
    "frames changed places": (
        lambda at, _: sql(
            at,
            "UPDATE log SET id = -1 WHERE id = (SELECT max(id) FROM log)",
            "UPDATE log SET id = id + 1 WHERE id = (SELECT max(id) FROM log)",
            "UPDATE log SET id = (SELECT max(id) - 1 FROM log) WHERE id = -1",
        ),
        "refused",
    ),
    "the checkpoint deleted": (lambda at, _: sql(at, "DELETE FROM slices"), "refused"),
    "a text in place of bytes": (lambda at, _: sql(at, "UPDATE log SET body = 'text'"), "refused"),
    "the head deleted": (lambda at, _: sql(at, "DELETE FROM head"), "refused"),
    "a table deleted": (lambda at, _: sql(at, "DROP TABLE log"), "refused"),
    "of an older version": (lambda at, _: sql(at, "PRAGMA user_version = 0"), "refused"),
    "of another program": (lambda at, _: foreign(at), "refused"),
}


@pytest.mark.parametrize("name", DAMAGE)
async def test_kvbus_loads_a_damaged_state_exactly_or_refuses_it(left: Left, tmp_path: Path, name: str) -> None:
    damage, expected = DAMAGE[name]
    directory = tmp_path / "a"
    shutil.copytree(left.directory, directory)
    damage(directory, left)
    if expected == "new":
        return await started_anew(left, directory)
    assert await started_again(left, directory) == expected
    if expected == "refused":
        aside = [path.name for path in directory.iterdir() if ".refused-" in path.name]
        assert aside or "deleted" in name
    return None


async def started_anew(left: Left, directory: Path) -> None:
    daemon = Daemon(left.config.model_copy(update={"state_dir": str(directory)}))
    await daemon.start()
    assert (daemon.restored, next_seq_of(daemon)) == (False, 0)
    await daemon.close(drain=0)


@pytest.mark.parametrize("name", [DATABASE, WAL])
async def test_a_truncated_state_file_is_noticed(left: Left, tmp_path: Path, name: str) -> None:
    size = (left.directory / name).stat().st_size
    found = set()
    for end in sample([*range(0, size, max(size // 40, 1)), size - 1], 4):
        directory = tmp_path / f"{end}"
        shutil.copytree(left.directory, directory)
        truncated(directory / name, end)
        found.add(await started_again(left, directory))
    assert found <= {"exact", "refused"}, "the end of a file may be pages of which the other one has newer ones"
    assert "refused" in found


@pytest.mark.parametrize("name", [DATABASE, WAL, "lock"])
async def test_a_flipped_bit_in_a_state_file_is_noticed_or_changes_nothing(
    left: Left, tmp_path: Path, name: str
) -> None:
    """After a flipped bit in a state file, kvbus refuses the state or loads it exactly.

    The bit is in a header, in the pointers of a page, in a row, in a checksum, or in an unused page.
    """
    size = HEAD_BYTES if name == "lock" else (left.directory / name).stat().st_size
    places = [*range(0, min(size, 120), 7), *range(120, size, max(size // 60, 1)), size - 1]
    found = set()
    for byte in sample(sorted(set(places)), 4):
        directory = tmp_path / f"{byte}"
        shutil.copytree(left.directory, directory)
        flipped(directory / name, byte, byte % 8)
        found.add(await started_again(left, directory))
    assert found <= {"exact", "refused"}
    assert "refused" in found


async def test_seqs_continue_above_all_sent_seqs_after_repeated_damage(left: Left, tmp_path: Path) -> None:
    directory = tmp_path / "a"
    shutil.copytree(left.directory, directory)
    reached = left.next_seq
    for mark in (False, True, True):
        deleted(directory / DATABASE)
        if mark:
            flipped(directory / "lock", 20)
        config = left.config.model_copy(update={"state_dir": str(directory)})
        daemon = Daemon(config)
        await daemon.start()
        first = daemon.reservations.first(0, 0)
        assert first > reached
        assert (first >= UNKNOWN) is mark
        assert first < 2**53
        daemon.reservations.use(0, 0, first)
        reached = daemon.reservations.first(0, 0)
        await daemon.close(drain=0)


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, _: Path) -> None:
    path.mkdir()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [DATABASE, WAL])
@pytest.mark.parametrize("make", [link, pipe, folder])
async def test_a_link_pipe_or_folder_in_place_of_a_state_file_is_refused(
    left: Left, tmp_path: Path, name: str, make: Callable[[Path, Path], None]
) -> None:
    directory, victim = tmp_path / "a", tmp_path / "victim"
    shutil.copytree(left.directory, directory)
    victim.write_bytes(b"precious")
    (directory / name).unlink()
    make(directory / name, victim)
    assert await started_again(left, directory) == "refused"
    assert victim.read_bytes() == b"precious"


def test_only_the_newest_refused_state_is_kept(tmp_path: Path) -> None:
    for _ in range(3):
        with opened(tmp_path):
            pass
        truncated(tmp_path / DATABASE, 100)
    with opened(tmp_path) as found:
        assert found.refused == len(list(tmp_path.glob("*.refused-*"))) == 1


def test_the_state_files_are_readable_only_by_their_user(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with opened(tmp_path) as found:
            found.append(b"a", b"b")
            assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    finally:
        os.umask(before)


def test_a_database_damaged_while_kvbus_runs_is_moved_aside(tmp_path: Path) -> None:
    with opened(tmp_path) as found:
        for _ in found.checkpoint(["a"], [b"one"] * 50, lambda: False):
            pass
        found.reserved.raise_to(4096)
        found.reserve(found.reserved)
        found.database.run("DROP TABLE log")  # other kinds of damage have no effect while SQLite has the file open
        with pytest.raises(StoreError):
            found.append(b"a", b"b")
        assert found.refused >= 1
        assert list(tmp_path.glob("*.refused-*"))
        for _ in found.checkpoint(["a"], [b"one"], lambda: False):
            pass
        found.append(b"a", b"b")
    with opened(tmp_path) as found:
        got: list[bytes] = []
        assert found.load(["a"], got.append, lambda body, _: got.append(body))
        assert got == [b"one", b"a"]
        assert found.reserved.highest == 4096


def change(draw: st.DrawFn, directory: Path, left: Left) -> None:
    """Apply one random kind of damage to a random file of a state directory."""
    path = draw(st.sampled_from(sorted(directory.iterdir())))
    content = path.read_bytes()
    kind = draw(st.sampled_from(["delete", "truncate", "flip", "overwrite", "append", "older"]))
    if kind == "delete":
        path.unlink()
    elif kind == "truncate":
        path.write_bytes(content[: draw(st.integers(0, max(len(content) - 1, 0)))])
    elif kind == "flip" and content:
        flipped(path, draw(st.integers(0, len(content) - 1)), draw(st.integers(0, 7)))
    elif kind == "overwrite" and content:
        at = draw(st.integers(0, len(content) - 1))
        piece = draw(st.binary(min_size=1, max_size=40))
        path.write_bytes(content[:at] + piece + content[at + len(piece) :])
    elif kind == "append":
        appended(path, draw(st.binary(min_size=1, max_size=100)))
    elif kind == "older" and (left.older / path.name).exists():
        copied(left.older / path.name, path)


@settings(max_examples=60 if LONG else 20, deadline=None)
@given(data=st.data())
def test_random_damage_of_state_files_never_makes_a_seq_go_back(
    left: Left, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random damage of one or more state files, except the lock file, never makes a seq go back.

    The lock file shows which seqs are reserved, even if all other files are damaged.
    """
    directory = tmp_path_factory.mktemp("random") / "a"
    shutil.copytree(left.directory, directory)
    for _ in range(data.draw(st.integers(1, 3))):
        change(data.draw, directory, left)  # type: ignore[arg-type]
    copied(left.directory / "lock", directory / "lock")
    asyncio.run(started_again(left, directory))
    shutil.rmtree(directory)


@pytest.mark.parametrize("state_dir", ["named", "auto", "none"])
async def test_kvbus_refuses_a_state_of_a_newer_version_and_does_not_change_it(
    left: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_dir: str
) -> None:
    """kvbus refuses to start on the state of a newer version, and changes nothing in it.

    It does not try another directory either: the seq reservations there may be lower, so seqs could go back.
    """
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    directory = tmp_path / ("a" if state_dir == "named" else name_of(left.config, Base(tmp_path)))
    shutil.copytree(left.directory, directory)
    directory.chmod(0o700)
    sql(directory, "PRAGMA user_version = 99")
    before = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}
    chosen = {"named": str(directory), "auto": "auto", "none": None}[state_dir]
    config = left.config.model_copy(update={"state_dir": chosen})
    for _ in range(2):
        with pytest.raises(StateDirError, match=r"state\.db is of version 99 and this kvbus reads version 2") as caught:
            Daemon(config)
        assert caught.value.exit_code == 78
    assert before == {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield


@pytest.mark.parametrize(
    ("how", "why"), [(immutable, "it cannot be written: it is read-only"), (locked, "another program has it open")]
)
async def test_an_inaccessible_database_ends_the_start_with_a_reason(
    left: Left, tmp_path: Path, how: Callable[[Path], AbstractContextManager[None]], why: str
) -> None:
    directory = tmp_path / "a"
    shutil.copytree(left.directory, directory)
    with how(directory / DATABASE), pytest.raises(StateDirError, match=f"state.db: {why}"):
        Daemon(left.config.model_copy(update={"state_dir": str(directory)}))
    assert await started_again(left, directory) == "exact"


def test_seqs_continue_above_the_seq_files_of_an_older_kvbus(tmp_path: Path) -> None:
    (tmp_path / "kvbus-0123456789abcdef01234567.seq").write_bytes(b"kvbus-seq-mark-3")
    with opened(tmp_path) as found:
        assert found.refused == 0
        reached = found.reserved.floor
        assert reached > UNKNOWN
    with opened(tmp_path) as again:
        assert again.reserved.floor == reached
        assert not again.older


def test_a_killed_process_leaves_its_seq_reservations(tmp_path: Path) -> None:
    reserve(tmp_path, "routers", 41)
    with opened(tmp_path) as found:
        assert found.reserved.streams["routers"].number == 41 + RESERVE_AHEAD
