"""Frames of ZMTP 2.0 and later: flags, size, body. They are the same in all of these versions, but for commands.

Source: https://rfc.zeromq.org/spec/37/ ("Framing").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvbus.transport.zmtp.reasons import ProtocolError, Reason

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4

_SHORT_HEAD: Final = 2
_LONG_HEAD: Final = 9
_LONGEST_SHORT: Final = 255

_SHORT: Final = {flags: [bytes([flags, size]) for size in range(_LONGEST_SHORT + 1)] for flags in (0, MORE, COMMAND)}


class Frame(NamedTuple):
    """One frame: a part of a message, or a command."""

    command: bool
    more: bool
    body: bytes


def head(size: int, flags: int = 0) -> bytes:
    """Encode what stands before a frame's body, by its size and flags (0, MORE or COMMAND)."""
    return _SHORT[flags][size] if size <= _LONGEST_SHORT else bytes([LONG | flags]) + size.to_bytes(8, "big")


def encode_message(frames: Sequence[bytes]) -> bytes:
    """Encode a whole message. Every frame is copied once; the result may go to any number of peers."""
    parts: list[bytes] = []
    for frame in frames[:-1]:
        parts += (head(len(frame), MORE), frame)
    parts += (head(len(frames[-1])), frames[-1])
    return b"".join(parts)


def encode_command(body: bytes) -> bytes:
    """Encode a command frame."""
    return head(len(body), COMMAND) + body


class FrameReader:
    """Take frames off a buffer that the caller fills.

    Args:
        buffer: the received bytes; the reader removes what it has taken.
        commands: whether the peer's version has command frames (3.0 and later).
    """

    def __init__(self, buffer: bytearray, *, commands: bool) -> None:
        self._buffer = buffer
        self._known = COMMAND | LONG | MORE if commands else LONG | MORE

    def next_frame(self, limit: int, too_large: Reason = Reason.FRAME_BYTES) -> Frame | None:
        """Return the next frame, or None until all of it has arrived.

        Args:
            limit: largest body to accept. A larger frame fails as soon as its size is known.
            too_large: the reason to fail with then.

        Raises:
            ProtocolError: flags that ZMTP does not know, or a frame over the limit.
        """
        buffer = self._buffer
        if not buffer:
            return None
        flags = buffer[0]
        if flags & ~self._known or flags & (COMMAND | MORE) == COMMAND | MORE:
            raise ProtocolError(Reason.FRAME, f"a frame with flags {flags:#04x}")
        head = _LONG_HEAD if flags & LONG else _SHORT_HEAD
        if len(buffer) < head:
            return None
        size = int.from_bytes(buffer[1:head], "big")
        if size > limit:
            raise ProtocolError(too_large, f"a frame of {size} bytes; {limit} are allowed")
        end = head + size
        if len(buffer) < end:
            return None
        body = bytes(memoryview(buffer)[head:end])
        del buffer[:end]
        return Frame(flags & COMMAND != 0, flags & MORE != 0, body)
