"""The capture format: a file of JSON lines, with one published message in each line.

A line is ``{"t": 0.0107, "topic": "", "seq": 1, "payload": "k8tB2s…"}``. ``t`` is the number of seconds since the
recording began. The topic and the payload (a msgpack batch) are in base64. A file whose name ends in ``.gz`` is
compressed.
"""

from __future__ import annotations

import gzip
import os
import sys
from typing import IO, TYPE_CHECKING, Final, Literal, Self, cast

import msgspec

from kvbus.common.errors import ExitCode, KvbusError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType


class CaptureError(KvbusError):
    """A capture cannot be read or written.

    The error names the file and, if a line is invalid, the number of the line.
    """

    exit_code = ExitCode.CONFIG


class Message(msgspec.Struct, frozen=True):
    """One published message of a stream.

    Attributes:
        t: seconds since the recording began.
        topic: the first frame of the message.
        seq: number of the batch, unsigned 64-bit.
        payload: the msgpack batch.
    """

    t: float
    topic: bytes
    seq: int
    payload: bytes


_DECODER: Final = msgspec.json.Decoder(Message)
_ENCODER: Final = msgspec.json.Encoder()


def read_capture(path: Path) -> Iterator[Message]:
    """Yield the messages of a capture. The path ``-`` stands for standard input.

    Raises:
        CaptureError: the file cannot be read, or a line is not a message.
    """
    number = 0
    try:
        with _open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    message = _DECODER.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise CaptureError(f"{path}:{number}: not a recorded message: {error}") from error
                if not 0 <= message.seq < 2**64:
                    raise CaptureError(f"{path}:{number}: seq {message.seq} is not an unsigned 64-bit number")
                yield message
    except (OSError, EOFError) as error:
        raise CaptureError(f"{path}:{number + 1}: {getattr(error, 'strerror', None) or error}") from error


class CaptureWriter:
    """A writer of a capture. `write` flushes every line, except in a compressed file.

    Args:
        path: the file to create. Only its owner can read it, because a capture contains the tokens of prompts. ``-``
            stands for standard output.
        replace: whether to replace an existing file.

    Raises:
        CaptureError: the file cannot be created, or it exists and must not be replaced.
    """

    def __init__(self, path: Path, *, replace: bool = False) -> None:
        self.path: Final = path
        self.written = 0
        self._failed = False
        try:
            if replace and path.is_file():
                path.unlink()
            self._file = _open(path, "wb")
        except OSError as error:
            raise CaptureError(f"{path}: {error.strerror}") from error

    def write(self, message: Message) -> None:
        """Append one message to the capture.

        Raises:
            CaptureError: writing fails, for example on a full disk.
        """
        try:
            self._file.write(_ENCODER.encode(message) + b"\n")
            # Do not flush a compressed file after every line, because that would make the compression useless.
            if self.path.suffix != ".gz":
                self._file.flush()
        except BrokenPipeError:
            raise  # the reader of standard output has closed the pipe, which is not an error of the capture
        except OSError as error:
            self._failed = True
            raise CaptureError(f"{self.path}: {error.strerror}") from error
        self.written += 1

    def close(self) -> None:
        """Close the file. Standard output stays open.

        Raises:
            CaptureError: the buffered lines cannot be written, for example because the disk is full.
        """
        if self._file is sys.stdout.buffer:
            return
        try:
            self._file.close()
        except OSError as error:
            if not self._failed:  # otherwise `write` has already raised an error
                raise CaptureError(f"{self.path}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open(path: Path, mode: Literal["rb", "wb"]) -> IO[bytes]:
    if str(path) == "-":
        return sys.stdin.buffer if mode == "rb" else sys.stdout.buffer
    # Only a regular file is created; a pipe or device exists already and is only opened.
    if mode == "wb" and (path.is_file() or not path.exists()):
        os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600))
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, mode))
    return path.open(mode)
