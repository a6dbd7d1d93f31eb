"""A TCP proxy that injects faults: cut, stalled, slow, half-open and refused connections, and lost ZMQ messages."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, Self

Side = Literal["server", "client"]
_CHUNK: Final = 64 * 1024
_RESET: Final = struct.pack("ii", 1, 0)


@dataclass
class WireFaults:
    """Faults that the proxy will apply to the next ZMQ messages, and records of the messages that had a fault.

    `drop`, `double` and `swap` are the remaining numbers of messages to drop, to send twice, and to swap. The proxy
    applies faults only to the messages of one side, which `Link` gets as `talks`.
    """

    drop: int = 0
    double: int = 0
    swap: int = 0
    dropped: list[int] = field(default_factory=list)
    doubled: int = 0
    swapped: int = 0


class Connection:
    """One connection through the proxy: from a client to the proxy, and from the proxy to the server."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.half_open = False

    def close(self, *, reset: bool) -> None:
        for writer in (self.client, self.server):
            _close(writer, reset=reset)


def _close(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    if reset and (raw := writer.get_extra_info("socket")) is not None:
        with contextlib.suppress(OSError, ValueError):  # the socket may be closed already
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


class Link:
    """A proxy that listens on ``port`` and forwards every connection to the port ``target`` on loopback.

    Args:
        name: name of the link in reports.
        port: port to listen on.
        target: port to forward to.
        talks: side whose messages get the faults of `wire`: the client, the server, or None for no side.
        host: address to listen on.
    """

    def __init__(self, name: str, port: int, target: int, talks: Side | None = None, host: str = "127.0.0.1") -> None:
        self.name = name
        self.port = port
        self.host = host
        self._target = target
        self._talks = talks
        self._server: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._binding = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._delay = 0.0
        self._allowance: int | None = None
        self.wire = WireFaults()
        self.cut_at = 0
        """Number of the piece of data that the proxy discards, to end its connection there.

        Pieces of both directions count from 1; 0 means no piece.
        """
        self.cut_answer = False
        """Whether the proxy will discard the next data from the server and end its connection."""
        self.chunks = self.cuts = 0
        """`chunks` counts the pieces of data that passed in both directions.

        `cuts` counts the pieces at which the proxy ended a connection.
        """
        self.accepted = 0
        self.delayed = 0
        """Number of pieces of data that the proxy has delayed."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, self.host, self.port, limit=_CHUNK)

    async def close(self) -> None:
        await self.refuse()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def connections(self) -> int:
        return len(self._connections)

    # -- faults ------------------------------------------------------------------------------------------------------

    def cut(self, *, reset: bool) -> int:
        """Close every connection, with RST if ``reset`` and otherwise with FIN.

        Return the number of closed connections.
        """
        cut = list(self._connections)
        for connection in cut:
            connection.close(reset=reset)
        return len(cut)

    def cut_after(self, size: int | None) -> None:
        """Cut the connection once, after one side (the `talks` of this link) has sent ``size`` more bytes.

        None cancels a pending cut.
        """
        self._allowance = size

    @property
    def to_be_cut(self) -> bool:
        """Whether a cut that `cut_after` requested is still pending."""
        return self._allowance is not None

    def move(self, target: int) -> None:
        """Cut all connections, and forward new connections to another port."""
        self._target = target
        self.cut(reset=False)

    def stall(self) -> int:
        """Stop forwarding in both directions without closing a connection. Return the number of stalled connections."""
        self._open.clear()
        return len(self._connections)

    def flow(self) -> None:
        """End the stall and the delay: forward data again without waiting."""
        self._open.set()
        self._delay = 0.0

    def slow(self, seconds: float) -> None:
        """Delay all data by this many seconds."""
        self._delay = seconds

    def half_open(self) -> int:
        """Close the server's side of each connection but not the client's.

        Return the number of clients that this affects.
        """
        lonely = [connection for connection in self._connections if not connection.half_open]
        for connection in lonely:
            connection.half_open = True
            _close(connection.server, reset=True)
        return len(lonely)

    def drop_half_open(self) -> None:
        """Close the client's side of each connection whose server's side `half_open` has closed."""
        for connection in list(self._connections):
            if connection.half_open:
                connection.close(reset=True)

    async def refuse(self) -> None:
        """Stop listening, and cut all connections, so that the kernel refuses new ones."""
        async with self._binding:
            if self._server is not None:
                self._server.close()
                self._server = None
        self.cut(reset=False)

    async def listen(self) -> None:
        """Accept connections again, if `refuse` has stopped the link from accepting them."""
        async with self._binding:
            if self._server is None:
                await self.start()

    # -- traffic -----------------------------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # connections are meant to break here
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        behind, onward = await asyncio.open_connection("127.0.0.1", self._target, limit=_CHUNK)
        if self._delay:  # otherwise the kernel may accept a complete answer of the target before the link forwards it
            onward.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _CHUNK)
        connection = Connection(writer, onward)
        self._connections.add(connection)
        try:
            pumps = [
                asyncio.ensure_future(self._pump(connection, reader, onward, "client")),
                asyncio.ensure_future(self._pump(connection, behind, writer, "server")),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                while connection.half_open and not pumps[0].done():
                    await asyncio.wait(pumps[:1])
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            connection.close(reset=False)
            self._connections.discard(connection)

    async def _pump(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, side: Side
    ) -> None:
        splitter = Splitter() if side == self._talks else None
        held: bytes | None = None
        while chunk := await reader.read(_CHUNK):
            self.chunks += 1
            if self.chunks == self.cut_at or (self.cut_answer and side == "server"):
                self.cut_answer = False
                self.cuts += 1
                connection.close(reset=False)
                return
            if self._delay:
                self.delayed += 1
                await asyncio.sleep(self._delay)
            await self._open.wait()
            if connection.half_open:
                continue  # discard the chunk: the server's connection is closed
            if splitter is None:
                writer.write(chunk)
            else:
                if self._allowance is not None:
                    self._allowance -= len(chunk)
                    if self._allowance < 0:
                        self._allowance = None
                        connection.close(reset=False)
                        return
                for frames, piece in splitter.feed(chunk):
                    held = self._watch(writer, frames, piece, held)
            await writer.drain()

    def _watch(
        self, writer: asyncio.StreamWriter, frames: list[bytes] | None, piece: bytes, held: bytes | None
    ) -> bytes | None:
        """Forward a message or other protocol element, or apply the next fault to it.

        Return the message that the proxy holds back until the next message has overtaken it (the fault `swap`), or
        None.
        """
        wire = self.wire
        if frames is None or len(frames) != 3:
            writer.write(piece)
            return held
        if held is not None:
            writer.write(piece)
            writer.write(held)
            return None
        if wire.drop:
            wire.drop -= 1
            wire.dropped.append(int.from_bytes(frames[1][:8], "big"))
        elif wire.swap:
            wire.swap -= 1
            wire.swapped += 1
            return piece
        else:
            writer.write(piece)
            if wire.double:
                wire.double -= 1
                wire.doubled += 1
                writer.write(piece)
        return None


GREETING: Final = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


class Splitter:
    """A parser that splits a ZMTP byte stream into the greeting, commands and complete messages.

    >>> splitter = Splitter()
    >>> for frames, piece in splitter.feed(chunk): ...

    ``piece`` has the raw bytes of one element; the pieces together are the stream. ``frames`` has the frames of a
    message. It is None if the piece is the greeting or a command.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._greeting = GREETING  # bytes of the greeting that have not arrived; both sides send it in parts, in turn

    def feed(self, chunk: bytes) -> Iterator[tuple[list[bytes] | None, bytes]]:
        self._buffer += chunk
        while (found := self._next()) is not None:
            frames, size = found
            piece = bytes(self._buffer[:size])
            del self._buffer[:size]
            yield frames, piece

    @property
    def waiting(self) -> int:
        """Number of received bytes that do not form a complete element yet."""
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
