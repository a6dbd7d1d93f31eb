"""A transport with TLS on top of another, the server's side, without waiting.

An event loop's own TLS tells of a connection only after its handshake, so that nothing could limit how many there are
before. And a connection that is upgraded later may have lost its first bytes by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterator
from typing import Any, Final

PART: Final = 65_536
"""Bytes that are read at a time."""


class Secured(asyncio.Transport):
    """What the server writes to. Its owner hands in what the transport below it receives.

    Attributes:
        ready: the handshake is done.
        ended: the peer has said that nothing more comes.
    """

    def __init__(self, raw: asyncio.Transport, context: ssl.SSLContext) -> None:
        super().__init__()
        self._raw = raw
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.ready = False
        self.ended = False

    def take(self, data: bytes | memoryview) -> None:
        """Take in what has been received, and go on with the handshake.

        Raises:
            ssl.SSLError: it is no TLS, or the peer's certificate does not hold.
        """
        self._incoming.write(data)
        if not self.ready:
            with contextlib.suppress(ssl.SSLWantReadError):
                try:
                    self._tls.do_handshake()
                    self.ready = True
                finally:  # an alert says what is wrong
                    self._flush()

    def parts(self) -> Iterator[bytes]:
        """Yield what the peer has said.

        Raises:
            ssl.SSLError: it is no TLS.
        """
        try:
            with contextlib.suppress(ssl.SSLWantReadError):
                while not self._raw.is_closing() and (part := self._tls.read(PART)):
                    yield part
                self.ended = True
        finally:
            self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._raw.write(self._outgoing.read())

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and write."""
        if self._raw.is_closing():
            return
        rest = memoryview(data).cast("B")
        try:
            while rest:
                rest = rest[self._tls.write(rest) :]
        except ssl.SSLError:
            self.abort()
        else:
            self._flush()

    def close(self) -> None:
        """Say that nothing more comes, and close."""
        if self.ready and not self._raw.is_closing():
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()
            self._flush()
        self._raw.close()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what is known of the connection; ``peercert`` is a certificate that was verified."""
        if name == "peercert":
            return self._tls.getpeercert() if self.ready else default
        return self._tls.context if name == "sslcontext" else self._raw.get_extra_info(name, default)

    def abort(self) -> None:
        """Close at once."""
        self._raw.abort()

    def is_closing(self) -> bool:
        """Whether it is closed, or being closed."""
        return self._raw.is_closing()

    def is_reading(self) -> bool:
        """Whether it is not paused."""
        return self._raw.is_reading()

    def pause_reading(self) -> None:
        """Receive nothing for a while."""
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        """Receive again."""
        self._raw.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set when the writer is to pause."""
        self._raw.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """Return how much waits to be written."""
        return self._raw.get_write_buffer_size()

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the connection's protocol."""
        return self._raw.get_protocol()
