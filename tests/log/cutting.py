"""Between a writer and its server: a request, or an answer, that never arrives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.ports import free_ports


class Cutting:
    """Hands everything on. While ``cut`` is set, what the server says ends the connection instead.

    So does the piece with the number ``at``, whichever of the two says it; ``handed`` counts them.
    """

    def __init__(self, server: int) -> None:
        self._server = server
        (self._port,) = free_ports(1)
        self.cut = False
        self.cuts = self.handed = self.at = 0
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Cutting]:
        async with await asyncio.start_server(self._accept, "127.0.0.1", self._port):
            try:
                yield self
            finally:
                for connection in self._connections:
                    connection.cancel()
                await asyncio.gather(*self._connections, return_exceptions=True)

    def move(self, server: int) -> None:
        """Another server has the address, and whoever was connected is so no more."""
        self._server = server
        for connection in self._connections:
            connection.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.ensure_future(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server)
        ways = [
            asyncio.ensure_future(self._hand_on(reader, server_writer)),
            asyncio.ensure_future(self._hand_on(server_reader, writer, cuts=True)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            writer.close()
            server_writer.close()

    async def _hand_on(self, source: asyncio.StreamReader, to: asyncio.StreamWriter, *, cuts: bool = False) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                self.handed += 1
                if (cuts and self.cut) or self.handed == self.at:
                    self.cut = False
                    self.cuts += 1
                    return
                to.write(data)
                await to.drain()
