"""A ZMTP 3 peer on a plain TCP socket, without libzmq. Like go-zeromq, it answers no ZMTP command.

Source: https://rfc.zeromq.org/spec/23/, NULL mechanism.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Final

from tests.doubles.bus import eventually

_MORE, _LONG, _COMMAND = 1, 2, 4
_SMALL: Final = 8192


def _short(value: bytes) -> bytes:
    return bytes([len(value)]) + value


class BarePeer:
    """One ZMTP connection, which records every command and message that arrives.

    Args:
        reader: reads from the connection.
        writer: writes to the connection.
        kind: socket type that the peer announces, such as ``b"SUB"``.
        minor: minor version of ZMTP 3 that the peer announces.
        pace: seconds that the peer waits after each message.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        kind: bytes,
        *,
        minor: int = 0,
        pace: float = 0.0,
    ) -> None:
        self.messages: list[list[bytes]] = []
        self.commands: list[bytes] = []
        """Names of the received commands. The first is READY of the handshake."""
        self.gone = False
        """Whether kvbus has ended the connection."""
        self._reader = reader
        self._writer = writer
        self._pace = pace
        signature = b"\xff" + bytes(8) + b"\x7f"
        writer.write(signature + bytes([3, minor]) + b"NULL".ljust(20, b"\0") + bytes(32))
        self.command(b"READY", _short(b"Socket-Type") + len(kind).to_bytes(4, "big") + kind)
        self._reading = asyncio.ensure_future(self._read())

    def send(self, *frames: bytes) -> None:
        """Send one message. Each of its frames may have at most 255 bytes."""
        for frame in frames[:-1]:
            self._writer.write(bytes([_MORE]) + _short(frame))
        self._writer.write(b"\0" + _short(frames[-1]))

    def command(self, name: bytes, body: bytes) -> None:
        self._writer.write(bytes([_COMMAND]) + _short(_short(name) + body))

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._reader.readexactly(64)
            frames: list[bytes] = []
            while True:
                flags = (await self._reader.readexactly(1))[0]
                size = await self._reader.readexactly(8 if flags & _LONG else 1)
                body = await self._reader.readexactly(int.from_bytes(size, "big"))
                if flags & _COMMAND:
                    self.commands.append(body[1 : 1 + body[0]])
                    continue
                frames.append(body)
                if not flags & _MORE:
                    self.messages.append(frames)
                    frames = []
                    await asyncio.sleep(self._pace)
        self.gone = True

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@contextlib.asynccontextmanager
async def dialled(port: int, kind: bytes, *, minor: int = 0, pace: float = 0.0) -> AsyncIterator[BarePeer]:
    """Yield a peer that has connected to a port and completed the handshake.

    With ``pace``, the peer waits this many seconds after each message, and has small buffers. So kvbus must wait when
    it sends to the peer.
    """
    raw = socket.socket()
    if pace:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL)
    raw.connect(("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=_SMALL)
    peer = BarePeer(reader, writer, kind, minor=minor, pace=pace)
    try:
        await eventually(lambda: peer.commands, "the handshake")  # messages may be sent only after the handshake
        yield peer
    finally:
        await peer.close()


@contextlib.asynccontextmanager
async def listening(port: int, kind: bytes) -> AsyncIterator[list[BarePeer]]:
    """Yield a list of peers. Listen on a port, and append a peer for each accepted connection."""
    peers: list[BarePeer] = []

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(BarePeer(reader, writer, kind))

    server = await asyncio.start_server(accepted, "127.0.0.1", port)
    try:
        yield peers
    finally:
        server.close()
        for peer in peers:
            await peer.close()
        await server.wait_closed()
