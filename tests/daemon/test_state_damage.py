"""Whatever happens to the files: the state is exact or refused and counted, and no seq is used twice.

The directory is what a daemon left that was killed between two batches: a copy of what the kernel had.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.common.errors import StateDirError
from kvbus.config import Config, load
from kvbus.core.commands import Publish
from kvbus.core.events import BatchReceived
from kvbus.core.write_ahead_log import Frame, StateError
from kvbus.daemon import state_store
from kvbus.daemon.daemon import Daemon
from kvbus.daemon.disk import Disk
from kvbus.daemon.generations import SPARE
from kvbus.daemon.seq_reservation import AHEAD
from kvbus.daemon.state_file import ID_BYTES, StateFile, header, identity, other_version, write_frame
from kvbus.daemon.state_keys import NO_KEYS, StateKeys
from tests.daemon.test_disk import OTHER_THAN_A_FILE
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import removed, store
from tests.long import LONG, sample
from tests.ports import free_ports

ROTATIONS = 3
BATCHES = 80


class Left(NamedTuple):
    """What a killed process left, and what it knew."""

    directory: Path
    older: Path
    """The same files at an earlier moment of the same process."""
    config: Config
    blocks: set[int | bytes]
    next_seq: int


def blocks_of(daemon: Daemon) -> set[int | bytes]:
    return {block for table in daemon.relay.sources[0].normalizer.index.tables.values() for block in table.blocks}


def next_seq_of(daemon: Daemon) -> int:
    return daemon.relay.outputs[0].streams[0].next_seq


def fed(daemon: Daemon, first: int, count: int) -> None:
    """Batches of the engine, each of which stores a block; nearly all remove the one before."""
    for n in range(first, first + count):
        events = [store([n]), *([removed([n - 1])] if n % 32 else [])]
        daemon.feed(BatchReceived(0, [b"", n.to_bytes(8, "big"), batch(*events)]))


def rotated(daemon: Daemon) -> None:
    assert daemon.state is not None
    daemon.state.work()
    while daemon.state.busy:
        daemon.state.work()


@pytest.fixture(scope="module", params=["clear", "sealed"])
def left(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Left:
    base = tmp_path_factory.mktemp("left")
    key_file = base / "state.key"
    key_file.write_text("07" * 32)
    key_file.chmod(0o600)
    return asyncio.run(killed(base, key_file if request.param == "sealed" else None))


async def killed(base: Path, key_file: Path | None) -> Left:
    """Rotated so often that there is a spare, and killed while two logs count."""
    engine, live = free_ports(2)
    config = load(
        None,
        env={},
        overrides={
            "sources": [{"endpoint": f"tcp://127.0.0.1:{engine}"}],
            "outputs": [{"endpoint": f"tcp://127.0.0.1:{live}", "heartbeat": 0}],
            "http": None,
            "on_lost": "keep",
            "state_dir": str(base / "running"),
            "state_key_file": None if key_file is None else str(key_file),
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_store, "MIN_ROTATE", 100)
        daemon = Daemon(config)
        await daemon.start()
        for number in range(ROTATIONS):
            fed(daemon, BATCHES * number, BATCHES)
            rotated(daemon)
            if number == 1:
                shutil.copytree(base / "running", base / "older")
        fed(daemon, BATCHES * ROTATIONS, BATCHES)
        patch.setattr(state_store.StateStore, "_go_on", lambda *_, **__: None)
        assert daemon.state is not None
        daemon.state.work()
        fed(daemon, BATCHES * (ROTATIONS + 1), BATCHES)
        # a batch that begins another reservation, so that the older copy has not reserved what was sent
        daemon.reservations.use(0, 0, next_seq_of(daemon) + AHEAD)
        shutil.copytree(base / "running", base / "left")
        blocks, next_seq = blocks_of(daemon), next_seq_of(daemon)
        await daemon.close(drain=0)
    return Left(base / "left", base / "older", config, blocks, next_seq)


async def started_again(left: Left, directory: Path) -> str:
    """Start on a copy of the directory and check what comes of it; ``exact``, ``behind``, ``refused`` or ``new``."""
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
            return "behind"
        assert blocks == set()
        return "refused" if daemon.state.refused else "new"
    finally:
        await daemon.close(drain=0)
        if sent:
            assert sent[0] >= left.next_seq, "a seq was used twice"
            assert len(sent) == 1, "AllBlocksCleared"


def newest(directory: Path, kind: str) -> Path:
    return max(directory.glob(f"state-*.{kind}"), key=lambda path: int(path.stem.removeprefix("state-")))


def oldest(directory: Path, kind: str) -> Path:
    return min(directory.glob(f"state-*.{kind}"), key=lambda path: int(path.stem.removeprefix("state-")))


def seq_file(directory: Path) -> Path:
    (path,) = directory.glob("*.seq")
    return path


def truncated(path: Path, size: int) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: size if size >= 0 else len(whole) + size])


def flipped(path: Path, byte: int, bit: int = 3) -> None:
    whole = bytearray(path.read_bytes())
    whole[byte] ^= 1 << bit
    path.write_bytes(whole)


def swapped(one: Path, other: Path) -> None:
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)


def copied(path: Path, over: Path) -> None:
    over.write_bytes(path.read_bytes())


def appended(path: Path, more: bytes) -> None:
    path.write_bytes(path.read_bytes() + more)


def deleted(*paths: Path) -> None:
    for path in paths:
        path.unlink()


def state_of(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.suffix != ".seq"]


def an_older_state(directory: Path, left: Left) -> None:
    deleted(*state_of(directory))
    for path in state_of(left.older):
        copied(path, directory / path.name)


def no_log_and_an_older_reservation(directory: Path, left: Left) -> None:
    deleted(newest(directory, "log"))
    copied(seq_file(left.older), seq_file(directory))


def no_log_and_no_reservation(directory: Path, _: Left) -> None:
    deleted(newest(directory, "log"))
    flipped(seq_file(directory), 23, 7)
    flipped(seq_file(directory), 43, 7)


DAMAGE: dict[str, tuple[Callable[[Path, Left], object], str]] = {
    "nothing": (lambda at, _: at, "exact"),
    "log emptied": (lambda at, _: truncated(newest(at, "log"), 0), "refused"),
    "log without its last byte": (lambda at, _: truncated(newest(at, "log"), -1), "refused"),
    "log ends with its header": (lambda at, _: truncated(newest(at, "log"), 60), "refused"),
    "log ends in its header": (lambda at, _: truncated(newest(at, "log"), 30), "refused"),
    "log ends in the middle": (lambda at, _: truncated(newest(at, "log"), 1500), "refused"),
    "log deleted": (lambda at, _: newest(at, "log").unlink(), "refused"),
    "log before emptied": (lambda at, _: truncated(oldest(at, "log"), 0), "refused"),
    "log before torn": (lambda at, _: truncated(oldest(at, "log"), 1500), "refused"),
    "log before deleted": (lambda at, _: oldest(at, "log").unlink(), "refused"),
    "checkpoint emptied": (lambda at, _: truncated(newest(at, "dump"), 0), "refused"),
    "checkpoint torn": (lambda at, _: truncated(newest(at, "dump"), -4), "refused"),
    "checkpoint deleted": (lambda at, _: newest(at, "dump").unlink(), "refused"),
    "checkpoint and logs deleted": (lambda at, _: deleted(*at.glob("state-*")), "refused"),
    "everything deleted but the seq reservation": (lambda at, _: deleted(*state_of(at)), "new"),
    "an older log": (lambda at, left: copied(newest(left.older, "log"), newest(at, "log")), "refused"),
    "an older log before": (lambda at, left: copied(newest(left.older, "log"), oldest(at, "log")), "refused"),
    "an older checkpoint": (lambda at, left: copied(newest(left.older, "dump"), newest(at, "dump")), "refused"),
    "an older commit record": (lambda at, left: copied(left.older / "commit", at / "commit"), "refused"),
    "an older state, all of it": (an_older_state, "behind"),
    "the logs under each other's names": (lambda at, _: swapped(newest(at, "log"), oldest(at, "log")), "exact"),
    "the log of one generation in both": (lambda at, _: copied(oldest(at, "log"), newest(at, "log")), "refused"),
    "the log that was spare": (lambda at, left: copied(left.older / SPARE, newest(at, "log")), "refused"),
    "garbage behind the log": (lambda at, _: appended(newest(at, "log"), b"\xa5" * 500), "exact"),
    "a frame twice": (lambda at, _: appended(newest(at, "log"), newest(at, "log").read_bytes()[60:]), "refused"),
    "garbage behind the checkpoint": (lambda at, _: appended(newest(at, "dump"), b"\xa5" * 500), "refused"),
    "commit record deleted": (lambda at, _: (at / "commit").unlink(), "refused"),
    "commit record emptied": (lambda at, _: truncated(at / "commit", 0), "refused"),
    "commit record torn": (lambda at, _: truncated(at / "commit", -1), "refused"),
    "seq reservation deleted": (lambda at, _: seq_file(at).unlink(), "exact"),
    "seq reservation emptied": (lambda at, _: truncated(seq_file(at), 0), "exact"),
    "seq reservation torn": (lambda at, _: truncated(seq_file(at), 40), "exact"),
    "seq reservation flipped": (lambda at, _: flipped(seq_file(at), 23, 7), "exact"),
    "an older seq reservation": (lambda at, left: copied(seq_file(left.older), seq_file(at)), "exact"),
    "seq reservation and log deleted": (lambda at, _: deleted(seq_file(at), newest(at, "log")), "refused"),
    "an older seq reservation and no log": (no_log_and_an_older_reservation, "refused"),
    "seq reservation flipped and no log": (no_log_and_no_reservation, "refused"),
}


@pytest.mark.parametrize("name", DAMAGE)
async def test_damage_ends_in_the_exact_state_or_in_none(left: Left, tmp_path: Path, name: str) -> None:
    damage, expected = DAMAGE[name]
    shutil.copytree(left.directory, tmp_path / "a")
    damage(tmp_path / "a", left)
    assert await started_again(left, tmp_path / "a") == expected


async def test_a_log_of_another_directory_is_not_taken_for_ones_own(left: Left, tmp_path: Path) -> None:
    """Not even one of the same engine, with the same batches."""
    other = Daemon(left.config.model_copy(update={"state_dir": str(tmp_path / "other")}))
    await other.start()
    fed(other, 0, BATCHES)
    await other.close(drain=0)
    shutil.copytree(left.directory, tmp_path / "a")
    copied(newest(tmp_path / "other", "log"), newest(tmp_path / "a", "log"))
    assert await started_again(left, tmp_path / "a") == "refused"


@pytest.mark.parametrize("kind", ["log", "dump", "commit", "seq"])
async def test_a_flipped_bit_is_noticed_wherever_it_is(left: Left, tmp_path: Path, kind: str) -> None:
    """In a header, in what is between, in a payload, in a checksum; what is there twice is right all the same."""
    name = seq_file(left.directory).name if kind == "seq" else kind
    name = newest(left.directory, kind).name if kind in {"log", "dump"} else name
    size = (left.directory / name).stat().st_size
    places = [*range(0, min(size, 200), 9), *range(200, size, max(size // 20, 1)), size - 1]
    for byte in sample(places, 4):
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        shutil.copytree(left.directory, tmp_path / "a")
        flipped(tmp_path / "a" / name, byte, byte % 8)
        found = await started_again(left, tmp_path / "a")
        assert found == ("exact" if kind == "seq" else "refused") or (kind == "commit" and found == "exact")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["log", "dump", "commit", "seq", "part", "log.spare", "commit.new"])
@pytest.mark.parametrize("kind", [kind for kind in OTHER_THAN_A_FILE if kind != "directory"])
async def test_what_is_no_file_is_neither_followed_nor_waited_for(
    left: Left, tmp_path: Path, name: str, kind: str
) -> None:
    """The next generation's names, too."""
    shutil.copytree(left.directory, tmp_path / "a")
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    at = tmp_path / "a"
    paths = {
        "log": newest(at, "log"),
        "dump": newest(at, "dump"),
        "seq": seq_file(at),
        "part": at / f"state-{int(newest(at, 'log').stem.removeprefix('state-')) + 1}.part",
    }
    path = paths.get(name, at / name)
    path.unlink(missing_ok=True)
    OTHER_THAN_A_FILE[kind](path, victim)
    expected = "refused" if name in {"log", "dump", "commit"} else "exact"
    assert await started_again(left, at) == expected
    assert victim.read_bytes() == b"precious"


