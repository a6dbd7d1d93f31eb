"""A log in a directory: what the contract asks of any log, without a server. Segments of frames, each synced before it counts.

A stream is a directory. ``pointer`` holds its newest epoch and where a rebuild begins. Segments are named by the
position of their first byte. A frame is the record's length, its CRC-32 and the record. A writer appends under the lock
of the stream and only while the epoch is its own, so a fenced one cannot append.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote, unquote

from kvbus.parts.log.contract import (
    MAX_REFUSED,
    Entry,
    FencedError,
    Pointer,
    Refused,
    UnavailableError,
    next_turn,
    read_pointer,
    take_pointer,
    write_pointer,
)

HEADER: Final = struct.Struct(">IId")
"""Length and CRC-32 of the record behind it, and when it was appended, in seconds."""

SEGMENT_BYTES: Final = 64 * 1024 * 1024
LOOK_AGAIN: Final = 0.02
"""Seconds between two looks for records that are not there yet."""

MOST: Final = 500
"""Records that one look takes of a stream."""

Result = TypeVar("Result")


async def _off_the_loop(work: Callable[[], Result]) -> Result:
    """What waits for the disk waits in a thread."""
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        raise UnavailableError(str(error)) from error


class _Stream:
    """The files of one stream."""

    def __init__(self, root: Path, key: str) -> None:
        self.path = root / quote(key, safe="")
        self._pointer = self.path / "pointer"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def pointer(self) -> Pointer | None:
        try:
            return read_pointer(self._pointer.read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def put_pointer(self, pointer: Pointer) -> None:
        new = self.path / "pointer.new"
        with new.open("wb") as file:
            file.write(write_pointer(pointer))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._pointer)
        self._sync()

    def _sync(self) -> None:
        directory = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def segments(self) -> list[int]:
        """Where each one begins."""
        return sorted(int(path.stem) for path in self.path.glob("*.log"))

    def segment(self, begin: int) -> Path:
        return self.path / f"{begin:020}.log"

    def end(self) -> int:
        """The position behind the newest whole frame; what is behind that is taken away, since it never counted."""
        begins = self.segments()
        if not begins:
            self.segment(0).touch()
            self._sync()
            return 0
        begin = begins[-1]
        whole = begin
        for position, data, _ in self.frames(begin, begin):
            whole = position + HEADER.size + len(data)
        if self.segment(begin).stat().st_size > whole - begin:
            os.truncate(self.segment(begin), whole - begin)
        return whole

    def frames(self, begin: int, position: int) -> Iterator[tuple[int, bytes, float]]:
        """The whole frames of one segment from a position on, with theirs."""
        with self.segment(begin).open("rb") as file:
            file.seek(position - begin)
            while len(header := file.read(HEADER.size)) == HEADER.size:
                length, crc, at = HEADER.unpack(header)
                data = file.read(length)
                if len(data) < length or zlib.crc32(data) != crc:
                    return
                yield position, data, at
                position += HEADER.size + length

    def next_segment(self, end: int) -> int:
        self.segment(end).touch()
        self._sync()
        return end

    def trim(self, keep: int) -> None:
        """Delete the oldest segments until so many are left, the newest among them."""
        for begin in self.segments()[:-keep]:
            self.segment(begin).unlink()


class DirectoryWriter:
    """See :class:`~kvbus.parts.log.contract.Writer`."""

    def __init__(self, stream: _Stream, epoch: int, end: int, segment_bytes: int, keep: int) -> None:
        self.epoch = epoch
        self._stream = stream
        self._end = end
        self._segment_bytes = segment_bytes
        self._keep = keep

    async def append(self, records: Sequence[bytes]) -> int:
        """Append, and sync."""
        return await _off_the_loop(lambda: self._append(records))

    def _append(self, records: Sequence[bytes]) -> int:
        with self._own():
            stream = self._stream
            begin = stream.segments()[-1]
            if self._end - begin >= self._segment_bytes:
                begin = stream.next_segment(self._end)
                stream.trim(self._keep)
            now = time.time()
            framed = [HEADER.pack(len(record), zlib.crc32(record), now) + record for record in records]
            with stream.segment(begin).open("r+b") as file:
                file.seek(self._end - begin)
                file.truncate()  # what an append that failed has left
                file.write(b"".join(framed))
                file.flush()
                os.fsync(file.fileno())
            self._end += sum(map(len, framed))
            return self._end - len(framed[-1])

    async def point(self, pointer: Pointer) -> None:
        """Put the pointer."""

        def put() -> None:
            with self._own():
                self._stream.put_pointer(pointer)

        await _off_the_loop(put)

    async def keeps(self, position: int) -> bool:
        """Look where the oldest segment begins."""
        return await _off_the_loop(lambda: self._stream.segments()[0] <= position)

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        with self._stream.locked():
            pointer = self._stream.pointer()
            if pointer is None or pointer.epoch != self.epoch:
                raise FencedError(f"epoch {pointer.epoch if pointer else None} is after {self.epoch}")
            yield

    async def close(self) -> None:
        """There is nothing to close."""


class DirectoryReader:
    """See :class:`~kvbus.parts.log.contract.Reader`."""

    def __init__(self, root: Path, starts: Mapping[str, int]) -> None:
        self._root = root
        self._next = dict(starts)
        self._aligned: set[str] = set()
        """Streams whose next position is the beginning of a frame, not somewhere in one."""

    async def take(self, seconds: float) -> list[Entry]:
        """Look again and again."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            found = await _off_the_loop(self._look)
            if found or loop.time() >= until:
                return found
            await asyncio.sleep(LOOK_AGAIN)

    def _look(self) -> list[Entry]:
        found: list[Entry] = []
        for key in self._next:
            found.extend(self._of(key))
        return found

    def _of(self, key: str) -> list[Entry]:
        stream = _Stream(self._root, key)
        found: list[Entry] = []
        begins = stream.segments()
        for begin, following in zip(begins, [*begins[1:], None], strict=False):
            if following is not None and following <= self._next[key]:
                continue
            start = max(begin, self._next[key]) if key in self._aligned else begin
            try:
                for position, data, at in stream.frames(begin, start):
                    wanted = position >= self._next[key]
                    self._next[key] = max(self._next[key], position + HEADER.size + len(data))
                    self._aligned.add(key)
                    if not wanted:
                        continue
                    found.append(Entry(key, position, data, at))
                    if len(found) == MOST:
                        return found
            except FileNotFoundError:  # retention was faster
                continue
        return found

    async def ends(self) -> dict[str, int]:
        """Behind the last frame of each."""
        return await _off_the_loop(lambda: {key: _end(_Stream(self._root, key)) for key in self._next})

    async def reached(self, key: str) -> int:
        """Behind the last one taken."""
        return self._next[key]

    async def close(self) -> None:
        """There is nothing to close."""


