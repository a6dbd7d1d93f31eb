"""``state_dir``: the relay's state on disk, so that a restart of kvbus is one that nobody notices.

A directory holds generations: ``state-N.dump`` is a whole state, ``state-N.log`` what happened from that moment on. A
log record is written before anything that follows from it is sent, so a killed process has never said what its
successor does not know. When a log has grown, the next generation begins: its log at once, its dump in slices beside
the traffic; until that dump is whole (and only then named so), both logs count. A frame is what is written at a time:
the mark of its file, its lengths, and a CRC-32 of its records, which carry the fingerprints of their payloads. The end
of a log may be torn, anything else that is not whole is refused, moved aside and counted, and the relay begins empty.
Nothing is synced to the platter: this outlives the process, not a power cut.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar
from zlib import crc32

from kvbus.core.checkpoint import Loader, dump
from kvbus.core.relay import Relay
from kvbus.core.write_ahead_log import Frame, Records, StateError, decode_records

log = logging.getLogger("kvbus.state")

T = TypeVar("T")

MAGIC: Final = b"kvbus-state-009\n"
_HEAD: Final = struct.Struct("=8sQII")
"""The file's mark, length of the payloads, length of the body, the body's CRC-32; body and payloads follow."""

_MARK: Final = 8
"""Bytes that name one file and no other: frames of what a log was written over are not taken for its own."""

_SMALL: Final = 1024
"""Bytes up to which copying a payload costs less than handing it to the kernel as a piece of its own."""

_CALL: Final = 96 * 1024
"""Bytes written in one call, about. For more at a time the kernel takes larger areas of free memory, and in a virtual
machine those are what the host has taken back: a page of them costs several times one of the small ones."""

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MIN_ROTATE: Final = 128 * 1024 * 1024
"""A log is rotated when it is larger than this, and than four times the dump before it: a dump costs as much as a few
microseconds for each store in it, and reading a log as much as handling it did."""

SPARE: Final = "log.spare"
"""The last log that was rotated out. The next one is written over it: pages that are there are most of the cost."""


class StateStore:
    """The generations of one configuration in one directory.

    Args:
        directory: made if it is not there.
        identity: names of sources and outputs; another configuration's state is not loaded.
    """

    def __init__(self, directory: Path, identity: Sequence[str]) -> None:
        self._directory = directory
        self._header = _header(identity)
        self._generation = 0
        self._log: int | None = None
        self._log_mark = self._dump_mark = b""
        self._log_bytes = 0
        self._dump_bytes = 0
        self._dumping: Iterator[bytes] | None = None
        self._dump_file: int | None = None
        self._relay: Relay | None = None
        self._unusable: str | None = None
        """What is wrong with the state that was found."""
        self.refused = 0
        """Files that could not be used and were moved aside."""
        self.failed = False
        """Writing failed (disk full, directory gone): kvbus goes on without, and says so."""

    def load(self, relay: Relay, now: float) -> bool:
        """Load the newest state into a fresh relay; False if there is none. Nothing is changed on disk.

        Raises:
            StateError: what was loaded so far cannot be continued: begin with a new relay.
            OSError: the directory cannot be made.
        """
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        dumps = self._generations("dump")
        self._generation = max([0, *dumps, *self._generations("log")])
        if not dumps:
            return False
        try:
            self._load(relay, max(dumps), now)
        except (StateError, OSError) as error:
            self._unusable = str(error)
            raise StateError(self._unusable) from error
        return True

    def begin(self, relay: Relay) -> None:
        """Begin a new generation. What could not be loaded is moved aside.

        Raises:
            OSError: nothing can be written, and the disk is not full.
        """
        if self._unusable is not None:
            self._move_aside(self._unusable)
        self._relay = relay
        relay.records = Records()
        try:
            self._begin_generation()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self.fail(error)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _load(self, relay: Relay, generation: int, now: float) -> None:
        loader = Loader(relay)
        for blob in self._frames(self._path(generation, "dump"), _blob, torn_end=False):
            loader.feed(blob)
        if not loader.complete:
            raise StateError("the dump has no end")
        records = 0
        for later in sorted(n for n in self._generations("log") if n >= generation):
            for written in self._frames(self._path(later, "log"), decode_records, torn_end=True):
                for record in written:
                    relay.apply_record(record, now)
                records += len(written)
        relay.recovery_finished(now)
        blocks = sum(len(source.normalizer.index) for source in relay.sources)
        log.info("state loaded: %d blocks, %d records of the write-ahead log", blocks, records)

    def _frames(self, path: Path, read: Callable[[bytes, bytes], T | None], *, torn_end: bool) -> Iterator[T]:
        """What ``read`` makes of body and payloads of every frame (None: they are not what they were).

        A log may break off in a frame; what follows then is of an older log.
        """
        with path.open("rb") as file:
            header, mark = file.read(len(self._header)), file.read(_MARK)
            if torn_end and len(mark) < _MARK and self._header.startswith(header):
                return  # killed between making the file and writing its first bytes
            if header != self._header or len(mark) < _MARK:
                raise StateError(f"{path.name} is of another version or another configuration")
            size = path.stat().st_size
            while head := file.read(_HEAD.size):
                begin = file.tell()
                found, rest, body_size, crc = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0, 0)
                told: T | None = None
                if found == mark and 0 < body_size <= size - begin - rest:
                    body = file.read(body_size)
                    if crc32(body) == crc:
                        told = read(body, file.read(rest))
                if told is not None:
                    yield told
                    continue
                file.seek(begin)
                if not torn_end or mark in file.read():
                    raise StateError(f"{path.name} is damaged")
                return

    def _generations(self, kind: str) -> list[int]:
        found = []
        for path in self._directory.glob(f"state-*.{kind}"):
            number = path.name.removeprefix("state-").removesuffix(f".{kind}")
            if number.isdigit():
                found.append(int(number))
        return found

    def _path(self, generation: int, kind: str) -> Path:
        return self._directory / f"state-{generation}.{kind}"

    def _move_aside(self, why: str) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S")
        log.error("state refused (%s): moved aside as *.refused-%s, beginning empty", why, stamp)
        for path in self._directory.glob("state-*.refused-*"):
            path.unlink()  # one is enough to see what went wrong; more would fill the disk
        for path in self._directory.glob("state-*"):
            if path.suffix in (".dump", ".log"):
                path.rename(path.with_name(f"{path.name}.refused-{stamp}"))
                self.refused += 1
        (self._directory / SPARE).unlink(missing_ok=True)

    # -- writing -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what the relay has recorded; called before anything of it is sent."""
        records = None if self._relay is None else self._relay.records
        if records is None or not records.heads:
            return
        frame = records.take()
        if self._log is None:
            return
        try:
            self._log_bytes += _write(self._log, self._log_mark, frame)
        except OSError as error:
            self.fail(error)

    def work(self) -> None:
        """A slice of housekeeping, some milliseconds at most: go on with a dump, or begin one if the log has grown.

        None begins while batches wait to be handled: it would say that they were delivered.
        """
        if self.failed or self._relay is None:
            return
        try:
            if self._dumping is not None:
                self._go_on()
            elif self._log_bytes > max(MIN_ROTATE, 4 * self._dump_bytes) and not self._relay.backlog:
                self._begin_generation()
        except OSError as error:
            self.fail(error)

    @property
    def busy(self) -> bool:
        """A dump is being written: :meth:`work` has more to do. Until it is over, large indexes are held still."""
        return self._dumping is not None

    def _begin_generation(self) -> None:
        if self._relay is None:
            return
        self.flush()
        self._generation += 1
        self._close_files()
        self._log, self._log_mark = self._create(self._path(self._generation, "log"), self._directory / SPARE)
        self._log_bytes = 0
        self._dump_bytes = 0
        self._dump_file, self._dump_mark = self._create(self._path(self._generation, "part"))
        self._dumping = dump(self._relay)
        self._go_on()

    def _create(self, path: Path, over: Path | None = None) -> tuple[int, bytes]:
        """A new file, written ``over`` an old one that is not needed any more; and its mark.

        It has its own header before it has its name: what it was before is never read under it.
        """
        mark = os.urandom(_MARK)
        kind = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        if over is not None and over.exists():
            fd = os.open(over, kind, 0o600)
            os.write(fd, self._header + mark)
            over.rename(path)
        else:
            fd = os.open(path, kind | os.O_TRUNC, 0o600)
            os.write(fd, self._header + mark)
        return fd, mark

    def _go_on(self) -> None:
        if self._dumping is None or self._dump_file is None:
            return
        until = time.perf_counter() + 0.003
        while time.perf_counter() < until:
            body = next(self._dumping, None)
            if body is None:
                os.close(self._dump_file)
                self._dump_file = self._dumping = None
                self._path(self._generation, "part").rename(self._path(self._generation, "dump"))
                self._drop_older()
                return
            self._dump_bytes += _write(self._dump_file, self._dump_mark, Frame(body, []))

    def _drop_older(self) -> None:
        for kind in ("dump", "log", "part"):
            for generation in sorted(self._generations(kind)):
                if generation < self._generation:
                    path = self._path(generation, kind)
                    if kind == "log":
                        path.rename(self._directory / SPARE)
                    else:
                        path.unlink(missing_ok=True)

    def fail(self, error: OSError) -> None:
        """Go on without a state."""
        self.failed = True
        log.error("the state cannot be written (%s): going on without state", error.strerror or error)
        if self._relay is not None:
            self._relay.records = None
        self._close_files()
        self._drop()

    def _drop(self) -> None:
        """Leave nothing that a successor would take for the newest state, or that keeps a full disk full."""
        for path in (*self._directory.glob("state-*"), self._directory / SPARE):
            if path.suffix in (".dump", ".log", ".part", ".spare"):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    log.error("%s is out of date and cannot be deleted (%s): delete it", path, error.strerror or error)  # noqa: TRY400

    def _close_files(self) -> None:
        """Write no more to this generation."""
        for fd in (self._log, self._dump_file):
            if fd is not None:
                os.close(fd)
        self._log = self._dump_file = self._dumping = None

    def rename(self, identity: Sequence[str]) -> None:
        """The sources have changed: from now on it is the state of another configuration. No batches may wait.

        A process that is killed before the new generation's dump is whole leaves a state that is refused.
        """
        self._header = _header(identity)
        if not self.failed:
            try:
                self._begin_generation()
            except OSError as error:
                self.fail(error)

    def close(self) -> None:
        """An orderly end: everything is on disk."""
        self.flush()
        self._close_files()
        if self._relay is not None:
            self._relay.records = None


def _header(identity: Sequence[str]) -> bytes:
    return MAGIC + hashlib.sha256("\n".join(identity).encode()).digest()[:16]


def _blob(body: bytes, _payloads: bytes) -> bytes:
    return body


def _write(fd: int, mark: bytes, frame: Frame) -> int:
    """Write a frame; how many bytes that were."""
    body, payloads = frame
    size = sum(map(len, payloads))
    head = _HEAD.pack(mark, size, len(body), crc32(body)) + body
    if size <= _SMALL * len(payloads):
        _write_all(fd, [head + b"".join(payloads)])
    else:
        pieces, together = [head, *payloads], max(1, _CALL * len(payloads) // size)
        for at in range(0, len(pieces), together):
            _write_all(fd, pieces[at : at + together])
    return len(head) + size


def _write_all(fd: int, pieces: Sequence[bytes]) -> None:
    written = os.writev(fd, pieces)
    if written < sum(map(len, pieces)):  # a signal, or the last room on a disk: the rest in one piece
        view = memoryview(b"".join(pieces))[written:]
        while view:
            view = view[os.write(fd, view) :]
