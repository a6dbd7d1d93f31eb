"""Just enough of ZMTP 3.x to find where a message ends in a byte stream.

Source: https://rfc.zeromq.org/spec/23/. A connection opens with a greeting of 64 bytes; then come frames: a flags
byte (1 = more frames follow, 2 = the length has 8 bytes instead of 1, 4 = a command), the length, the body.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

GREETING: Final = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


class Splitter:
    """Cut a stream into pieces that lose nothing when put together: greeting, commands, whole messages.

    >>> splitter = Splitter()
    >>> for frames, piece in splitter.feed(chunk): ...

    ``frames`` is None where the piece is not a message.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._greeting = GREETING  # bytes of it still to come; the two sides send theirs in turns

    def feed(self, chunk: bytes) -> Iterator[tuple[list[bytes] | None, bytes]]:
        self._buffer += chunk
        while (found := self._next()) is not None:
            frames, size = found
            piece = bytes(self._buffer[:size])
            del self._buffer[:size]
            yield frames, piece

    @property
    def waiting(self) -> int:
        """Bytes of a piece that has not come whole."""
        return len(self._buffer)

    def _next(self) -> tuple[list[bytes] | None, int] | None:
        buffer = self._buffer
        if self._greeting:
            size = min(self._greeting, len(buffer))
            self._greeting -= size
            return (None, size) if size else None
        at = 0
        frames: list[bytes] = []
        while True:
            if len(buffer) < at + 2:
                return None
            flags = buffer[at]
            width = 8 if flags & _LONG else 1
            body = at + 1 + width
            if len(buffer) < body:
                return None
            end = body + int.from_bytes(buffer[at + 1 : body], "big")
            if len(buffer) < end:
                return None
            if flags & _COMMAND and not frames:
                return None, end
            frames.append(bytes(buffer[body:end]))
            at = end
            if not flags & _MORE:
                return frames, end