def _end(stream: _Stream) -> int:
    begins = stream.segments()
    last = list(stream.frames(begins[-1], begins[-1])) if begins else []
    return last[-1][0] + HEADER.size + len(last[-1][1]) if last else (begins or [0])[-1]


class DirectoryLog:
    """See :class:`~kvbus.parts.log.contract.Log`.

    Args:
        root: the directory.
        segment_bytes: a segment that has so many is followed by the next one.
        keep: segments that are kept of each stream.
    """

    def __init__(self, root: Path, *, segment_bytes: int = SEGMENT_BYTES, keep: int = 16) -> None:
        self._root = root
        self._segment_bytes = segment_bytes
        self._keep = keep
        self.refused: Refused = Refused(maxlen=MAX_REFUSED)

    async def claim(self, key: str) -> DirectoryWriter:
        """The next epoch, under the stream's lock."""

        def claim() -> DirectoryWriter:
            stream = _Stream(self._root, key)
            with stream.locked():
                pointer = next_turn(stream.pointer())
                stream.put_pointer(pointer)
                return DirectoryWriter(stream, pointer.epoch, stream.end(), self._segment_bytes, self._keep)

        return await _off_the_loop(claim)

    async def pointers(self, key: str | None = None) -> dict[str, Pointer]:
        """Read each stream's."""

        def look() -> dict[str, Pointer]:
            found: dict[str, Pointer] = {}
            for path in self._root.glob("*/pointer"):
                name = unquote(path.parent.name)
                if key in {None, name}:
                    take_pointer(found, self.refused, name, path.read_bytes())
            return found

        return await _off_the_loop(look)

    async def read(self, starts: Mapping[str, int]) -> DirectoryReader:
        """Read by looking."""
        return DirectoryReader(self._root, starts)
