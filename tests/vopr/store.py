"""A store in memory that implements :mod:`kvbus.state.contract`, and a simulated disk that outlives processes.

A SIGKILL loses the open transaction but no commit. A power cut loses any number of the newest commits that were not
synced, and the machine boots again. Each call may fail, find the disk full or take long, and the process may be killed
in it. A process may find a state that is damaged, or that lacks batches which kvbus has sent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

import msgspec

from kvbus.common.errors import InUseError
from kvbus.config import Config
from kvbus.core.write_ahead_log import StateError
from kvbus.state.contract import MARGIN, Reserved, StoreError
from kvbus.state.directory import MEMORY, Base, name_of

HEAD = 200
"""Number of bytes that a commit needs on disk in addition to its content."""


class KilledError(SystemExit):
    """The process was killed in a call of the store. The exception unwinds the stack of the dead process."""


class Frame(NamedTuple):
    """The write-ahead log record of one burst, that is, of events that kvbus handled together."""

    body: bytes
    payloads: bytes


class Commit(NamedTuple):
    """The content of a store after a commit.

    Attributes:
        reserved: the seqs reserved for each stream, encoded.
        boot: number of the boot in which the commit was written.
        synced: whether the commit survives a power cut.
        older: whether the state may lack batches that routers have received.
        names: the sources and outputs that the state belongs to; None if there is no state.
        slices: the slices of the checkpoint.
        start: number of write-ahead log frames that the checkpoint includes.
        frames: number of write-ahead log frames.
    """

    reserved: bytes
    boot: int
    synced: bool
    older: bool = False
    names: tuple[str, ...] | None = None
    slices: tuple[bytes, ...] = ()
    start: int = 0
    frames: int = 0


class Kept:
    """The content of a state directory on the simulated disk."""

    def __init__(self) -> None:
        self.log: list[Frame] = []
        self.commits: list[Commit] = []
        """The commits of this directory. The first one survives a power cut, which may lose any of the later ones."""
        self.highest = 0
        """A number that is higher than every seq that kvbus has used with this directory."""
        self.damage = ""
        self.holder: MemoryStore | None = None


class Platter:
    """The simulated disk, which keeps everything that outlives processes.

    Args:
        chance: random numbers that decide which commits survive a power cut.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.boot = 1
        self.places: dict[str, Kept] = {}
        self.room: int | None = None
        """Number of bytes until the disk is full; None means no limit."""
        self.failing = 0
        """Number of the next calls of the store that fail."""
        self.cost = 0.0
        """Seconds that each call of the store takes."""
        self.kill_in: int | None = None
        """Number of commits until the process is killed during a commit, or None."""
        self.killed: Callable[[], None] = lambda: None
        self.spent: Callable[[float], None] = lambda _: None

    def power_cut(self) -> None:
        """Lose some of the newest commits, which were not synced to the disk, and let the machine boot again."""
        self.boot += 1
        for kept in self.places.values():
            if kept.commits:
                last = kept.commits[self.chance.randrange(len(kept.commits))]
                kept.commits = [last]
                del kept.log[last.frames :]
                kept.holder = None

    def let_go(self) -> None:
        """Release the locks that an ended process held on its directories."""
        for kept in self.places.values():
            kept.holder = None

    def damage(self, kind: str) -> None:
        """Damage every state on the disk, in a way that the next process notices when it loads the state."""
        for kept in self.places.values():
            kept.damage = kind

    def begin_call(self) -> None:
        """Let the simulated time pass that one call of the store takes.

        Raises:
            StoreError: `failing` makes this call fail.
        """
        self.spent(self.cost)
        if self.failing:
            self.failing -= 1
            raise StoreError("/state: Input/output error")

    def take(self, size: int) -> None:
        """Use up space on the disk.

        Raises:
            StoreError: the disk is full.
        """
        if self.room is not None:
            if self.room < size + HEAD:
                raise StoreError("/state: No space left on device")
            self.room -= size + HEAD

    def may_kill(self, commit: Callable[[], None]) -> None:
        """Execute a commit. If `kill_in` asks for it, kill the process just before or just after the commit."""
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in <= 0:
                self.kill_in = None
                if self.chance.random() < 0.5:
                    commit()
                self.killed()
                raise KilledError
        commit()