async def test_a_directory_in_place_of_a_file_is_refused_or_an_error(left: Left, tmp_path: Path) -> None:
    shutil.copytree(left.directory, tmp_path / "a")
    newest(tmp_path / "a", "dump").unlink()
    (tmp_path / "a" / "state-4.dump").mkdir()
    assert await started_again(left, tmp_path / "a") == "refused"
    (tmp_path / "a" / "commit.new").mkdir()
    daemon = Daemon(left.config.model_copy(update={"state_dir": str(tmp_path / "a")}))
    with pytest.raises(StateDirError, match="Is a directory"):
        await daemon.start()


def change(draw: st.DrawFn, directory: Path, left: Left) -> None:
    """Something that happens to one file."""
    path = draw(st.sampled_from(sorted(directory.iterdir())))
    content = path.read_bytes()
    kind = draw(st.sampled_from(["delete", "truncate", "flip", "overwrite", "append", "older", "another"]))
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
    elif kind == "older" and path.suffix != ".seq" and (left.older / path.name).exists():
        copied(left.older / path.name, path)
    elif kind == "another":
        copied(path, draw(st.sampled_from(sorted(directory.iterdir()))))


@settings(max_examples=60 if LONG else 20, deadline=None)
@given(data=st.data())
def test_random_damage(left: Left, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """One file or several, but the seq reservation or the commit record is as it was left: what has both has nothing."""
    directory = tmp_path_factory.mktemp("random") / "a"
    shutil.copytree(left.directory, directory)
    kept = data.draw(st.sampled_from(["commit", seq_file(directory).name]))
    whole = (directory / kept).read_bytes()
    for _ in range(data.draw(st.integers(1, 3))):
        if any(directory.iterdir()):
            change(data.draw, directory, left)  # type: ignore[arg-type]
    (directory / kept).write_bytes(whole)
    asyncio.run(started_again(left, directory))
    shutil.rmtree(directory)


async def test_a_seq_reservation_is_kept_twice(left: Left, tmp_path: Path) -> None:
    """With one of them gone and the state refused, no seq is used twice, and the next process knows it too."""
    shutil.copytree(left.directory, tmp_path / "a")
    seq_file(tmp_path / "a").unlink()
    newest(tmp_path / "a", "log").unlink()
    assert await started_again(left, tmp_path / "a") == "refused"
    config = left.config.model_copy(update={"state_dir": str(tmp_path / "a")})
    daemon = Daemon(config, disk=Disk())
    assert daemon.restored
    assert next_seq_of(daemon) > left.next_seq
    await daemon.close(drain=0)


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (b"kvbus-state-009\nmore", "it is of version 009, and this kvbus reads version 013"),
        (b"kvbus-sealed010\nmore", "it is of version 010, and this kvbus reads version 013"),
        (b"kvbus-sealed013\nmore", None),
        (b"kvbus-state-013\nmore", None),
        (b"kvbus-state-\xff\xff\xff\n", None),
        (b"kvbus-state-", None),
        (b"another file's", None),
        (b"", None),
    ],
)
def test_a_file_says_its_version(begin: bytes, said: str | None) -> None:
    assert other_version("it", begin) == said


