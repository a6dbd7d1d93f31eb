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

_LAST: Final = [bytes([0, size]) for size in range(_LONGEST_SHORT + 1)]
_MORE: Final = [bytes([MORE, size]) for size in range(_LONGEST_SHORT + 1)]


class Frame(NamedTuple):
    """One frame: a part of a message, or a command."""

    command: bool
    more: bool
    body: bytes


def encode_message(frames: Sequence[bytes]) -> bytes:
    """Encode a whole message. Every frame is copied once; the result may go to any number of peers."""
    parts: list[bytes] = []
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        size = len(frame)
        if size <= _LONGEST_SHORT:
            parts.append(_LAST[size] if index == last else _MORE[size])
        else:
            parts.append(bytes([LONG if index == last else LONG | MORE]) + size.to_bytes(8, "big"))
        parts.append(frame)
    return b"".join(parts)


def encode_command(body: bytes) -> bytes:
    """Encode a command frame."""
    size = len(body)
    if size <= _LONGEST_SHORT:
        return bytes([COMMAND, size]) + body
    return bytes([COMMAND | LONG]) + size.to_bytes(8, "big") + body


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