class MemoryStore:
    """The simulated store of one kvbus process. It implements :class:`kvbus.state.contract.Store`."""

    def __init__(self, platter: Platter, config: Config, *, checkpoint_after: int, reserve_ahead: int) -> None:
        self.checkpoint_after, self.reserve_ahead = checkpoint_after, reserve_ahead
        self.keeps_state = config.state_dir is not None
        self.location = str(config.state_dir) if self.keeps_state else name_of(config, Base(MEMORY))
        self.refused = 0
        self._platter = platter
        self._sync = config.state_sync == "batch"
        self._kept = kept = platter.places.setdefault(self.location, Kept())
        if kept.holder is not None:
            raise InUseError(self.location, "another process")
        kept.holder = self
        self.older = False
        self.reserved = Reserved()
        self._now = Commit(b"", platter.boot, self._sync)
        if kept.commits:
            self._go_on(kept.commits[-1])

    def _go_on(self, found: Commit) -> None:
        kept = self._kept
        self._now = found
        self.reserved = msgspec.msgpack.decode(found.reserved, type=Reserved)
        self.older = found.older or (found.boot != self._platter.boot and not found.synced)
        if kept.damage == "unreadable":
            self.reserved = Reserved()
            self._refuse()
        elif self.older:
            self.reserved.raise_to(kept.highest)
            self.reserved.add_margin()
        if not self.keeps_state:
            self._now = self._now._replace(names=None)

    def _refuse(self) -> None:
        kept = self._kept
        kept.damage = ""
        self.refused, self.older = 1, False
        self.reserved.raise_to(kept.highest + MARGIN)
        self._now = self._now._replace(names=None, older=False)
        self._commit(self._now)

    def _commit(self, now: Commit, *, given_up: bool = False) -> None:
        kept = self._kept
        reserved = msgspec.msgpack.encode(self.reserved)
        now = now._replace(reserved=reserved, boot=self._platter.boot, synced=self._sync, older=self.older)

        def commit() -> None:
            self._now = now
            if self._sync or given_up:
                kept.commits.clear()
            kept.commits.append(now)
            kept.highest = max(kept.highest, self.reserved.highest)

        if given_up:
            kept.log.clear()
            commit()
        else:
            self._platter.may_kill(commit)

    def _begin_call(self, size: int) -> None:
        if self._kept.holder is not self:
            raise KilledError
        try:
            self._platter.begin_call()
            self._platter.take(size)
        except StoreError as error:
            self._fail(error)

    def _fail(self, error: StoreError) -> NoReturn:
        """Discard the state after an error. Keep the reserved seqs, as the real store does even on a full disk."""
        self._commit(self._now._replace(names=None, slices=(), start=0, frames=0), given_up=True)
        raise error

    def load(self, names: Sequence[str], feed: Callable[[bytes], None], apply: Callable[[bytes, bytes], None]) -> bool:
        found, kept = self._now, self._kept
        if found.names is None:
            return False
        if found.names != tuple(names):
            self.refused = 1
            self._now = found._replace(names=None)
            raise StoreError(f"{self.location}: the state is of another configuration")
        frames = kept.log[found.start : found.frames]
        whole = kept.damage == ""
        try:
            for body in found.slices[: None if whole else len(found.slices) // 2]:
                feed(body)
            if not whole:
                raise StateError(kept.damage)  # noqa: TRY301 - the real loader raises it here too
            for frame in frames:
                apply(*frame)
        except StateError as error:
            assert not whole, "a state that nobody has damaged"
            self._refuse()
            raise StoreError(f"{self.location}: {error}") from error
        return True

    def append(self, body: bytes, payloads: bytes) -> None:
        self._begin_call(len(body) + len(payloads))
        frame = Frame(body, payloads)
        self._kept.log.append(frame)
        try:
            self._commit(self._now._replace(frames=len(self._kept.log)))
        except KilledError:
            del self._kept.log[self._kept.commits[-1].frames if self._kept.commits else 0 :]
            raise

    def reserve(self, reserved: Reserved) -> None:
        self.reserved = reserved
        self._begin_call(len(reserved.streams) * 20)
        self._commit(self._now)

    def checkpoint(self, names: Sequence[str], slices: Iterable[bytes], pause: Callable[[], bool]) -> Iterator[None]:
        self._begin_call(0)
        if self._now.names != tuple(names):
            self._now = self._now._replace(names=None)
        self._commit(self._now)
        return self._checkpoint(tuple(names), slices, pause, len(self._kept.log))

    def _checkpoint(
        self, names: tuple[str, ...], slices: Iterable[bytes], pause: Callable[[], bool], start: int
    ) -> Iterator[None]:
        written: list[bytes] = []
        for body in slices:
            self._begin_call(len(body))
            written.append(body)
            if pause():
                yield
        self.older = False
        self._commit(self._now._replace(names=names, slices=tuple(written), start=start))

    def close(self) -> None:
        if self._kept.holder is self:
            self._kept.holder = None