class Interrupted(Disk):
    """Each write takes so many bytes at most, as one that a signal interrupts."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.calls: list[int] = []

    def writev(self, fd: int, pieces: Sequence[bytes | memoryview]) -> int:
        self.calls.append(sum(map(len, pieces)))
        return super().writev(fd, [b"".join(pieces)[: self.most]])


def written_file(directory: Path, disk: Disk, frames: Sequence[Frame], keys: StateKeys = NO_KEYS) -> tuple[int, int]:
    """A file ``it`` of these frames; its open directory and its length."""
    folder = disk.open_directory(directory)
    fd = disk.create(folder, "it")
    begin, seal = header(Disk(), keys, identity(["a"]), b"i" * ID_BYTES, bytes(ID_BYTES), 0)
    end = Disk().writev(fd, [begin])
    for frame in frames:
        end += write_frame(disk, fd, b"i" * ID_BYTES, end, frame, seal)
    disk.close(fd)
    return folder, end


KEYS = StateKeys(b"k" * 32, (b"k" * 32,), clear=False)

FRAMES = [Frame(b"small", [b"x", b""]), Frame(b"large", [bytes([n]) * 50_000 for n in range(7)]), Frame(b"", [])]


@pytest.mark.parametrize("keys", [NO_KEYS, KEYS], ids=["clear", "sealed"])
@pytest.mark.parametrize("most", [1_000, 60_000, 10**9])
def test_a_frame_is_whole_however_little_of_it_a_write_takes(tmp_path: Path, most: int, keys: StateKeys) -> None:
    disk = Interrupted(most)
    folder, end = written_file(tmp_path, disk, FRAMES, keys)
    assert end == (tmp_path / "it").stat().st_size
    if most == 10**9:
        assert max(disk.calls) <= 128 * 1024, "large frames are written in several calls"
    file = StateFile(disk, folder, "it", identity(["a"]))
    file.unseal(keys)
    assert list(file.frames(lambda body, payloads: (body, payloads), end)) == [
        (body, b"".join(payloads)) for body, payloads in FRAMES
    ]
    assert (file.end, file.size) == (end, end)
    file.close()
    disk.close(folder)


def test_a_file_of_another_configuration_is_refused(tmp_path: Path) -> None:
    folder, _ = written_file(tmp_path, Disk(), [])
    with pytest.raises(StateError, match="it is of another configuration"):
        StateFile(Disk(), folder, "it", identity(["b"]))
    Disk().close(folder)


@pytest.mark.parametrize("keys", [NO_KEYS, KEYS], ids=["clear", "sealed"])
@pytest.mark.parametrize("open_end", [False, True])
def test_what_was_committed_ends_with_a_frame(tmp_path: Path, keys: StateKeys, *, open_end: bool) -> None:
    folder, end = written_file(tmp_path, Disk(), FRAMES, keys)
    for committed in (200, end - 1, end + 1):
        file = StateFile(Disk(), folder, "it", identity(["a"]))
        file.unseal(keys)
        with pytest.raises(StateError, match="it is damaged"):
            list(file.frames(lambda body, _: body, committed, open_end=open_end))
        file.close()
    Disk().close(folder)
