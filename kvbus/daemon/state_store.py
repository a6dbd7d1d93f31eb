"""``state_dir``: the relay's state on disk, so that routers do not notice a restart of kvbus.

A directory holds generations. ``state-N.dump`` is a checkpoint, ``state-N.log`` the write-ahead log from that moment
on. kvbus writes a record before it sends anything that follows from it, so a killed process never sent anything that
the next process does not know. When a log has grown, the next generation begins: its log at once, its checkpoint in
slices beside the traffic. A checkpoint gets its name when it is complete; until then both logs count.

kvbus writes in frames. A frame has the id of its file, its lengths, and a CRC-32 of its records, which carry the
fingerprints of their payloads. The end of a log may be torn. If anything else is incomplete, kvbus refuses the state,
moves it aside, counts it, and begins empty. Nothing is synced to disk: a state outlives the process, not a power
failure.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar
from zlib import crc32

from kvbus.core.checkpoint import Loader, dump
from kvbus.core.relay import Relay
from kvbus.core.write_ahead_log import Frame, StateError, decode_records
from kvbus.daemon.disk import NO_ROOM, Disk

log = logging.getLogger("kvbus.state")

T = TypeVar("T")

MAGIC: Final = b"kvbus-state-010\n"
_HEAD: Final = struct.Struct("=8sQII")
"""The file's id, length of the payloads, length of the body, the body's CRC-32; body and payloads follow."""

_FILE_ID_BYTES: Final = 8
"""Each file has a random id. A log may be written over an older one, whose frames have another id."""

_SMALL: Final = 1024
"""Up to this many bytes, copying a payload costs less than handing it to the kernel separately."""

_CALL: Final = 96 * 1024
"""Bytes written in one call, about. Larger writes make the kernel use larger areas of free memory. In a virtual machine
the host has often taken those back, and each of their pages costs several times as much."""

MIN_ROTATE: Final = 128 * 1024 * 1024
"""kvbus rotates a log that is larger than this and than four times its checkpoint. A checkpoint costs a few
microseconds for each store in it; reading a log costs as much as handling its batches did."""

SPARE: Final = "log.spare"
"""The last log that was rotated out. The next log is written over it, because new pages are most of a log's cost."""


