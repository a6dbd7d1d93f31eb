"""A store in memory behind the seam of :mod:`kvbus.state.contract`, and the disk that outlives processes.

A SIGKILL loses the open transaction, and nothing that was committed. A power cut loses any suffix of the commits since
the last one that was synced, and it is another boot of the machine. Each call may fail, find the disk full or be slow,
and the process may be killed in it. What a process finds may be damaged, or older than what was sent.
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
from kvbus.state.place import MEMORY, Base, name_of

HEAD = 200
"""Bytes that a commit takes beside its content."""


class KilledError(SystemExit):
    """The process was killed in a call. It unwinds a process that is dead already."""


class Frame(NamedTuple):
    """What the log has of one burst."""

    body: bytes
    payloads: bytes


class Commit(NamedTuple):
    """What a store holds after a commit.

    Attributes:
        reserved: the reservations, encoded.
        boot: the boot in which it was written.
        synced: whether it can be lost in a power cut.
        older: routers may have more than this.
        names: whose state it is; None: there is no state.
        slices: the checkpoint.
        start: frames of the log that the checkpoint includes.
        frames: frames of the log.
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
    """What one directory has."""

    def __init__(self) -> None:
        self.log: list[Frame] = []
        self.commits: list[Commit] = []
        """Those that a power cut can lose, behind one that it cannot."""
        self.highest = 0
        """The mark: no number from this one on was used."""
        self.damage = ""
        self.holder: MemoryStore | None = None


class Platter:
    """The disk: what outlives processes.

    Args:
        chance: what a power cut leaves.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.boot = 1
        self.places: dict[str, Kept] = {}
        self.room: int | None = None
        """Bytes until the disk is full; None for as many as it takes."""
        self.failing = 0
        """Calls that fail from now on."""
        self.cost = 0.0
        """Seconds that a call takes."""
        self.kill_in: int | None = None
        """Commits until the process is killed in one."""
        self.killed: Callable[[], None] = lambda: None
        self.spent: Callable[[float], None] = lambda _: None

    def power_cut(self) -> None:
        """Lose any suffix of the commits that were not synced."""
        self.boot += 1
        for kept in self.places.values():
            if kept.commits:
                last = kept.commits[self.chance.randrange(len(kept.commits))]
                kept.commits = [last]
                del kept.log[last.frames :]
                kept.holder = None

    def let_go(self) -> None:
        """Release what the process had that is gone."""
        for kept in self.places.values():
            kept.holder = None

    def damage(self, kind: str) -> None:
        """Let the next process find something else than what was written."""
        for kept in self.places.values():
            kept.damage = kind

    def begin_call(self) -> None:
        """Take the time that a call takes, and let it fail if it is to."""
        self.spent(self.cost)
        if self.failing:
            self.failing -= 1
            raise StoreError("/state: Input/output error")

    def take(self, size: int) -> None:
        """Use up room."""
        if self.room is not None:
            if self.room < size + HEAD:
                raise StoreError("/state: No space left on device")
            self.room -= size + HEAD

    def may_kill(self, commit: Callable[[], None]) -> None:
        """Commit; but if the process is to be killed in this one, kill it just before or just after."""
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
    """The store of one process. See :class:`kvbus.state.contract.Store`."""

    def __init__(self, platter: Platter, config: Config, *, checkpoint_after: int, reserve_ahead: int) -> None:
        self.checkpoint_after, self.reserve_ahead = checkpoint_after, reserve_ahead
        self.keeps_state = config.state_dir is not None
        self.place = str(config.state_dir) if self.keeps_state else name_of(config, Base(MEMORY))
        self.refused = 0
        self._platter = platter
        self._sync = config.state_sync == "batch"
        self._kept = kept = platter.places.setdefault(self.place, Kept())
        if kept.holder is not None:
            raise InUseError(self.place, "another process")
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
        """Give the state up. The mark takes the reservations even on a full disk."""
        self._commit(self._now._replace(names=None, slices=(), start=0, frames=0), given_up=True)
        raise error

    def load(self, names: Sequence[str], feed: Callable[[bytes], None], apply: Callable[[bytes, bytes], None]) -> bool:
        found, kept = self._now, self._kept
        if found.names is None:
            return False
        if found.names != tuple(names):
            self.refused = 1
            self._now = found._replace(names=None)
            raise StoreError(f"{self.place}: the state is of another configuration")
        frames = kept.log[found.start : found.frames]
        whole = kept.damage == ""
        try:
            for body in found.slices[: None if whole else len(found.slices) // 2]:
                feed(body)
            if not whole:
                raise StateError(kept.damage)  # noqa: TRY301 - as the loader would
            for frame in frames:
                apply(*frame)
        except StateError as error:
            assert not whole, "a state that nobody has damaged"
            self._refuse()
            raise StoreError(f"{self.place}: {error}") from error
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