class StateStore:
    """The generations of one configuration in one directory.

    Args:
        directory: made if it is not there.
        identity: names of sources and outputs; the store loads only a state of the same ones.
        disk: the real one, or a test's.
    """

    def __init__(self, directory: Path, identity: Sequence[str], disk: Disk | None = None) -> None:
        self._disk = disk or Disk()
        self._path = directory
        self._directory = -1
        """The open directory, from :meth:`load` on."""
        self._header = _header(identity)
        self._generation = 0
        self._log: int | None = None
        self._log_id = self._checkpoint_id = b""
        self._log_bytes = 0
        self._checkpoint_bytes = 0
        self._slices: Iterator[bytes] | None = None
        self._checkpoint_file: int | None = None
        self._relay: Relay | None = None
        self._unusable: str | None = None
        """What is wrong with the state on disk."""
        self.refused = 0
        """Files that could not be used and were moved aside."""
        self.failed = False
        """Writing failed (disk full, directory gone), so kvbus goes on without state."""

    def load(self, relay: Relay, now: float) -> bool:
        """Load the newest state into a fresh relay; False if there is none. It changes nothing on disk.

        Raises:
            StateError: the state cannot be used, and the relay holds a part of it: begin with a new relay.
            OSError: the directory cannot be made.
        """
        self._disk.make_directory(self._path)
        self._directory = self._disk.open_directory(self._path)
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
        """Begin a new generation, and move aside a state that could not be loaded.

        Raises:
            OSError: nothing can be written, and the disk is not full.
        """
        if self._unusable is not None:
            self._move_aside(self._unusable)
        self._relay = relay
        relay.keep_records(keep=True)
        try:
            self._begin_generation()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self.fail(error)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _load(self, relay: Relay, generation: int, now: float) -> None:
        loader = Loader(relay)
        for blob in self._frames(_name(generation, "dump"), _blob, torn_end=False):
            loader.feed(blob)
        if not loader.complete:
            raise StateError("the checkpoint has no end")
        records = 0
        for later in sorted(n for n in self._generations("log") if n >= generation):
            for written in self._frames(_name(later, "log"), decode_records, torn_end=True):
                for record in written:
                    relay.apply_record(record, now)
                records += len(written)
        relay.recovery_finished(now)
        blocks = sum(len(source.normalizer.index) for source in relay.sources)
        log.info("state loaded: %d blocks, %d records of the write-ahead log", blocks, records)

    def _frames(self, name: str, read: Callable[[bytes, bytes], T | None], *, torn_end: bool) -> Iterator[T]:
        """Yield what ``read`` makes of each frame's body and payloads (None: they are damaged).

        A log may break off within a frame; the bytes after that are of an older log.
        """
        disk = self._disk
        fd = disk.open(self._directory, name)
        try:
            at = len(self._header) + _FILE_ID_BYTES
            begin = disk.pread(fd, at, 0)
            header, file_id = begin[: len(self._header)], begin[len(self._header) :]
            if torn_end and len(file_id) < _FILE_ID_BYTES and self._header.startswith(header):
                return  # killed between making the file and writing its first bytes
            if header != self._header or len(file_id) < _FILE_ID_BYTES:
                raise StateError(f"{name} is of another version or another configuration")
            size = disk.size(fd)
            while head := disk.pread(fd, _HEAD.size, at):
                at += len(head)
                found, rest, body_size, crc = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0, 0)
                frame: T | None = None
                if found == file_id and 0 < body_size <= size - at - rest:
                    body = disk.pread(fd, body_size, at)
                    if crc32(body) == crc:
                        frame = read(body, disk.pread(fd, rest, at + body_size))
                if frame is not None:
                    yield frame
                    at += body_size + rest
                    continue
                if not torn_end or file_id in disk.pread(fd, size - at, at):
                    raise StateError(f"{name} is damaged")
                return
        finally:
            disk.close(fd)

    def _generations(self, kind: str) -> list[int]:
        found = []
        for name in self._disk.names(self._directory):
            number = name.removeprefix("state-").removesuffix(f".{kind}")
            if name == f"state-{number}.{kind}" and number.isdigit():
                found.append(int(number))
        return found

    def _move_aside(self, why: str) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S")
        log.error("state refused (%s): moved aside as *.refused-%s, beginning empty", why, stamp)
        names = self._disk.names(self._directory)
        for name in names:
            if name.startswith("state-") and ".refused-" in name:
                # one is enough to see what went wrong; more would fill the disk
                self._disk.unlink(self._directory, name)
        for name in names:
            if name.startswith("state-") and name.endswith((".dump", ".log")):
                self._disk.rename(self._directory, name, f"{name}.refused-{stamp}")
                self.refused += 1
        self._disk.unlink(self._directory, SPARE)

    # -- writing -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the relay's records. Called before anything that follows from them is sent."""
        records = None if self._relay is None else self._relay.records
        if records is None or not records.heads:
            return
        frame = records.take()
        if self._log is None:
            return
        try:
            self._log_bytes += self._write(self._log, self._log_id, frame)
        except OSError as error:
            self.fail(error)

    def work(self) -> None:
        """Do a slice of work, some milliseconds at most: go on with a checkpoint, or begin one if the log has grown.

        None begins while batches wait to be handled: the checkpoint would count them as delivered.
        """
        if self.failed or self._relay is None:
            return
        try:
            if self._slices is not None:
                self._go_on()
            elif self._log_bytes > max(MIN_ROTATE, 4 * self._checkpoint_bytes) and not self._relay.backlog:
                self._begin_generation()
        except OSError as error:
            self.fail(error)

    @property
    def busy(self) -> bool:
        """A checkpoint is being written, and :meth:`work` has more to do. Until its end large indexes stay frozen."""
        return self._slices is not None

    def _begin_generation(self) -> None:
        if self._relay is None:
            return
        self.flush()
        self._generation += 1
        self._close_files()
        self._log, self._log_id = self._create(_name(self._generation, "log"), SPARE)
        self._log_bytes = 0
        self._checkpoint_bytes = 0
        self._checkpoint_file, self._checkpoint_id = self._create(_name(self._generation, "part"))
        self._slices = dump(self._relay)
        self._go_on()

    def _create(self, name: str, over: str | None = None) -> tuple[int, bytes]:
        """Make a file, ``over`` an old one that is no longer needed if there is one; return it and its id.

        The file gets its new header before its new name, so its old frames are never read under the new name.
        """
        disk = self._disk
        file_id = disk.random_bytes(_FILE_ID_BYTES)
        if over is not None and over in disk.names(self._directory):
            fd = disk.create(self._directory, over, keep=True)
            disk.writev(fd, [self._header + file_id])
            disk.rename(self._directory, over, name)
        else:
            fd = disk.create(self._directory, name)
            disk.writev(fd, [self._header + file_id])
        return fd, file_id

    def _go_on(self) -> None:
        if self._slices is None or self._checkpoint_file is None:
            return
        until = time.perf_counter() + 0.003
        while time.perf_counter() < until:
            body = next(self._slices, None)
            if body is None:
                self._disk.close(self._checkpoint_file)
                self._checkpoint_file = self._slices = None
                part = _name(self._generation, "part")
                self._disk.rename(self._directory, part, _name(self._generation, "dump"))
                self._drop_older()
                return
            self._checkpoint_bytes += self._write(self._checkpoint_file, self._checkpoint_id, Frame(body, []))

    def _drop_older(self) -> None:
        for kind in ("dump", "log", "part"):
            for generation in sorted(self._generations(kind)):
                if generation < self._generation:
                    name = _name(generation, kind)
                    if kind == "log":
                        self._disk.rename(self._directory, name, SPARE)
                    else:
                        self._disk.unlink(self._directory, name)

    def fail(self, error: OSError) -> None:
        """Go on without state."""
        self.failed = True
        log.error("the state cannot be written (%s): going on without state", error.strerror or error)
        if self._relay is not None:
            self._relay.keep_records(keep=False)
        self._close_files()
        self._drop()

    def _drop(self) -> None:
        """Delete what the next process would take for the newest state, and what keeps a full disk full."""
        for name in self._disk.names(self._directory):
            if name == SPARE or (name.startswith("state-") and name.endswith((".dump", ".log", ".part"))):
                try:
                    self._disk.unlink(self._directory, name)
                except OSError as error:
                    path = self._path / name
                    log.error("%s is out of date, delete it: %s", path, error.strerror or error)  # noqa: TRY400

    def _close_files(self) -> None:
        """Write no more to this generation."""
        for fd in (self._log, self._checkpoint_file):
            if fd is not None:
                self._disk.close(fd)
        self._log = self._checkpoint_file = self._slices = None

    def rename(self, identity: Sequence[str]) -> None:
        """Begin a new generation for changed sources. No batches may wait.

        If kvbus is killed before the new checkpoint is complete, the next process refuses the state.
        """
        self._header = _header(identity)
        if not self.failed:
            try:
                self._begin_generation()
            except OSError as error:
                self.fail(error)

    def close(self) -> None:
        """Write the last records and close the files."""
        self.flush()
        self._close_files()
        if self._directory >= 0:
            self._disk.close(self._directory)
            self._directory = -1
        if self._relay is not None:
            self._relay.keep_records(keep=False)

    def _write(self, fd: int, file_id: bytes, frame: Frame) -> int:
        """Write a frame; return its number of bytes."""
        body, payloads = frame
        size = sum(map(len, payloads))
        head = _HEAD.pack(file_id, size, len(body), crc32(body)) + body
        if size <= _SMALL * len(payloads):
            self._write_all(fd, [head + b"".join(payloads)])
        else:
            pieces, together = [head, *payloads], max(1, _CALL * len(payloads) // size)
            for at in range(0, len(pieces), together):
                self._write_all(fd, pieces[at : at + together])
        return len(head) + size

    def _write_all(self, fd: int, pieces: Sequence[bytes]) -> None:
        written = self._disk.writev(fd, pieces)
        if written < sum(map(len, pieces)):  # a signal came, or the disk is nearly full
            view = memoryview(b"".join(pieces))[written:]
            while view:
                view = view[self._disk.writev(fd, [view]) :]


def _header(identity: Sequence[str]) -> bytes:
    return MAGIC + hashlib.sha256("\n".join(identity).encode()).digest()[:16]


def _blob(body: bytes, _payloads: bytes) -> bytes:
    return body


def _name(generation: int, kind: str) -> str:
    return f"state-{generation}.{kind}"
